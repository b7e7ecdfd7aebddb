"""What the servers cost: CPU time per streamed token, tokens per second, time to the first token.

    python benchmarks/bench_serve.py [--quick] [--rounds 3] [--vllm PYTHON] [--out FOLDER]

``enginewire serve`` against ``vllm serve``, as both are by default. Each is a frontend without an engine of its own;
an echo engine of ours, one for each, connects to it by the handshake, so that the server is what is measured. *Paced*
is 20 tokens a second for each stream: one token a message, and an event for each, as with a real engine. *Full speed*
is an engine faster than any server, which merges what it cannot send one by one.

The servers take turns, level by level. Before that it is checked that they give the same texts and usage. The load
generator, the server and the engine share the machine's cores: compare CPU times, and ratios of one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import load
from harness import Suite, arguments_for, finish

from enginewire.testing import free_tcp_port

HERE = Path(__file__).parent
START_S = 240.0
LEAVE_S = 40.0
PACE_S = 0.05
MAX_MODEL_LEN = 8192
WHERE = ["--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port"]
VLLM_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"}
OURS, VLLM = "enginewire", "vLLM"


@dataclass(frozen=True, slots=True)
class Level:
    """How many streams, of how many tokens, at which pace."""

    streams: int
    tokens: int
    pace_s: float = 0.0
    is_chat: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        what = f"{self.streams} stream{'s' * (self.streams > 1)}{', chat' * self.is_chat}"
        return f"{what}, {'paced' if self.pace_s else 'full speed'}"

    def requests(self, model: str) -> list[bytes]:
        """Make the requests, each with a prompt of its own."""
        return [load.post(*request(model, index, self)) for index in range(self.streams)]


def request(model: str, index: int, level: Level, *, stream: bool = True) -> tuple[str, dict[str, Any]]:
    """Return path and body of one request."""
    text = f"{index} engines went down to the sea, and the first of them said:"
    body = {"model": model, "max_tokens": level.tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if level.pace_s:
        body["vllm_xargs"] = {"pace_s": level.pace_s}
    if level.is_chat:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs; ``pids`` are those of its processes, without the engine's."""

    port: int
    pids: list[int]
    model: str

    def cpu_s(self) -> float:
        """Return the CPU time of its processes so far."""
        # The kernel's name for another process's CPU clock: clock_getcpuclockid(3), which Python does not have.
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)

    def ask(self, path: str, body: dict[str, Any]) -> bytes:
        """Send a request and return the response's body."""
        url, content = f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode()
        asked = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            return bytes(response.read())


# The servers.


@contextlib.contextmanager
def process(command: list[Any], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and show the end of what it says if the block fails."""
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
        )
        try:
            yield started
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            started.terminate()
            try:
                started.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                started.kill()


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


@contextlib.contextmanager
def serving(
    command: list[Any], model: str, env: dict[str, str] | None = None, num_engines: int = 1
) -> Iterator[Server]:
    """Run a server that is told ``--port`` and where engines come, with echo engines that come there."""
    port, engine_port = free_tcp_port(), free_tcp_port()
    flags = [*WHERE, engine_port, "--max-model-len", MAX_MODEL_LEN]
    engine = [sys.executable, "-m", "enginewire", "serve", "echo", "--headless", "--engine", "paced_echo:PacedEcho"]
    if num_engines > 1:
        flags += ["--data-parallel-size", num_engines]
    at = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", engine_port]
    engine += [*at, "--max-model-len", MAX_MODEL_LEN, "--max-num-seqs", 4096, "--data-parallel-size", num_engines]
    path = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with process([*command, "--port", port, *flags], env) as server, process(engine, path) as host:
        deadline = time.monotonic() + START_S
        while not is_ready(port):
            if server.poll() is not None or host.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not get ready")
            time.sleep(0.2)
        yield Server(port, family(server.pid), model)


def is_ready(port: int) -> bool:
    """Whether requests are served."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def ours(tokenizer: Path | None, *further: str) -> contextlib.AbstractContextManager[Server]:
    """Run our server; without a tokenizer the echo engine's, which has a token for each byte."""
    command = [sys.executable, "-m", "enginewire", "serve", "echo", *further]
    return serving(command + (["--tokenizer", tokenizer] if tokenizer else []), "echo")


def vllm(python: Path, *further: str) -> contextlib.AbstractContextManager[Server]:
    """Run vLLM's server; the model's folder is next to its environment."""
    model = model_of(python)
    cli = HERE.parent / "tests/interop/vllm_cli.py"
    return serving([python, cli, "serve", model, *further], str(model), VLLM_ENV)


def model_of(python: Path) -> Path:
    """Return the Hugging Face folder that ``make interop`` makes next to an environment."""
    return python.parents[2] / "hf"


# What is measured.


def contents(server: Server, level: Level) -> list[dict[str, Any]]:
    """Return what comes of a few requests, each as one response and as a stream, without what must differ."""
    found = []
    for index in range(4):
        whole = json.loads(server.ask(*request(server.model, index, level, stream=False)))
        choice = whole["choices"][0]
        found.append({"text": text_of(choice, "message"), "end": choice["finish_reason"], "usage": counts(whole)})
        lines = server.ask(*request(server.model, index, level)).split(b"\n\n")
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(text_of(choice, "delta") for choice in choices)
        found.append({"text": text, "end": choices[-1]["finish_reason"], "usage": counts(events[-1])})
    return found


def text_of(choice: dict[str, Any], name: str) -> str:
    """Return a choice's text; chat completions have it in ``message`` or ``delta``."""
    return choice["text"] if "text" in choice else choice[name].get("content") or ""


def counts(body: dict[str, Any]) -> dict[str, int]:
    """Return the usage's counts."""
    return {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def measure(suite: Suite, column: str, server: Server, level: Level) -> None:
    """Run one level on one server, note its figures, and print them."""
    cpu = server.cpu_s()
    done = load.run(server.port, level.requests(server.model))
    cpu = server.cpu_s() - cpu
    name = level.name
    suite.add(f"{name}: CPU s per million tokens", column, cpu * 1e6 / done.tokens, lower_is_better=True)
    if not level.pace_s:
        suite.add(f"{name}: tokens/s", column, done.tokens / done.elapsed)
    suite.add(f"{name}: first token p50, ms", column, done.first(0.5) * 1e3, lower_is_better=True)
    if level.streams > 1:
        suite.add(f"{name}: first token p99, ms", column, done.first(0.99) * 1e3, lower_is_better=True)
    per_token = suite.machine.setdefault("events per token", {}).setdefault(name, {}).setdefault(column, [])
    per_token.append(round(done.events / done.tokens, 3))
    print(
        f"{column:<12}{name:<28}{done.tokens:>9} tokens {done.events:>9} events {done.tokens / done.elapsed:>9.0f}/s"
        f"{cpu * 1e6 / done.tokens:>9.1f} CPU s/million{done.first(0.5) * 1e3:>9.1f}{done.first(0.99) * 1e3:>9.1f} ms",
        flush=True,
    )


def levels(*, quick: bool) -> list[Level]:
    """Return what is measured. A paced level takes seven seconds, one at full speed what the server needs."""
    paced = [Level(streams, 128, PACE_S) for streams in ((64,) if quick else (1, 16, 64, 256))]
    fast = [Level(64, 1000)] if quick else [Level(1, 4000), Level(64, 1000), Level(256, 250)]
    return [*paced, Level(64, 128, PACE_S, is_chat=True), *fast]


def main() -> None:
    """Start the servers, compare what they say, measure, print, save."""
    parser = arguments_for(__doc__, quick="two levels at 64 streams, one round")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    args = parser.parse_args()
    suite = Suite("serve", {OURS: [VLLM]})
    with contextlib.ExitStack() as stack:
        tokenizer = None if args.vllm is None else model_of(args.vllm)
        servers = {OURS: stack.enter_context(ours(tokenizer))}
        if args.vllm is not None:
            servers[VLLM] = stack.enter_context(vllm(args.vllm))
        for is_chat in (False, True):
            said = [contents(server, Level(1, 40, is_chat=is_chat)) for server in servers.values()]
            if any(each != said[0] for each in said):
                raise SystemExit(f"the servers do not say the same:\n{json.dumps(said, indent=1)}")
        print("The servers give the same texts, ends and usage." if len(servers) > 1 else "", flush=True)
        for server in servers.values():
            for is_chat in (False, True):
                load.run(server.port, Level(16, 32, is_chat=is_chat).requests(server.model))
        for _ in range(args.rounds or (1 if args.quick else 3)):
            for level in levels(quick=args.quick):
                for column, server in servers.items():
                    measure(suite, column, server, level)
    finish(suite, args)


if __name__ == "__main__":
    main()
