"""Two engines that are started elsewhere, and a frontend that spreads prompts over them.

    python examples/engines_elsewhere.py [PORT]

"Elsewhere" is this machine here. On other machines, give both sides ``--data-parallel-address``, an address of the
frontend's machine.
"""

from __future__ import annotations

import subprocess
import sys

from enginewire import LLM, SamplingParams

PORT = sys.argv[1] if len(sys.argv) > 1 else "29550"

HEADLESS = [sys.executable, "-m", "enginewire", "serve", "echo", "--headless", "--log-level", "error"]


def node(rank: int) -> subprocess.Popen[bytes]:
    """Start a node with one of the two engines. It may come before its frontend or after."""
    where = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--data-parallel-start-rank", str(rank)]
    return subprocess.Popen([*HEADLESS, *where, "--data-parallel-rpc-port", PORT], stderr=subprocess.DEVNULL)


def main() -> None:
    """Generate with both."""
    nodes = [node(0), node(1)]
    try:
        settings = {"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_rpc_port": int(PORT)}
        with LLM("echo", **settings) as llm:
            prompts = [f"prompt {i} " for i in range(4)]
            for output in llm.generate(prompts, SamplingParams(max_tokens=9)):
                print(output.prompt, "→", output.outputs[0].text)
    finally:
        for process in nodes:
            process.terminate()
        for process in nodes:
            process.wait()


if __name__ == "__main__":
    main()
