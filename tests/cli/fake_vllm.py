"""A stand-in for vLLM's command line: the same words, and behind them an echo engine in a child process.

:func:`install` writes a package ``vllm`` that runs this module, for the Python that tests run with.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

MAIN = "from fake_vllm import main\n"


def install(folder: Path) -> dict[str, str]:
    """Write the package; return the environment in which it is found."""
    package = folder / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for part in (folder / "vllm", folder / "vllm/entrypoints", package):
        (part / "__init__.py").touch()
    (package / "main.py").write_text(MAIN)
    path = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "FAKE_VLLM_SEEN": str(folder / "seen.json")}


def seen(folder: Path) -> dict[str, list[str]]:
    """Return what the launcher was given: its arguments and the variables that concern it."""
    return json.loads((folder / "seen.json").read_text())


def main() -> None:
    """Do as ``vllm serve MODEL --headless``: an engine in a child, status 0 however that ends."""
    assert sys.argv[:2] == ["vllm", "serve"]
    names = ("VLLM_DP_MASTER_IP", "VLLM_HOST_IP")
    Path(os.environ["FAKE_VLLM_SEEN"]).write_text(
        json.dumps({"arguments": sys.argv[2:], "variables": {name: os.environ.get(name) for name in names}})
    )
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--headless", action="store_true", required=True)
    parser.add_argument("--data-parallel-start-rank", type=int)
    parser.add_argument("--data-parallel-address")
    parser.add_argument("--data-parallel-rpc-port")
    parser.add_argument("--fail", action="store_true")
    args, _ = parser.parse_known_args(sys.argv[2:])
    address = f"tcp://{args.data_parallel_address}:{args.data_parallel_rpc_port}"
    if args.fail:
        print("(EngineCore pid=7) ERROR 11-29 18:31:14 [core.py:1231] ValueError: no room for the KV cache")
        print("(EngineCore pid=7) RuntimeError: Engine core initialization failed.")
        return
    with subprocess.Popen([sys.executable, __file__, address, str(args.data_parallel_start_rank)]) as engine:
        signal.signal(signal.SIGTERM, lambda number, frame: engine.terminate())
        engine.wait()
    print("INFO Shutting down.")


def engine_main() -> int:
    """Be the child."""
    from enginewire import EngineConfig
    from enginewire.engine.main import run_engine
    from enginewire.engine.spec import EngineSpec

    _, address, rank = sys.argv
    config = EngineConfig.create("echo")
    return run_engine(
        EngineSpec(config=config, handshake_address=address, engine_index=int(rank), local=False, headless=True)
    )


if __name__ == "__main__":
    sys.exit(engine_main())
