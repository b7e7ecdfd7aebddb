"""Calls of tools in a model's text, in the one format read here: Hermes's, which Qwen and others were trained on.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from enginewire.errors import InvalidRequestError
from enginewire.server.conversation import knows_tools
from enginewire.server.openai.requests import ChatCompletionRequest
from enginewire.server.openai.responses import FunctionCall, ToolCall
from enginewire.text.tokenizer import Tokenizer

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"


def check_tools(wanted: ChatCompletionRequest, tokenizer: Tokenizer) -> bool:
    """Tell whether the model is to be offered tools.

    Raises:
        InvalidRequestError: it cannot be offered them the way that is asked for.
    """
    if wanted.functions:
        raise InvalidRequestError("functions is the old name of tools; use tools", parameter="functions")
    choice = wanted.tool_choice
    if choice not in (None, "auto", "none"):
        raise InvalidRequestError(
            "tool_choice must be auto or none: a model here cannot be made to call a tool", parameter="tool_choice"
        )
    if not wanted.tools:
        if choice == "auto":
            raise InvalidRequestError("tool_choice=auto needs tools", parameter="tool_choice")
        return False
    if choice == "none":
        return False
    if not knows_tools(tokenizer) or BEGIN not in (tokenizer.chat_template or ""):
        raise InvalidRequestError(
            f"the chat template of this model does not carry tools in the format known here ({BEGIN}…{END}); leave "
            "tools out, or set tool_choice to none",
            parameter="tools",
        )
    return True


class _Call(Struct):
    """What a model writes between the marks."""

    name: str
    arguments: dict[str, Any] = {}


class ToolCallReader:
    """Tells the calls in one completion's text from the rest of it, as the text comes.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(self, completion_id: str, index: int) -> None:
        self._prefix = f"call-{completion_id}-{index}"
        self._held = ""
        self._skips_space = False
        self.num_calls = 0

    def read(self, text: str, *, is_finished: bool) -> tuple[str, list[ToolCall]]:
        """Take new text; return what of the text so far is certainly content, and the calls that are complete.

        What stands between the marks and is no call stays text. Space behind a call belongs to it.
        """
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while (begin := self._held.find(BEGIN)) >= 0:
            content.append(self._shown(self._take(begin)))
            end = self._held.find(END)
            if end < 0 and not is_finished:
                return "".join(content), calls
            marked = self._take(len(self._held) if end < 0 else end + len(END))
            call = self._parse(marked.removeprefix(BEGIN).removesuffix(END))
            if call is None:
                content.append(self._shown(marked))
            else:
                calls.append(call)
                self._skips_space = True
        kept = 0 if is_finished else _overlap(self._held)
        content.append(self._shown(self._take(len(self._held) - kept)))
        return "".join(content), calls

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _shown(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text

    def _parse(self, text: str) -> ToolCall | None:
        try:
            call = msgspec.json.decode(text.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):  # a model writes what it likes
            return None
        made = ToolCall(
            id=f"{self._prefix}-{self.num_calls}",
            function=FunctionCall(call.name, msgspec.json.encode(call.arguments).decode()),
            index=self.num_calls,
        )
        self.num_calls += 1
        return made


def _overlap(text: str) -> int:
    """Return how many characters at the end may be the beginning of a call's mark."""
    return next((size for size in range(min(len(text), len(BEGIN) - 1), 0, -1) if BEGIN.startswith(text[-size:])), 0)
