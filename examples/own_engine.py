"""Plug in an engine of one's own: an executor that counts. ``python examples/own_engine.py``."""

from collections.abc import Sequence

from enginewire import (
    LLM,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreRequest,
    Executor,
    ExecutorCapacity,
    SamplingParams,
)


class Counter(Executor):
    """Goes on from the last character of the prompt: a, b, c …"""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capacity = ExecutorCapacity(max_model_len=1024, num_gpu_blocks=64, block_size=16, vocab_size=260)
        self._last_token: dict[str, int] = {}

    def add_request(self, request: EngineCoreRequest) -> None:
        assert request.prompt_token_ids
        self._last_token[request.request_id] = request.prompt_token_ids[-1]

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._last_token.pop(request_id, None)

    def step(self) -> list[EngineCoreOutput]:
        for request_id in self._last_token:
            self._last_token[request_id] += 1
        return [EngineCoreOutput(request_id, [token]) for request_id, token in self._last_token.items()]

    def has_unfinished_requests(self) -> bool:
        return bool(self._last_token)


# The model "echo" stands for no files and a tokenizer of bytes. Max tokens, stop strings, aborts and the process it
# runs in are not the executor's business. A class that lives in a script needs cloudpickle to get into that process.
with LLM("echo", engine=Counter) as llm:
    for output in llm.generate(["a", "0", "A"], SamplingParams(max_tokens=20, stop="Q")):
        print(output.prompt + output.outputs[0].text)
