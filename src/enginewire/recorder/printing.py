"""Messages as text for people, one block each, and as JSON for programs, one line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec.msgpack import Ext

from enginewire.recorder.entry import as_json
from enginewire.recorder.naming import Array
from enginewire.recorder.reading import Message
from enginewire.wire.extensions import PICKLE_CODES

SHOWN_ITEMS: Final = 8
SHOWN_CHARACTERS: Final = 120
SHOWN_BYTES: Final = 32
"""How much of a list, a text and of bytes is shown, unless everything is."""

SAID_IN_SUBJECT: Final = ("ABORT", "UTILITY", "START_DP_WAVE", "FIRST_REQ", "STATS")
"""Types of messages that the first line says everything about."""

INDENT: Final = "            "
"""Below a message's first line."""


class Printer:
    """Turns messages into text. ``is_full``: lists, texts, bytes and arrays are not shortened."""

    def __init__(self, *, is_full: bool = False) -> None:
        self._is_full = is_full

    def text(self, message: Message) -> str:
        """Return a block of lines: what went from where to where, and below what it says."""
        lines = [self._head(message), *(INDENT + line for line in self._body(message))]
        if message.problem:
            lines.append(f"{INDENT}! {message.problem}")
            if message.content is None:
                lines += [f"{INDENT}  frame {n}: {self._hex(frame)}" for n, frame in enumerate(message.entry.frames)]
        return "\n".join(lines)

    def json(self, message: Message) -> str:
        """Return one line of JSON. Lists are whole; arrays have their values only if everything is shown."""
        entry = message.entry
        sender, receiver, socket = entry.parties
        found = {
            "t": entry.t,
            "name": entry.name,
            "type": message.type,
            "sender": sender,
            "receiver": receiver,
            "socket": socket,
            "engine_index": message.engine_index,
            "client_index": message.client_index,
            "version": entry.version,
            "bytes": [len(frame) for frame in entry.frames],
            "request_ids": message.request_ids,
            "call": message.call or None,
            "problem": message.problem or None,
            "content": as_json(self._without_arrays(message.content)),
        }
        return json.dumps(found, ensure_ascii=False, default=str)  # an array may hold complex numbers

    def _head(self, message: Message) -> str:
        entry = message.entry
        sender, receiver, socket = entry.parties
        time = "" if entry.t is None else f"{entry.t:.4f}"
        way = f"{_party(sender, message)} → {_party(receiver, message)}" if sender else entry.direction
        sizes = " + ".join(str(len(frame)) for frame in entry.frames) or "0"
        subject = self._subject(message)
        what = f"{message.type} {subject}".rstrip()
        name = f"  [{entry.name}]" if entry.t is None and entry.name else ""
        return f"{time:>10}  {way:<24} {_socket(socket):<9} {what}  {sizes} B{name}"

    def _subject(self, message: Message) -> str:
        """Return the few words that tell this message from others of its type."""
        match message.type, message.content:
            case "ADD" | "ABORT", _:
                return self._short(", ".join(message.request_ids))
            case "UTILITY", {"method": str(method), "args": list(args)}:
                return f"{method}({', '.join(map(self.value, args))}) call={message.content.get('call_id')}"
            case "UTILITY_OUTPUT", {"utility_output": {**answer}}:
                return f"{message.call or _unknown_call(answer)}{self._answer(answer)} call={answer.get('call_id')}"
            case "HELLO" | "READY", {**fields}:
                return self._pairs(fields, without=("status",))
            case "OUTPUTS", {"outputs": [_, *_] as outputs}:
                return f"of {len(outputs)} request{'' if len(outputs) == 1 else 's'}"
            case "START_DP_WAVE", [wave, exclude]:
                return f"wave={self.value(wave)} except={_rank(exclude)}"
            case "FIRST_REQ", [*_, target, wave]:
                return f"wave={self.value(wave)} target={_rank(target)}"
            case "STATS", [counts, wave, running]:
                return f"counts={self.value(counts)} wave={self.value(wave)} running={self.value(running)}"
        return ""

    def _answer(self, answer: Mapping[Any, Any]) -> str:
        if (failure := answer.get("failure_message")) is not None:
            return f" failed: {self._short(str(failure))}"
        match answer.get("result"):
            case [None, value]:
                return f" = {self.value(value)}"
            case [typeinfo, value]:
                return f" = {self.value(value)} of types {self.value(typeinfo)}"
        return f" = {self.value(answer.get('result'))}"

    def _body(self, message: Message) -> Iterator[str]:
        match message.type, message.content:
            case "ENGINE_CORE_DEAD" | "COORDINATOR_READY" | "HELLO" | "READY" | "SUBSCRIBE" | "UNSUBSCRIBE", _:
                return
            case "UTILITY_OUTPUT", {"utility_output": {}} if not self._is_full:
                return
            case "OUTPUTS" | "UTILITY_OUTPUT" | "REPORT", {**fields}:
                outputs = fields.get("outputs")
                yield from map(self._output, outputs if isinstance(outputs, list) else ())
                if rest := self._pairs(fields, without=("outputs", "engine_index")):
                    yield rest
            case "ADD" | "INIT" | "READY_RESPONSE", {**fields}:
                yield from (f"{key}: {self.value(value)}" for key, value in fields.items() if key != "request_id")
            case type_, content if type_ in SAID_IN_SUBJECT and not message.problem and self._subject(message):
                return
            case "VALUE", content:
                yield self.value(content)
            case _, content:
                if content is not None:
                    yield self.value(content)

    def _output(self, output: Any) -> str:
        if not isinstance(output, dict):
            return self.value(output)
        return f"{output.get('request_id')}: {self._pairs(output, without=('request_id',))}"

    def _pairs(self, fields: Mapping[Any, Any], *, without: tuple[str, ...]) -> str:
        return " ".join(f"{key}={self.value(value)}" for key, value in fields.items() if key not in without)

    def value(self, value: Any) -> str:
        """Return a value on one line, shortened unless everything is shown."""
        match value:
            case None:
                return "nil"
            case Array():
                return (
                    f"{value} = {json.dumps(value.values(), default=str)}"
                    if self._is_full and value.data
                    else str(value)
                )
            case str():
                return json.dumps(self._short(value), ensure_ascii=False)
            case bytes():
                return f"bin({self._hex(value)})"
            case Ext(code=code):
                data = bytes(value.data)
                return f"ext {code}{' (pickle)' if code in PICKLE_CODES else ''} ({self._hex(data)})"
            case dict():
                return "{" + ", ".join(f"{_key(key)}: {self.value(item)}" for key, item in value.items()) + "}"
            case list() | tuple():
                return self._list(value)
            case bool():
                return str(value).lower()
        return str(value)

    def _list(self, items: list[Any] | tuple[Any, ...]) -> str:
        shown = items if self._is_full or len(items) <= SHOWN_ITEMS + 1 else items[:SHOWN_ITEMS]
        more = len(items) - len(shown)
        return f"[{', '.join(map(self.value, shown))}{f', … {more} more' if more else ''}]"

    def _short(self, text: str) -> str:
        if self._is_full or len(text) <= SHOWN_CHARACTERS:
            return text
        return f"{text[:SHOWN_CHARACTERS]}… {len(text) - SHOWN_CHARACTERS} more"

    def _hex(self, data: bytes) -> str:
        if self._is_full or len(data) <= SHOWN_BYTES:
            return data.hex() or "empty"
        return f"{data[:SHOWN_BYTES].hex()}… {len(data) - SHOWN_BYTES} more bytes"

    def _without_arrays(self, value: Any) -> Any:
        match value:
            case Array():
                found = {"dtype": value.dtype, "shape": value.shape, "frame": value.frame}
                found |= {"problem": value.problem} if value.problem else {}
                return found | ({"values": value.values()} if self._is_full and value.data is not None else {})
            case dict():
                return {key: self._without_arrays(item) for key, item in value.items()}
            case list():
                return [self._without_arrays(item) for item in value]
        return value


def _party(name: str, message: Message) -> str:
    index = {"engine": message.engine_index, "frontend": message.client_index}.get(name)
    return name if index is None else f"{name} {index}"


def _socket(text: str) -> str:
    return "" if text.endswith(" payload") else text.split(",")[0].removesuffix(" socket")


def _unknown_call(answer: Mapping[Any, Any]) -> str:
    call_id = answer.get("call_id")
    return "(notification)" if isinstance(call_id, int) and call_id < 0 else "(call not seen)"


def _key(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def _rank(target: Any) -> str:
    """Return an engine's rank as START_DP_WAVE and FIRST_REQ name it: an int, an identity, or nobody."""
    if isinstance(target, bytes) and len(target) == 2:
        return f"{int.from_bytes(target, 'little')} (as identity)"
    return "nobody" if target is None else str(target)
