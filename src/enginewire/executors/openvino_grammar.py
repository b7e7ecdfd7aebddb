"""Structured outputs for OpenVINO GenAI: what is asked for in its terms, and whether it will take it.

Its grammar compiler (xgrammar) runs inside ``step()``, takes validity on trust until then, and has no limits: nesting
overflows the stack, nested repetition the memory. So a constraint is bounded here first, then tried out by
:class:`~enginewire.executors.openvino_probe.GrammarProbe`, and only then given to the model. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from enginewire.errors import InvalidRequestError
from enginewire.wire.sampling import StructuredOutputsParams

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The kinds of constraint that can be expressed."""

MAX_CHARS: Final = 1 << 16
MAX_NESTING: Final = 100
"""Depth of brackets. Compile time grows steeply (JSON schema: 100 take 0.05 s, 300 1 s); 50,000 end the process."""
MAX_REPETITION: Final = 50_000
"""Product of nested ``{n}``: 65,536 take 0.3 s and 50 MB, a million 5 s and 500 MB."""

_LEXEME: Final = re.compile(
    r"""\\.                              # an escaped character
    | \[ (?: \\. | [^\]\\] )* \]         # a class
    | "  (?: \\. | [^"\\\n] )* "         # a literal of a grammar
    | [()]
    | \{ (\d+) (?: , (\d*) )? \}""",
    re.VERBOSE | re.DOTALL,
)
_PATTERN_LEXEME: Final = re.compile(_LEXEME.pattern.replace('"  (?:', "(?!) (?:"), _LEXEME.flags)
"""The same for a regular expression, where a quotation mark is a character like any other."""


class Constraint(NamedTuple):
    """A constraint as OpenVINO takes it.

    Attributes:
        field: attribute of ``StructuredOutputConfig``.
        text: its value.
    """

    field: Literal["json_schema", "regex", "grammar"]
    text: str


def constraint_from(params: StructuredOutputsParams) -> Constraint:
    """Express a request's constraint in OpenVINO's terms, within bounds.

    Raises:
        InvalidRequestError: an option that cannot be honoured, text that is no JSON, or something too large.
    """
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(params, option):
            raise _refused(f"{option} is not supported by this engine")
    constraint = _translate(params)
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError as exc:
        raise _refused(f"the constraint is not valid Unicode: {exc.reason}") from exc
    if size > MAX_CHARS:
        raise _refused(f"the constraint has {size} bytes, expected at most {MAX_CHARS}")
    if constraint.field == "json_schema":
        for pattern in _patterns(json.loads(constraint.text)):
            _check_bounds(pattern, _PATTERN_LEXEME)
    else:
        _check_bounds(constraint.text, _PATTERN_LEXEME if constraint.field == "regex" else _LEXEME)
    return constraint


def _translate(params: StructuredOutputsParams) -> Constraint:
    if params.json is not None:
        return Constraint("json_schema", _schema_text(params.json))
    if params.regex is not None:
        return Constraint("regex", params.regex)
    if params.choice is not None:
        if not params.choice:
            raise _refused("choice must list at least one text")
        return Constraint("grammar", "root ::= " + " | ".join(map(ebnf_literal, params.choice)))
    if params.grammar is not None:
        return Constraint("grammar", params.grammar)
    if params.json_object:
        return Constraint("json_schema", '{"type": "object"}')
    raise _refused("json_object must be true" if params.json_object is False else f"expected one of {', '.join(KINDS)}")


def ebnf_literal(text: str) -> str:
    """Quote a text for an EBNF grammar."""
    escaped = (c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(escaped)}"'


def _schema_text(schema: str | dict[str, Any]) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError) as exc:
        raise _refused(f"the JSON schema is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise _too_deep() from exc
    if not isinstance(value, dict):
        raise _refused(f"a JSON schema must be an object, got {type(value).__name__}")
    return text


def _patterns(schema: object, depth: int = 0) -> Iterator[str]:
    """Yield the regular expressions of a JSON schema. Raises if it nests too deeply."""
    if depth > MAX_NESTING:
        raise _too_deep()
    if isinstance(schema, list):
        for item in schema:
            yield from _patterns(item, depth + 1)
    elif isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        if isinstance(named := schema.get("patternProperties"), dict):
            yield from named
        for item in schema.values():
            yield from _patterns(item, depth + 1)


def _check_bounds(text: str, lexeme: re.Pattern[str]) -> None:
    """Refuse deep nesting and large products of nested repetition in a regular expression or grammar."""
    largest = [1]  # per open group: the largest product inside it so far
    closed, closed_at = 1, -1  # the same of the group that was closed last, and where that was
    for match in lexeme.finditer(text):
        token = match[0]
        if token == "(":
            largest.append(1)
            if len(largest) > MAX_NESTING:
                raise _too_deep()
        elif token == ")" and len(largest) > 1:
            closed, closed_at = largest.pop(), match.end()
            largest[-1] = max(largest[-1], closed)
        elif token[0] == "{":
            repeats_group = match.start() == closed_at
            times = max(int((match[2] or match[1])[:9]), 1) * (closed if repeats_group else 1)
            if repeats_group and times > MAX_REPETITION:
                raise _refused(f"nested repetitions multiply to {times}, expected at most {MAX_REPETITION}")
            largest[-1] = max(largest[-1], times)


def _too_deep() -> InvalidRequestError:
    return _refused(f"the constraint is nested more than {MAX_NESTING} deep")


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", parameter="structured_outputs")
