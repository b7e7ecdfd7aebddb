"""End to end: one model on one machine, through ours and through others.

    python benchmarks/bench_llm.py [--quick] [--out FOLDER] [--vllm PYTHON] [--llama PYTHON]

- ``bare OpenVINO``: a loop that adds, steps and reads; the least that can be written on top of the library.
- ``LLM``: ours, with its engine in processes of its own: it checks, schedules, sends over two process boundaries,
  applies stop rules and makes text. Same model file and settings as the bare loop.
- ``server``: ``enginewire serve``, over HTTP, a connection and a stream for each request.
- ``vLLM``: its ``LLM``, same model in bfloat16, the environment of ``make interop``.
- ``llama.cpp``: its HTTP server as ``xllamacpp`` brings it, same model file, as many slots as requests, as many threads
  as the others; streams like ``server``. ``benchmarks/setup_llama.sh`` makes the environment.

Each is a process (``llm_contestants.py``). They take turns within a round, so that what else the machine does hits all:
those that are compared most closely one right after the other, in one order and then in the other. Two processes of
the same loop are 2 to 7 % apart for as long as they live, so a full run starts ours twelve times, for two rounds each
(with three starts of five rounds the same ratio was 0.91 and 0.99), and the peers three times. Each round has new
prompts, so that none is found in a prefix cache. All make the same number of tokens, greedily. A row ``tokens per CPU
s`` has the CPU time of all processes of a contestant, those that make the HTTP load among them; it is what to look at
where the machine is busy with other things.

``ready`` is from starting the process to its first token. In rows about a long prompt, the column ``bare OpenVINO`` is
what bounds ours: the longest step.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from harness import Suite, arguments_for, finish
from llm_contestants import Round

from enginewire.models import cache_dir, resolve_model

MODEL = "smollm2-135m"
INTEROP = Path(os.environ.get("ENGINEWIRE_INTEROP_DIR") or cache_dir() / "interop")
LLAMA = cache_dir() / "bench" / "llama" / "bin" / "python"
BASES = {"LLM": ["bare OpenVINO", "vLLM", "llama.cpp"], "server": ["bare OpenVINO", "llama.cpp"]}
PEERS = ("llama.cpp", "vLLM")
"""Much slower in large batches, so that few rounds will do."""

LONG_PROMPT_TOKENS = 4000
SEED = 20250101
PAUSE_S = 0.002
"""Between two utility calls: about 3,000 of them while a long prompt is computed."""

SETTLE_S = 0.1

WARM_UP_TOKENS = 8


class Contestant:
    """A process of ``llm_contestants.py`` that is ready to run."""

    def __init__(self, name: str, python: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        start = time.monotonic()
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("llm_contestants.py"), name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._receive()
        self.ready_s = time.monotonic() - start

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of it and return what that returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def run(self, prompts: list[list[int]], new_tokens: int) -> Round:
        """Generate."""
        result = Round(*self.call("run", prompts, new_tokens))
        assert result.tokens == len(prompts) * new_tokens, f"{self.name}: {result.tokens} tokens came"
        return result

    def cpu_s(self) -> float:
        """Return the CPU time of it and all processes below it so far."""
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(used.user + used.system for used in times)

    def settle(self) -> None:
        """Wait until it rests: threads of native libraries go on spinning for a while, which the next would pay."""
        cpu, rests = self.cpu_s(), False
        while not rests:
            time.sleep(SETTLE_S)
            before, cpu = cpu, self.cpu_s()
            rests = cpu - before < 0.1 * SETTLE_S

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()  # closes its standard input
        self._log.close()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(
                f"{self.name} ended with exit code {self._process.returncode}:\n{self._log.read()[-4000:]}"
            )
        return json.loads(line)


class Lineup:
    """The contestants of a run, by name. They end with ``stack``."""

    def __init__(self, pythons: dict[str, Path], stack: ExitStack) -> None:
        self._pythons = pythons
        self._stack = stack
        self._settings = {
            "model": MODEL,
            "gguf": str(resolve_model(MODEL)),
            "hf": str(INTEROP / "hf"),
            "threads": psutil.cpu_count(logical=False) or 1,
        }
        self.here: dict[str, Contestant] = {}

    def start_all(self) -> None:
        """Start those that will run; ours comes first and says how the bare loop is to be set."""
        for name in self._pythons:
            contestant = self.here[name] = self._start(name)
            self._stack.callback(contestant.close)
            if name == "LLM":
                self._settings["scheduler"] = contestant.call("scheduler")

    def _start(self, name: str) -> Contestant:
        return Contestant(name, self._pythons[name], self._settings)


def random_prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """Return prompts that nobody has seen."""
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True)
class Plan:
    """How much is measured: ``tokens`` by batch size, rounds of each start, and at which starts the peers are there.

    A quick run has llama.cpp in small batches only: 64 requests would take it half of the whole run's time.
    """

    quick: bool
    prompt_tokens: int
    tokens: dict[int, int]
    rounds: int
    peer_rounds: int
    starts: int
    peers_every: int
    aborts: int

    def rounds_of(self, name: str, batch: int) -> int:
        """Return how many rounds a contestant runs."""
        if self.quick and name == "llama.cpp" and batch > 16:
            return 0
        return self.peer_rounds if name in PEERS else self.rounds


FULL = Plan(False, 32, {1: 128, 16: 64, 64: 64}, rounds=2, peer_rounds=1, starts=12, peers_every=4, aborts=10)
QUICK = Plan(True, 16, {1: 48, 16: 16, 64: 8}, rounds=2, peer_rounds=1, starts=1, peers_every=1, aborts=2)


def measure_batch(suite: Suite, lineup: Lineup, batch: int, plan: Plan, rng: random.Random) -> None:
    """Run rounds of one batch size, the peers last: they take so long that the others would be far apart."""
    tokens = plan.tokens.get(batch, 32)
    rounds = {name: count for name in lineup.here if (count := plan.rounds_of(name, batch))}
    what = f"{batch} request{'s' * (batch > 1)}"
    for contestant in (lineup.here[name] for name in rounds):
        if contestant.name == "llama.cpp":
            contestant.call("prepare", batch)
        contestant.run(random_prompts(rng, batch, plan.prompt_tokens), WARM_UP_TOKENS)
        contestant.settle()
    idle_share = 0.0
    for index in range(max(rounds.values())):
        own = [name for name in rounds if name not in PEERS]
        peers = [name for name, count in rounds.items() if name in PEERS and index < count]
        prompts = random_prompts(rng, batch, plan.prompt_tokens)
        for name in [*(reversed(own) if index % 2 else own), *peers]:
            contestant = lineup.here[name]
            others = [other for other in lineup.here.values() if other is not contestant]
            # It has been idle for up to four runs of others, and machines take memory away from who is.
            contestant.run(random_prompts(rng, batch, 4), WARM_UP_TOKENS)
            cpu, idle_cpu = contestant.cpu_s(), sum(other.cpu_s() for other in others)
            result = contestant.run(prompts, tokens)
            cpu, idle_cpu = contestant.cpu_s() - cpu, sum(other.cpu_s() for other in others) - idle_cpu
            idle_share = max(idle_share, idle_cpu / cpu)
            contestant.settle()
            suite.add(f"tokens/s, {what}", name, result.tokens / result.seconds)
            suite.add(f"first token p50, ms, {what}", name, result.first_token * 1e3, lower_is_better=True)
            suite.add(f"tokens per CPU s, {what}", name, result.tokens / cpu)
    suite.machine["idle_cpu_share"] = round(max(idle_share, suite.machine.get("idle_cpu_share", 0.0)), 3)


def measure_long_prompt(suite: Suite, lineup: Lineup, num_aborts: int, rng: random.Random) -> None:
    """See what a long prompt keeps waiting: calls that need no executor should not wait, an abort for one step."""

    def prompt() -> list[int]:
        return random_prompts(rng, 1, LONG_PROMPT_TOKENS)[0]

    during = f"during a prompt of {LONG_PROMPT_TOKENS:,}"
    ours, bare = lineup.here["LLM"], lineup.here["bare OpenVINO"]
    calls = sorted(ours.call("utilities", prompt(), PAUSE_S))
    suite.add(f"utility call p50, ms, {during}", "LLM", statistics.median(calls) * 1e3, lower_is_better=True)
    suite.add(f"utility call p99, ms, {during}", "LLM", calls[int(len(calls) * 0.99)] * 1e3, lower_is_better=True)
    steps = bare.call("steps", prompt())
    step = statistics.median(steps)
    typical, longest = f"typical step or abort, ms, {during}", f"longest step or abort, ms, {during}"
    suite.add(typical, "bare OpenVINO", step * 1e3, lower_is_better=True)
    suite.add(longest, "bare OpenVINO", max(steps) * 1e3, lower_is_better=True)
    aborts = [ours.call("abort", prompt(), rng.uniform(1, 8) * step) for _ in range(num_aborts)]
    suite.add(typical, "LLM", statistics.median(aborts) * 1e3, lower_is_better=True)
    suite.add(longest, "LLM", max(aborts) * 1e3, lower_is_better=True)


def main() -> None:
    """Measure, print the table and save the figures."""
    parser = arguments_for(__doc__, quick="two rounds of fewer tokens; one of the peers")
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help=f"of one that has xllamacpp (default: {LLAMA})")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="leave these columns out")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64], metavar="N")
    arguments = parser.parse_args()
    llama = arguments.llama or (LLAMA if LLAMA.exists() else None)
    if llama is None:
        print("Without llama.cpp: benchmarks/setup_llama.sh makes an environment for it.", flush=True)
    own = Path(sys.executable)
    pythons = {"LLM": own, "bare OpenVINO": own, "server": own}
    pythons |= {name: python for name, python in (("llama.cpp", llama), ("vLLM", arguments.vllm)) if python}
    pythons = {name: python for name, python in pythons.items() if name not in arguments.without}
    plan = QUICK if arguments.quick else FULL

    rng = random.Random(SEED)
    suite = Suite("llm", BASES)
    for start in range(plan.starts):
        with ExitStack() as stack:
            has_peers = start % plan.peers_every == 0
            lineup = Lineup({name: each for name, each in pythons.items() if has_peers or name not in PEERS}, stack)
            lineup.start_all()
            for name, contestant in lineup.here.items():
                suite.add("ready, s", name, contestant.ready_s, lower_is_better=True)
            for batch in arguments.batches:
                measure_batch(suite, lineup, batch, plan, rng)
            if start == plan.starts - 1:
                measure_long_prompt(suite, lineup, plan.aborts, rng)
    finish(suite, arguments)


if __name__ == "__main__":
    main()
