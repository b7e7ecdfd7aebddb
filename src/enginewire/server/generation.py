"""The one path from a request to the engine's outputs, for all endpoints, streaming or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from enginewire.errors import EngineDeadError, RequestLostError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.inputs import Prompt
from enginewire.frontend.outputs import RequestOutput
from enginewire.server.admission import Admission
from enginewire.server.health import EngineMonitor
from enginewire.wire.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)  # two of the same id are two
class Job:
    """What one HTTP request wants generated.

    Attributes:
        id: of the response, and of all its prompts' requests: aborting it aborts them all.
        prompts: each is a request of its own to the frontend.
        params: for all of them; ``output_kind`` must be DELTA for :meth:`Generation.stream`, else FINAL_ONLY.
        wants_text: whether the tokens are wanted at all; some ask for the prompt's logprobs only.
        data_parallel_rank: the engine to run on; ``None``: whichever has least to do.
    """

    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    wants_text: bool = True
    data_parallel_rank: int | None = None


class Generation:
    """Generates for the endpoints. Leaving a call early, by cancellation or ``aclose``, aborts its work on the engine.

    Both ways of generating raise what ``AsyncLLM.generate`` and ``Admission.places`` do.
    """

    def __init__(self, llm: AsyncLLM, admission: Admission, monitor: EngineMonitor) -> None:
        self._llm = llm
        self._admission = admission
        self._monitor = monitor
        self._jobs: set[Job] = set()

    async def complete(self, job: Job) -> list[RequestOutput]:
        """Return the final output of each prompt."""
        with self._admitted(job):
            if len(job.prompts) == 1:
                return [await self._final(job, job.prompts[0])]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._final(job, prompt)) for prompt in job.prompts]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            return [task.result() for task in tasks]

    async def stream(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield outputs of all prompts as they come, each with its prompt's position."""
        with self._admitted(job):
            streams = [self._generate(job, prompt) for prompt in job.prompts]
            if len(streams) > 1:
                async with contextlib.aclosing(_merged(streams)) as outputs:
                    async for item in outputs:
                        yield item
                return
            async with contextlib.aclosing(streams[0]) as stream:
                async for output in stream:
                    yield 0, output

    async def abort(self, job_ids: Sequence[str]) -> None:
        """End jobs early; their outputs finish with ``abort``. Unknown ids are ignored."""
        await self._llm.abort(job_ids)

    async def abort_all(self) -> None:
        """End all jobs early."""
        await self._llm.abort([job.id for job in self._jobs])

    async def _generate(self, job: Job, prompt: Prompt) -> AsyncGenerator[RequestOutput, None]:
        generating = self._llm.generate(
            prompt, job.params, job.id, priority=job.priority, data_parallel_rank=job.data_parallel_rank
        )
        async with contextlib.aclosing(generating) as outputs:
            async for output in outputs:
                yield output if job.wants_text else _without_text(output)

    async def _final(self, job: Job, prompt: Prompt) -> RequestOutput:
        async with contextlib.aclosing(self._generate(job, prompt)) as outputs:
            return await anext(outputs)

    @contextlib.contextmanager
    def _admitted(self, job: Job) -> Iterator[None]:
        """Hold the job's places, and tell those who need to know what goes wrong."""
        with self._admission.places(len(job.prompts) * job.params.n):
            self._jobs.add(job)
            try:
                yield
            except (EngineDeadError, RequestLostError):
                self._monitor.look()
                raise
            finally:
                self._jobs.discard(job)


def _without_text(output: RequestOutput) -> RequestOutput:
    completions = [replace(completion, text="", token_ids=[], logprobs=[]) for completion in output.outputs]
    return replace(output, outputs=completions)


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield from several streams as things come. A slow reader makes them all wait, which merges their outputs."""
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=1)

    async def read(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await arrived.put((index, output))
        except Exception as exc:  # noqa: BLE001 - raised where the outputs are taken
            await arrived.put((index, exc))

    readers = [asyncio.create_task(read(*item), name="enginewire-prompt") for item in enumerate(streams)]
    try:
        num_running = len(streams)
        while num_running:
            index, output = await arrived.get()
            if isinstance(output, Exception):
                raise output
            num_running -= output.finished
            yield index, output
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
