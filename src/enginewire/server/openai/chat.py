"""``POST /v1/chat/completions``: answers in a conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import UnsetType

from enginewire.errors import InvalidRequestError
from enginewire.frontend.inputs import Prompt
from enginewire.frontend.outputs import CompletionOutput, RequestOutput
from enginewire.server.body import decode_body
from enginewire.server.context import Context, Endpoint
from enginewire.server.conversation import render
from enginewire.server.generation import Job
from enginewire.server.http import SSE, Reply, Request
from enginewire.server.openai.logprobs import chat_logprobs, prompt_logprobs
from enginewire.server.openai.requests import ChatCompletionRequest
from enginewire.server.openai.respond import RANK, respond
from enginewire.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    Usage,
)
from enginewire.server.openai.sampling import check_stream_options, errors_name, names_of_format, sampling_params
from enginewire.server.openai.tool_calls import ToolCallReader, check_tools
from enginewire.text.tokenizer import Tokenizer


async def create_chat_completion(context: Context, request: Request) -> Reply:
    """Answer a conversation."""
    wanted = decode_body(ChatCompletionRequest, request)
    context.check_model(wanted.model)
    tokenizer = context.llm.tokenizer
    calls_tools = check_tools(wanted, tokenizer)
    with errors_name(_names(wanted)):
        job = await _make_job(wanted, f"chatcmpl-{wanted.request_id or request.id}", tokenizer, calls_tools)
        writer = _ChatWriter(wanted, job, context.settings.model_name, tokenizer, calls_tools)
        return await respond(context, request, wanted, job, writer)


def _names(wanted: ChatCompletionRequest) -> dict[str, str]:
    """Return what the client calls sampling parameters where that differs."""
    names = names_of_format(wanted)
    if wanted.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if wanted.top_logprobs:
        names["logprobs"] = "top_logprobs"
    return names


async def _make_job(wanted: ChatCompletionRequest, job_id: str, tokenizer: Tokenizer, calls_tools: bool) -> Job:
    check_stream_options(wanted)
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true", parameter="top_logprobs")
    if wanted.top_logprobs is not None and wanted.top_logprobs < 0:
        raise InvalidRequestError(
            f"top_logprobs must be at least 0, got {wanted.top_logprobs}", parameter="top_logprobs"
        )
    max_tokens = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    params = sampling_params(
        wanted,
        max_tokens=max_tokens,
        logprobs=(wanted.top_logprobs or 0) if wanted.logprobs else None,
        prompt_logprobs=wanted.prompt_logprobs,
    )
    prompt = await asyncio.to_thread(_prompt, wanted, tokenizer, calls_tools)
    return Job(job_id, [prompt], params, wanted.priority or 0)


def _prompt(wanted: ChatCompletionRequest, tokenizer: Tokenizer, calls_tools: bool) -> Prompt:
    tools = [cast("dict[str, Any]", msgspec.to_builtins(tool)) for tool in wanted.tools or ()]
    text = render(
        tokenizer,
        wanted.messages,
        add_generation_prompt=wanted.add_generation_prompt is not False,
        tools=tools if calls_tools else None,
        template_kwargs=wanted.chat_template_kwargs,
    )
    # The template has written the special tokens that a conversation begins with.
    prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    if wanted.cache_salt is not None:
        prompt["cache_salt"] = wanted.cache_salt
    return prompt


class _ChatWriter:
    """Writes outputs as messages of the assistant, or as deltas of them."""

    def __init__(
        self, wanted: ChatCompletionRequest, job: Job, model: str, tokenizer: Tokenizer, calls_tools: bool
    ) -> None:
        self._wanted = wanted
        self._id = job.id
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._n = job.params.n
        self.shows_text_alone = not (calls_tools or wanted.return_token_ids)
        self._readers = [ToolCallReader(self._id, index) for index in range(self._n)] if calls_tools else None
        self._opening_token_ids: list[int] | UnsetType = msgspec.UNSET

    def response(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatResponse:
        """Make the body of all there is; a conversation is one prompt."""
        (output,) = outputs
        body = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole(completion) for completion in output.outputs],
            usage=usage,
        )
        if self._wanted.return_token_ids:
            body.prompt_token_ids = output.prompt_token_ids
        if self._wanted.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return body

    def opening(self, prompt_index: int, output: RequestOutput) -> list[ChatChunkChoice]:
        """Make choices that say who speaks."""
        if self._wanted.return_token_ids:
            self._opening_token_ids = output.prompt_token_ids
        return [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")) for index in range(self._n)]

    def text(self, index: int, text: str) -> ChatChunkChoice:
        """Make a choice of new text."""
        return ChatChunkChoice(index=index, delta=ChatDelta(content=text))

    def news(self, prompt_index: int, completion: CompletionOutput) -> list[ChatChunkChoice]:
        """Make a choice of new text, and one of the end, of a completion that has them."""
        choices: list[ChatChunkChoice] = []
        finish_reason = completion.finish_reason
        choice = self.text(completion.index, completion.text)
        choice.logprobs = self._logprobs(completion)
        if self._wanted.return_token_ids:
            choice.token_ids = completion.token_ids
        if self._readers is not None:
            reader = self._readers[completion.index]
            text, calls = reader.read(completion.text, is_finished=finish_reason is not None)
            choice.delta.content = text
            if calls:
                choice.delta.tool_calls = calls
            if finish_reason == "stop" and reader.num_calls:
                finish_reason = "tool_calls"
        if not choice.delta.content:
            choice.delta.content = msgspec.UNSET
        # New tokens may have no text yet: part of a character, or of what could be a stop string.
        if choice.delta.content or choice.delta.tool_calls or choice.logprobs or choice.token_ids:
            choices.append(choice)
        if finish_reason is not None:
            end = ChatChunkChoice(index=completion.index, delta=ChatDelta(), stop_reason=completion.stop_reason)
            end.finish_reason = cast("Any", finish_reason)  # the frontend has it as str, and the same words
            choices.append(end)
        return choices

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        """Make an event's body; the first one has the prompt's token ids, if they are wanted."""
        prompt_token_ids, self._opening_token_ids = self._opening_token_ids, msgspec.UNSET
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _whole(self, completion: CompletionOutput) -> ChatChoice:
        message = ChatMessage(content=completion.text)
        finish_reason = completion.finish_reason
        if self._readers is not None:
            text, calls = self._readers[completion.index].read(completion.text, is_finished=True)
            message.content = text or None if calls else text
            if calls:
                for call in calls:
                    call.index = msgspec.UNSET  # streams only
                message.tool_calls = calls
                finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        choice = ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=cast("Any", finish_reason),  # the frontend has it as str, and the same words
            stop_reason=completion.stop_reason,
        )
        if self._wanted.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not completion.logprobs:
            return None
        return chat_logprobs(completion.logprobs, self._wanted.top_logprobs or 0, self._tokenizer)


ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation.",
        request=ChatCompletionRequest,
        response=ChatResponse,
        content_type=SSE,
        parameters=(RANK,),
        errors=(404, 429, 500, 503),
    )
]
