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
        self.num_calls = 0

    def read(self, text: str, *, is_finished: bool) -> tuple[str, list[ToolCall]]:
        """Take new text; return what of the text so far is certainly content, and the calls that are complete.

        What stands between the marks and is no call stays text.
        """
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            begin = self._held.find(BEGIN)
            if begin < 0:
                keep = 0 if is_finished else _overlap(self._held)
                content.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(END, begin)
            if end < 0 and not is_finished:
                content.append(self._held[:begin])
                self._held = self._held[begin:]
                break
            stop = len(self._held) if end < 0 else end + len(END)
            call = self._parse(self._held[begin + len(BEGIN) : len(self._held) if end < 0 else end])
            content.append(self._held[:begin] if call else self._held[:stop])
            self._held = self._held[stop:]
            if call:
                calls.append(call)
        shown = "".join(content)
        return ("" if self.num_calls and shown.isspace() else shown), calls

    def _parse(self, text: str) -> ToolCall | None:
        try:
            call = msgspec.json.decode(text.strip(), type=_Call)
        except msgspec.DecodeError:  # a model writes what it likes
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
