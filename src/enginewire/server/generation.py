"""The one path from a request to the engine's outputs, for all endpoints, streaming or not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from enginewire.errors import EngineDeadError, RequestLostError
from enginewire.frontend.async_llm import AsyncLLM
from enginewire.frontend.inputs import Prompt
from enginewire.frontend.outputs import CompletionOutput
from enginewire.frontend.reader import Reader
from enginewire.server.admission import Admission
from enginewire.server.health import EngineMonitor
from enginewire.wire.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)  # two of the same id are two
class Job:
    """What one HTTP request wants generated.

    Attributes:
        id: of the response, and of all its prompts' requests: aborting it aborts them all.
        prompts: each is a request of its own to the frontend.
        params: for all of them; with an ``output_kind`` of FINAL_ONLY there is one output for each prompt.
        wants_text: whether the tokens are wanted at all; some ask for the prompt's logprobs only.
        data_parallel_rank: the engine to run on; ``None``: whichever has least to do.
    """

    id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int = 0
    wants_text: bool = True
    data_parallel_rank: int | None = None

    def shown(self, news: list[CompletionOutput]) -> list[CompletionOutput]:
        """Leave out what is not wanted."""
        if self.wants_text:
            return news
        return [replace(completion, text="", token_ids=[], logprobs=[]) for completion in news]


class Generation:
    """Generates for the endpoints. Whatever way a job is left early, its work on the engine is aborted."""

    def __init__(self, llm: AsyncLLM, admission: Admission, monitor: EngineMonitor) -> None:
        self._llm = llm
        self._admission = admission
        self._monitor = monitor
        self._jobs: set[Job] = set()

    @contextlib.asynccontextmanager
    async def running(self, job: Job) -> AsyncIterator[Reader]:
        """Run a job; its prompts' outputs are to be taken from the reader.

        Raises:
            EngineClientError: whatever ``AsyncLLM.generate`` and ``Admission.places`` raise, and the reader.
        """
        with self._admitted(job):
            async with contextlib.AsyncExitStack() as stack:
                submitted = (
                    self._llm.submitted(
                        prompt, job.params, job.id, priority=job.priority, data_parallel_rank=job.data_parallel_rank
                    )
                    for prompt in job.prompts
                )
                yield Reader([await stack.enter_async_context(request) for request in submitted])

    async def abort(self, job_ids: Sequence[str]) -> None:
        """End jobs early; their outputs finish with ``abort``. Unknown ids are ignored."""
        await self._llm.abort(job_ids)

    async def abort_all(self) -> None:
        """End all jobs early."""
        await self._llm.abort([job.id for job in self._jobs])

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
