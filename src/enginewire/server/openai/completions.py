"""``POST /v1/completions``: texts that continue prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec import UnsetType

from enginewire.errors import InvalidRequestError
from enginewire.frontend.inputs import Prompt
from enginewire.frontend.logprobs import TokenLogprobs
from enginewire.frontend.outputs import CompletionOutput, RequestOutput
from enginewire.server.body import decode_body
from enginewire.server.context import Context, Endpoint
from enginewire.server.generation import Job
from enginewire.server.http import SSE, Reply, Request
from enginewire.server.openai.logprobs import completion_logprobs, prompt_logprobs
from enginewire.server.openai.requests import CompletionRequest
from enginewire.server.openai.respond import RANK, respond
from enginewire.server.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from enginewire.server.openai.sampling import check_stream_options, errors_name, names_of_format, sampling_params
from enginewire.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's, for this endpoint."""


async def create_completion(context: Context, request: Request) -> Reply:
    """Continue one or several prompts."""
    wanted = decode_body(CompletionRequest, request)
    context.check_model(wanted.model)
    names = names_of_format(wanted)
    if wanted.echo and wanted.prompt_logprobs is None:
        names["prompt_logprobs"] = "echo"
    with errors_name(names):
        job = _make_job(wanted, f"cmpl-{wanted.request_id or request.id}", context)
        writer = _CompletionWriter(wanted, job, context.settings.model_name, context.llm.tokenizer)
        return await respond(context, request, wanted, job, writer)


def _make_job(wanted: CompletionRequest, job_id: str, context: Context) -> Job:
    check_stream_options(wanted)
    if wanted.best_of is not None and wanted.best_of != (wanted.n or 1):
        raise InvalidRequestError(
            f"best_of must be n ({wanted.n or 1}) if it is given, got {wanted.best_of}", parameter="best_of"
        )
    if wanted.suffix:
        raise InvalidRequestError("suffix is not supported: models here only continue a text", parameter="suffix")
    num_prompt_logprobs = wanted.prompt_logprobs
    if wanted.echo and wanted.logprobs is not None and num_prompt_logprobs is None:
        num_prompt_logprobs = wanted.logprobs
    max_tokens = DEFAULT_MAX_TOKENS if wanted.max_tokens is None else wanted.max_tokens
    wants_text = max_tokens != 0 or not wanted.echo
    params = sampling_params(
        wanted,
        max_tokens=max_tokens if wants_text else 1,  # engines make at least one
        logprobs=wanted.logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    given = _given_prompts(wanted)
    context.admission.check(len(given) * params.n)  # before anything is done for each
    prompts = [_prompt(prompt, wanted, context.llm.tokenizer) for prompt in given]
    return Job(job_id, prompts, params, wanted.priority or 0, wants_text=wants_text)


def _given_prompts(wanted: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts as they were given; one prompt is a list of one."""
    given = wanted.prompt
    kinds = {str} if isinstance(given, str) else {type(item) for item in given}
    if len(kinds) > 1:
        raise InvalidRequestError(
            "the prompt must be text, token ids, or a list of the one or of the other", parameter="prompt"
        )
    is_one = isinstance(given, str) or kinds == {int}
    prompts = cast("list[str | list[int]]", [given] if is_one else given)
    if not prompts or not all(prompts):
        raise InvalidRequestError("the prompt is empty", parameter="prompt")
    return prompts


def _prompt(prompt: str | list[int], wanted: CompletionRequest, tokenizer: Tokenizer) -> Prompt:
    """Put a prompt into the frontend's form."""
    form: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    if isinstance(prompt, str) and wanted.add_special_tokens is False:
        form["prompt_token_ids"] = tokenizer.encode(prompt, add_special_tokens=False)
    if wanted.cache_salt is not None:
        form["cache_salt"] = wanted.cache_salt
    return form


class _CompletionWriter:
    """Writes outputs as choices with a ``text``; choices of several prompts are numbered through."""

    def __init__(self, wanted: CompletionRequest, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self.shows_text_alone = not wanted.return_token_ids
        self._wanted = wanted
        self._id = job.id
        self._n = job.params.n
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}
        """By choice: length of the text that its logprobs so far stand for."""

    def response(self, outputs: Sequence[RequestOutput], usage: Usage) -> CompletionResponse:
        """Make the body of all there is."""
        choices = [
            self._whole(prompt_index, output, completion)
            for prompt_index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return self.chunk(choices, usage)

    def opening(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        """Make choices with the prompt itself, if it is wanted."""
        wanted = self._wanted
        if not (wanted.echo or wanted.return_token_ids):
            return []
        choices: list[CompletionChoice] = []
        for index in range(prompt_index * self._n, (prompt_index + 1) * self._n):
            choice = CompletionChoice(index=index, text=self._prompt_text(output) if wanted.echo else "")
            if wanted.echo and wanted.logprobs is not None:
                choice.logprobs = self._logprobs(index, self._prompt_rows(output), output)
            if wanted.return_token_ids:
                choice.token_ids, choice.prompt_token_ids = [], output.prompt_token_ids
            choices.append(choice)
        return choices

    def text(self, index: int, text: str) -> CompletionChoice:
        """Make a choice of new text."""
        return CompletionChoice(index=index, text=text)

    def news(self, prompt_index: int, completion: CompletionOutput) -> list[CompletionChoice]:
        """Make a choice of a completion that has something to show."""
        choice = self._choice(prompt_index, completion)
        if completion.logprobs:
            choice.logprobs = self._logprobs(choice.index, completion.logprobs)
        # New tokens may have no text yet: part of a character, or of what could be a stop string.
        return [choice] if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids else []

    def chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        """Make a body."""
        return CompletionResponse(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _whole(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        wanted = self._wanted
        choice = self._choice(prompt_index, completion)
        rows: list[TokenLogprobs | None] = [*(completion.logprobs or ())]
        if wanted.echo:
            choice.text = self._prompt_text(output) + choice.text
            rows = self._prompt_rows(output) + rows
        if wanted.logprobs is not None:
            choice.logprobs = self._logprobs(choice.index, rows, output if wanted.echo else None)
        if wanted.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if wanted.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> CompletionChoice:
        choice = CompletionChoice(
            index=prompt_index * self._n + completion.index,
            text=completion.text,
            finish_reason=cast("Any", completion.finish_reason),  # the frontend has it as str, and the same words
            stop_reason=completion.stop_reason,
        )
        if self._wanted.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def _logprobs(
        self, index: int, rows: Sequence[TokenLogprobs | None], echoed: RequestOutput | None = None
    ) -> CompletionLogprobs:
        first_text = "" if echoed is None else self._tokenizer.token_text(echoed.prompt_token_ids[0])
        offset = self._offsets.get(index, 0)
        made = completion_logprobs(rows, self._wanted.logprobs or 0, offset, first_text)
        self._offsets[index] = offset + sum(map(len, made.tokens))
        return made

    def _prompt_rows(self, output: RequestOutput) -> list[TokenLogprobs | None]:
        return output.prompt_logprobs or [None]  # a prompt of one token has no logprobs

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue one or several prompts.",
        request=CompletionRequest,
        response=CompletionResponse,
        content_type=SSE,
        parameters=(RANK,),
        errors=(404, 429, 500, 503),
    )
]
