"""One contestant of ``bench_llm.py``, in a process of its own: ``PYTHON llm_contestants.py NAME SETTINGS``.

``SETTINGS`` is JSON: the model and what the contestants have to agree on. The process loads the model, makes one token
and says so on standard output; then it answers requests line by line, JSON both ways: ``[method, arguments]`` gets
what the method returns. It ends when its standard input does.

All get prompts as token ids and make the same number of tokens, greedily, whatever the model thinks of them. Only the
standard library is imported at the top: each contestant has an interpreter that knows its own library.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import load

Prompts = Sequence[list[int]]

sys.path.append(str(Path(__file__).parents[1] / "tests" / "interop"))
import vllm_cli  # noqa: E402 - where the CPU wheel's name is dealt with

importlib.metadata.version = vllm_cli.version  # here: processes that vLLM spawns import this module again


class Round(NamedTuple):
    """What one batch took: seconds in all, and until half of the requests had their first token."""

    tokens: int
    seconds: float
    first_token: float


class Bare:
    """OpenVINO GenAI and nothing else: add, step, read token ids. The least that can be written on top of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["gguf"], scheduler, "CPU", {})
        self._genai, self._tensor, self._numpy = openvino_genai, openvino.Tensor, numpy
        self._ids = iter(range(sys.maxsize))

    def run(self, prompts: Prompts, new_tokens: int) -> Round:
        """Generate."""
        start = time.monotonic()
        waiting = [self._add(prompt, new_tokens) for prompt in prompts]
        handles, firsts, count = list(waiting), [], 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle in handles:
                if handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
                    if handle in waiting:
                        waiting.remove(handle)
                        firsts.append(time.monotonic() - start)
        return Round(count, time.monotonic() - start, statistics.median(firsts))

    def steps(self, prompt: list[int]) -> list[float]:
        """Return the seconds that each step of a prompt takes."""
        handle = self._add(prompt, 1)  # it would be dropped with it
        seconds = []
        while self._pipeline.has_non_finished_requests():
            start = time.monotonic()
            self._pipeline.step()
            seconds.append(time.monotonic() - start)
        assert handle.can_read()
        return seconds

    def _add(self, prompt: list[int], new_tokens: int) -> Any:
        config = self._genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        return self._pipeline.add_request(next(self._ids), self._tensor(self._numpy.array([prompt])), config)


class Ours:
    """``LLM`` with its engine in processes of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from enginewire import LLM, EngineConfig, SamplingParams
        from enginewire.client.base import EngineCoreClient

        config = EngineConfig.create(settings["model"], forward_engine_log=False)
        self._client = EngineCoreClient.make_client(True, False, config)
        self._llm = LLM.from_client(self._client)
        self._params = SamplingParams
        self._ids = iter(range(sys.maxsize))

    def run(self, prompts: Prompts, new_tokens: int) -> Round:
        """Generate."""
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.monotonic()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, progress=False)
        elapsed = time.monotonic() - start
        firsts = [output.metrics.first_token_ts - start for output in outputs]
        return Round(sum(len(output.outputs[0].token_ids) for output in outputs), elapsed, statistics.median(firsts))

    def scheduler(self) -> dict[str, Any]:
        """Return what the bare loop has to be set to, to have the same."""
        from enginewire.executors.openvino_options import OpenVINOOptions

        options, config = OpenVINOOptions(), self._llm.config
        return {
            "num_kv_blocks": config.num_gpu_blocks,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "enable_prefix_caching": options.enable_prefix_caching,
            "dynamic_split_fuse": True,
        }

    def utilities(self, prompt: list[int], pause: float) -> list[float]:
        """Return the seconds that each of many calls took which were made while the engine computed a prompt."""
        self._add(prompt)
        end = threading.Thread(target=self._receive_until_finished)
        end.start()
        calls = [self._client.is_sleeping, self._client.is_scheduler_paused, self._client.get_supported_tasks]
        seconds = []
        while end.is_alive():
            start = time.monotonic()
            calls[len(seconds) % len(calls)]()
            seconds.append(time.monotonic() - start)
            end.join(pause)
        return seconds

    def abort(self, prompt: list[int], after: float) -> float:
        """Abort a prompt some seconds after its first step; return the seconds until the engine holds nothing of it."""
        request_id = self._add(prompt)
        while (stats := self._client.get_output().scheduler_stats) is None or stats.num_running_reqs == 0:
            pass
        threading.Event().wait(after)
        while True:  # what came meanwhile, or the loop below would believe it
            try:
                assert not self._client.get_output(timeout=0).outputs, "the prompt was computed before it was aborted"
            except TimeoutError:
                break
        start = time.monotonic()
        self._client.abort_requests([request_id])
        while (stats := self._client.get_output().scheduler_stats) is None or stats.kv_cache_usage > 0:
            pass
        return time.monotonic() - start

    def _add(self, prompt: list[int]) -> str:
        from enginewire.wire.messages import EngineCoreRequest

        request_id = f"direct-{next(self._ids)}"
        params = self._params(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._client.add_request(EngineCoreRequest(request_id, prompt, sampling_params=params))
        return request_id

    def _receive_until_finished(self) -> None:
        while not any(output.finish_reason is not None for output in self._client.get_output().outputs):
            pass

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()


class VLLM:
    """vLLM's ``LLM``, in bfloat16: what its CPU build is made for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB: 64 requests of 256 tokens take 0.4
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        from vllm import LLM, SamplingParams

        self._llm = LLM(settings["hf"], dtype="bfloat16", max_model_len=1024, disable_log_stats=False)
        self._params = SamplingParams

    def run(self, prompts: Prompts, new_tokens: int) -> Round:
        """Generate."""
        params = self._params(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.monotonic()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        elapsed = time.monotonic() - start
        firsts = [output.metrics.first_token_latency for output in outputs]
        return Round(sum(len(output.outputs[0].token_ids) for output in outputs), elapsed, statistics.median(firsts))


class HTTP:
    """A server on this machine, as its clients see it: every request streams over a connection of its own."""

    port: int
    body: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def run(self, prompts: Prompts, new_tokens: int) -> Round:
        """Generate."""
        body = {
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        done = load.run(self.port, [load.post("/v1/completions", {**body, "prompt": prompt}) for prompt in prompts])
        return Round(done.tokens, done.elapsed, done.first(0.5))


class OurServer(HTTP):
    """``enginewire serve``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "enginewire", "serve", settings["model"], "--port", "0"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self._process.stdout is not None
        ready = re.match(r"Serving (.+) at http://.+:(\d+)$", self._process.stdout.readline())
        if ready is None:
            self._log.seek(0)
            raise SystemExit(f"the server did not start:\n{self._log.read()}")
        self.body = {"model": ready[1]}
        self.port = int(ready[2])

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(40)


class LlamaCpp(HTTP):
    """llama.cpp's own HTTP server, in this process, with as many slots as there are requests."""

    body = {"cache_prompt": False}  # noqa: RUF012 - never changed

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._server: Any = None
        self.prepare(1)

    def prepare(self, batch: int) -> None:
        """Start it anew, for batches of this size."""
        import xllamacpp

        self._server = None  # first, or both would be there
        params = xllamacpp.CommonParams()
        params.model.path = self._settings["gguf"]
        params.n_parallel = batch
        params.n_ctx = 256 * batch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._settings["threads"]
        params.cache_ram_mib = 0
        params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self.port = int(self._server.listening_address.rpartition(":")[2])


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bare OpenVINO": Bare,
    "LLM": Ours,
    "server": OurServer,
    "vLLM": VLLM,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    """Serve the one who measures."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    contestant = CONTESTANTS[sys.argv[1]](json.loads(sys.argv[2]))
    try:
        contestant.run([[1000, 2000, 3000]], 1)
        gc.freeze()
        print(json.dumps(None), file=answers, flush=True)
        for line in sys.stdin:
            method, arguments = json.loads(line)
            print(json.dumps(getattr(contestant, method)(*arguments)), file=answers, flush=True)
    finally:
        getattr(contestant, "close", lambda: None)()


if __name__ == "__main__":
    main()
