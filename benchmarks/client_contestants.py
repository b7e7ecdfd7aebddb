"""Who is measured by ``bench_client.py``, each with the same few operations.

They are the clients of both projects, and the least code that reads and writes the same messages.

Imported by the peer's interpreter too: a contestant imports what it needs when it is made.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import msgspec
import zmq

EMBEDS_SHAPE = (2048, 2048)
"""Of ``prompt_embeds``, float32: 16 MiB."""


class _Output(msgspec.Struct, array_like=True, gc=False):
    """The least that a frontend has to decode of an output."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    rest: Any = None


class _Outputs(msgspec.Struct, array_like=True):
    """The least that a frontend has to decode of a message."""

    engine_index: int
    outputs: list[_Output]
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Any = None


class _Raw:
    """pyzmq and msgspec: encoding, decoding, and two sockets."""

    def __init__(self, addresses: tuple[str, str], context: zmq.Context[Any]) -> None:
        self._context = context
        self._router, self._pull = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
        self._pull.rcvhwm = self._router.sndhwm = 0
        self._router.bind(addresses[0])
        self._pull.bind(addresses[1])
        zmq.Socket.shadow(self._router.underlying).recv_multipart()  # the ready response
        self._decode = msgspec.msgpack.Decoder(_Outputs).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._calls = 0

    def request(self, request_id: str, num_tokens: int, *, with_embeds: bool = False) -> Any:
        request = _our_request(request_id, num_tokens)
        return (request, bytes(4 * EMBEDS_SHAPE[0] * EMBEDS_SHAPE[1])) if with_embeds else (request, None)

    def _add_frames(self, request: Any) -> list[Any]:
        message, embeds = request
        return [b"\0\0", b"\0", self._encode(message), *([] if embeds is None else [embeds])]

    def _call_frames(self) -> list[bytes]:
        self._calls += 1
        return [b"\0\0", b"\3", self._encode((0, self._calls, "is_sleeping", ()))]

    def _check(self, frames: list[bytes]) -> None:
        assert self._decode(frames[0]).utility_output[2][1]

    @staticmethod
    def read(output: Any) -> None:
        """Turn logprobs into numpy."""
        import numpy as np

        for dtype, shape, data in output.new_logprobs[:3]:
            np.frombuffer(data.data, dtype).reshape(shape)

    def close(self) -> None:
        self._context.destroy(linger=0)


class RawSync(_Raw):
    """Blocking calls."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        super().__init__(addresses, zmq.Context())

    def get(self) -> Any:
        return self._decode(self._pull.recv_multipart()[0])

    def add(self, request: Any) -> None:
        self._router.send_multipart(self._add_frames(request), copy=request[1] is None)

    def abort(self, request_ids: list[str]) -> None:
        self._router.send_multipart([b"\0\0", b"\1", self._encode(request_ids)])

    def call(self) -> None:
        self._router.send_multipart(self._call_frames())
        self._check(self._pull.recv_multipart())


class RawAsync(_Raw):
    """zmq.asyncio."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        import zmq.asyncio

        super().__init__(addresses, zmq.asyncio.Context())

    async def get(self) -> Any:
        return self._decode((await self._pull.recv_multipart())[0])

    async def add(self, request: Any) -> None:
        await self._router.send_multipart(self._add_frames(request), copy=request[1] is None)

    async def abort(self, request_ids: list[str]) -> None:
        await self._router.send_multipart([b"\0\0", b"\1", self._encode(request_ids)])

    async def call(self) -> None:
        await self._router.send_multipart(self._call_frames())
        self._check(await self._pull.recv_multipart())


class _Client:
    """A client of either project: both have the field's names."""

    def __init__(self, client: Any, suffix: str = "") -> None:
        self._client = client
        self.get = getattr(client, f"get_output{suffix}")
        self.add = getattr(client, f"add_request{suffix}")
        self.abort = getattr(client, f"abort_requests{suffix}")
        self.call = getattr(client, f"is_sleeping{suffix}")

    @staticmethod
    def read(output: Any) -> None:
        """Look at logprobs, which are numpy then."""
        lists = output.new_logprobs
        _ = (lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks)

    def close(self) -> None:
        self._client.shutdown()


def _our_request(request_id: str, num_tokens: int) -> Any:
    from enginewire.wire.messages import EngineCoreRequest
    from enginewire.wire.sampling import SamplingParams

    return EngineCoreRequest(
        request_id, list(range(1000, 1000 + num_tokens)), sampling_params=SamplingParams(max_tokens=64)
    )


class _Ours(_Client):
    def request(self, request_id: str, num_tokens: int, *, with_embeds: bool = False) -> Any:
        from enginewire.wire.arrays import Tensor

        request = _our_request(request_id, num_tokens)
        if with_embeds:
            request.prompt_embeds = Tensor("float32", EMBEDS_SHAPE, bytes(4 * EMBEDS_SHAPE[0] * EMBEDS_SHAPE[1]))
        return request


def _our_config(addresses: tuple[str, str]) -> tuple[Any, dict[str, str]]:
    from enginewire.config import EngineConfig

    return EngineConfig.create("echo"), {"input_address": addresses[0], "output_address": addresses[1]}


class OurSync(_Ours):
    """``SyncMPClient``."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        from enginewire.client.sync_mp import SyncMPClient

        config, where = _our_config(addresses)
        super().__init__(SyncMPClient(config, client_addresses=where))


class OurAsync(_Ours):
    """``AsyncMPClient``."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        from enginewire.client.async_mp import AsyncMPClient

        config, where = _our_config(addresses)
        super().__init__(AsyncMPClient(config, client_addresses=where), "_async")


class _Vllm(_Client):
    def request(self, request_id: str, num_tokens: int, *, with_embeds: bool = False) -> Any:
        import torch
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(1000, 1000 + num_tokens)),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=64),
            pooling_params=None,
            arrival_time=1e9,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            prompt_embeds=torch.zeros(EMBEDS_SHAPE) if with_embeds else None,
        )


def _vllm_config(addresses: tuple[str, str]) -> tuple[Any, Any, dict[str, str]]:
    """Make a configuration by the public arguments, for a model folder that BENCH_HF_MODEL names."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor import Executor

    arguments = EngineArgs(os.environ["BENCH_HF_MODEL"], max_model_len=2048, enforce_eager=True, dtype="bfloat16")
    config = arguments.create_engine_config()
    return config, Executor.get_class(config), {"input_address": addresses[0], "output_address": addresses[1]}


class VllmSync(_Vllm):
    """vLLM's ``SyncMPClient``, whose base class takes addresses although it does not."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        from vllm.v1.engine import core_client

        config, executor, where = _vllm_config(addresses)
        base = core_client.MPClient
        base.__init__ = functools.partialmethod(base.__init__, client_addresses=where)
        super().__init__(core_client.SyncMPClient(config, executor, log_stats=False))


class VllmAsync(_Vllm):
    """vLLM's ``AsyncMPClient``."""

    def __init__(self, addresses: tuple[str, str]) -> None:
        from vllm.v1.engine import core_client

        config, executor, where = _vllm_config(addresses)
        super().__init__(core_client.AsyncMPClient(config, executor, False, client_addresses=where), "_async")


CONTESTANTS: dict[str, type[Any]] = {
    "raw sync": RawSync,
    "sync": OurSync,
    "vLLM sync": VllmSync,
    "raw async": RawAsync,
    "async": OurAsync,
    "vLLM async": VllmAsync,
    "uvloop": OurAsync,
    "vLLM uvloop": VllmAsync,
}
"""By column."""

ASYNC = ("raw async", "async", "vLLM async", "uvloop", "vLLM uvloop")
"""Those that are awaited, on the loop that their names say."""


def uvloop_loop() -> Any:
    """Make a uvloop."""
    import uvloop

    return uvloop.new_event_loop()
