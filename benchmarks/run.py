"""Runs the suites one after the other, and checks what they measured.

    python benchmarks/run.py [SUITE…] [--quick] [--vllm PYTHON | --no-vllm]   figures into build/bench
    python benchmarks/run.py --check                                          quick, against the committed figures
    python benchmarks/run.py --publish                                        the last figures become the committed ones

The peer's columns need vLLM in an environment of its own: the one that ``make interop`` makes is found by itself.

``--check`` compares ratios, never absolute times: each figure of ours against the same run's raw code or peer, with
that ratio in the last full run. A quick run on a noisy machine has to reach ``LOOSE`` of it, or the suite runs again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import FRESH, RESULTS, Suite

SUITES = ("client", "engine", "llm", "serve", "scaling")
LOOSE = 0.5
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
INTEROP = CACHE / "enginewire/interop/vllm-0.25.1/bin/python"


def measure(suite: str, folder: Path, *, quick: bool, vllm: Path | None) -> bool:
    """Run one suite in a process of its own; say so and return False if it fails."""
    command = [sys.executable, str(Path(__file__).with_name(f"bench_{suite}.py")), "--out", str(folder)]
    command += ["--quick"] * quick + (["--vllm", str(vllm)] if vllm else [])
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"bench_{suite}.py failed with exit code {code}", file=sys.stderr, flush=True)
    return code == 0


def measure_all(suites: Sequence[str], folder: Path, *, quick: bool, vllm: Path | None) -> list[str]:
    """Run suites and return the names of those that failed."""
    failed = []
    for i, suite in enumerate(suites, 1):
        start = time.monotonic()
        print(f"\n=== {suite} ({i} of {len(suites)})", flush=True)
        if not measure(suite, folder, quick=quick, vllm=vllm):
            failed.append(suite)
        print(f"=== {suite}: {time.monotonic() - start:.0f} s", flush=True)
    return failed


def shortfalls(suite: str, folder: Path) -> tuple[int, list[str]]:
    """Return how many ratios could be compared with the committed ones, and those that fall short of them."""
    now, then = Suite.load(folder / f"{suite}.json").ratios(), Suite.load(RESULTS / f"{suite}.json").ratios()
    both = [cell for cell in then if cell in now]
    short = [
        f"{suite}: {row}, {column} against {base}: ×{now[row, column, base]:.2f}, was ×{then[row, column, base]:.2f}"
        for row, column, base in both
        if now[row, column, base] < LOOSE * then[row, column, base]
    ]
    return len(both), short


def check(suites: Sequence[str], vllm: Path | None) -> int:
    """Measure quickly, compare with the committed ratios, and return the exit code."""
    folder = FRESH.with_name("bench-check")
    failed = measure_all(suites, folder, quick=True, vllm=vllm)
    compared, short = 0, []
    for suite in suites:
        if suite in failed:
            continue
        count, missing = shortfalls(suite, folder)
        if missing:
            print(f"\n{suite}: once more, {len(missing)} of {count} ratios fell short", flush=True)
            measure(suite, folder, quick=True, vllm=vllm)
            again = {line.rsplit(":", 1)[0] for line in shortfalls(suite, folder)[1]}
            missing = [line for line in missing if line.rsplit(":", 1)[0] in again]
        compared += count
        short += missing
    print(f"\n{compared} ratios compared with the last full run, {len(short)} below {LOOSE} of it", *short, sep="\n  ")
    return 1 if failed or short or not compared else 0


def publish() -> None:
    """Make the last figures the committed ones, and RESULTS.md and its charts of them."""
    RESULTS.mkdir(exist_ok=True)
    for path in FRESH.glob("*.json"):
        shutil.copy(path, RESULTS)
    subprocess.run([sys.executable, str(Path(__file__).with_name("report.py"))], check=True)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute each")
    parser.add_argument("--vllm", type=Path, default=INTEROP, help="an interpreter with vLLM (default: %(default)s)")
    parser.add_argument("--no-vllm", action="store_true", help="leave the peer's columns out")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is far below the committed one")
    parser.add_argument("--publish", action="store_true", help="measure nothing: commit what was measured last")
    arguments = parser.parse_args()
    suites = arguments.suites or SUITES
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if arguments.publish:
        publish()
        return 0
    vllm = None if arguments.no_vllm or not arguments.vllm.exists() else arguments.vllm
    if vllm is None:
        print("Without the peer's columns: give --vllm PYTHON, or let `make interop` make an environment.", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and with it the suite that runs
    if arguments.check:
        return check(suites, vllm)
    return 1 if measure_all(suites, FRESH, quick=arguments.quick, vllm=vllm) else 0


if __name__ == "__main__":
    sys.exit(main())
