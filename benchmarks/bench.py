"""Tokens per second of ``LLM`` with its engine in a process of its own, against a bare OpenVINO step loop.

    python benchmarks/bench.py [--batches 1,16,64] [--seconds 50] [--min-ratio 0.95]

Both run the same model with the same settings on the same prompts, in turns within one run, so that what else the
machine does hits both; each round has new prompts, so that none is found in a prefix cache. The bare loop is the least
that can be written on top of the library: it adds, steps and reads token ids. ``LLM`` checks, schedules, sends over
two process boundaries, applies stop rules and makes text.

Prints a table and, last, one line of JSON. ``ratio`` is the median of the rounds' own ratios. On a machine that is busy
with other things the other two say more: ``best`` compares the best round of each side, ``cpu`` the tokens per second
of CPU time, of all processes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from enginewire import LLM, EngineConfig, SamplingParams, __version__
from enginewire.executors.openvino_options import OpenVINOOptions
from enginewire.models import resolve_model

PROMPT_TOKENS = 32
NEW_TOKENS = {1: 128, 16: 48}
"""By batch: enough that a round takes a second or so on an idle machine, and short enough that there are many."""

DEFAULT_NEW_TOKENS = 24
MIN_ROUNDS = 3
SEED = 20250101

Prompts = Sequence[list[int]]


class BareLoop:
    """OpenVINO GenAI and nothing else."""

    def __init__(self, config: EngineConfig) -> None:
        import openvino
        import openvino_genai as genai

        options = OpenVINOOptions()
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = config.num_gpu_blocks
        scheduler.max_num_batched_tokens = options.max_num_batched_tokens
        scheduler.max_num_seqs = config.max_num_seqs
        scheduler.enable_prefix_caching = options.enable_prefix_caching
        scheduler.dynamic_split_fuse = True
        path = str(resolve_model(config.model))
        self._pipeline: Any = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", options.plugin_properties())
        self._config_type = genai.GenerationConfig
        self._tensor = openvino.Tensor
        self._next_id = 0

    def run(self, prompts: Prompts, new_tokens: int) -> int:
        """Generate; return the number of new tokens."""
        import numpy as np

        handles = []
        for prompt in prompts:
            config = self._config_type()
            config.max_new_tokens = new_tokens
            config.ignore_eos = True
            config.do_sample = False
            self._next_id += 1
            tokens = self._tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, tokens, config))
        count = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle in handles:
                if handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
        return count


class Frontend:
    """``LLM`` through its subprocess."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, forward_engine_log=False)

    def run(self, prompts: Prompts, new_tokens: int) -> int:
        """Generate; return the number of new tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, progress=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def cpu_seconds() -> float:
    """Return the CPU time used so far by this process and those below it."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(used.user + used.system for used in times)


def time_round(side: BareLoop | Frontend, prompts: Prompts, new_tokens: int) -> tuple[float, float]:
    """Run one round; return tokens per second, and per second of CPU time."""
    cpu_begin, begin = cpu_seconds(), time.perf_counter()
    count = side.run(prompts, new_tokens)
    elapsed, cpu_elapsed = time.perf_counter() - begin, cpu_seconds() - cpu_begin
    assert count == len(prompts) * new_tokens, f"{count} tokens came, {len(prompts) * new_tokens} were asked for"
    return count / elapsed, count / cpu_elapsed


def measure(sides: dict[str, BareLoop | Frontend], batch: int, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Run rounds of one batch size for some seconds; who is first alternates."""
    new_tokens = NEW_TOKENS.get(batch, DEFAULT_NEW_TOKENS)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu_rates: dict[str, list[float]] = {name: [] for name in sides}
    deadline = time.monotonic() + seconds
    for round_index in itertools.count(-1):  # the first warms up
        if round_index >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        prompts = [[rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        order = list(sides) if round_index % 2 else list(sides)[::-1]
        for name in order:
            rate, cpu_rate = time_round(sides[name], prompts, 8 if round_index < 0 else new_tokens)
            if round_index >= 0:
                rates[name].append(rate)
                cpu_rates[name].append(cpu_rate)
    ratios = [ours / bare for ours, bare in zip(rates["llm"], rates["bare"], strict=True)]
    return {
        "batch": batch,
        "new_tokens": new_tokens,
        "bare": round(statistics.median(rates["bare"]), 1),
        "llm": round(statistics.median(rates["llm"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "best": round(max(rates["llm"]) / max(rates["bare"]), 3),
        "cpu": round(statistics.median(cpu_rates["llm"]) / statistics.median(cpu_rates["bare"]), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def commit() -> str | None:
    """Return the commit that is measured, ``None`` outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> int:
    """Measure and report; 1: a ratio is less than asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", default="1,16,64", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--seconds", type=float, default=50.0, help="for each batch size (default: 50)")
    parser.add_argument("--min-ratio", type=float, help="fail below this")
    args = parser.parse_args()

    rng = random.Random(SEED)
    frontend = Frontend(args.model)
    with frontend.llm as llm:
        sides: dict[str, BareLoop | Frontend] = {"bare": BareLoop(llm.config), "llm": frontend}
        gc.freeze()
        print("batch      bare       LLM   ratio    best     cpu   (tokens/s, medians; rounds' ratios)")
        results = []
        for batch in args.batches:
            result = measure(sides, batch, args.seconds, rng)
            results.append(result)
            spread = " ".join(f"{ratio:.2f}" for ratio in result["ratios"])
            print(
                f"{batch:5}  {result['bare']:8.1f}  {result['llm']:8.1f}  {result['ratio']:6.3f}   ({spread})",
                flush=True,
            )
    report = {
        "bench": "llm_vs_bare_openvino",
        "version": __version__,
        "commit": commit(),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "model": args.model,
        "prompt_tokens": PROMPT_TOKENS,
        "results": results,
    }
    print(json.dumps(report))
    if args.min_ratio is not None and (low := [r["batch"] for r in results if r["ratio"] < args.min_ratio]):
        print(f"below {args.min_ratio} at batch {', '.join(map(str, low))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
