"""What a constraint on the text needs on its way to a vLLM engine, whose frontends check it and choose the library.

Such an engine compiles whatever it is sent, and what does not compile ends it for everybody. Our engines check by
themselves and ignore the choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from enginewire.errors import InvalidRequestError
from enginewire.wire.sampling import StructuredOutputsParams

BACKEND: Final = "guidance"
"""vLLM's frontends try ``xgrammar`` first and fall back to this one after checking with the libraries themselves, which
we do not have. This one takes every kind of constraint, and a regular expression or schema that it does not
understand ends the text at once, where it ends the engine under ``xgrammar`` (seen with 0.25.1)."""

_LEXEME: Final = re.compile(
    r"""(?P<space> \s+ | \#[^\n]* )
    | (?P<rule> [A-Za-z_][\w-]* \s* ::= )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<text> " (?: \\. | [^"\\\n] )* " | \[ \^? (?: \\. | [^\]\\\n] )+ \] | \. )
    | (?P<open> \( ) | (?P<close> \) ) | (?P<or> \| )
    | (?P<times> [*+?] | \{ \d+ (?: , \d* )? \} )""",
    re.VERBOSE,
)


def for_vllm(constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the constraint as a vLLM engine takes it, unless the user has chosen a library and answers for it.

    Raises:
        InvalidRequestError: it would end the engine.
    """
    if constraint.backend is not None:
        return constraint
    if constraint.json is not None:
        _check_schema(constraint.json)
    if constraint.choice is not None and not constraint.choice:
        raise _refused("choice must list at least one text")
    if constraint.json_object is False:
        raise _refused("json_object must be true")
    if constraint.structural_tag is not None:
        _parse_json("structural_tag", constraint.structural_tag)
    if constraint.grammar is not None and "::=" in constraint.grammar:  # else it is in Lark's form
        _check_ebnf(constraint.grammar)
    return msgspec.structs.replace(constraint, backend=BACKEND, backend_was_auto=True)


def _check_schema(schema: object) -> None:
    value = _parse_json("the JSON schema", schema) if isinstance(schema, str) else schema
    if not isinstance(value, dict):
        raise _refused(f"a JSON schema must be an object, got {type(value).__name__}")


def _parse_json(what: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _refused(f"{what} is not JSON: {exc}") from exc


def _check_ebnf(grammar: str) -> None:
    """Refuse a grammar that is not a list of ``name ::= alternatives`` whose names are all defined."""
    rules: set[str] = set()
    names: set[str] = set()
    depth = 0
    previous = "start"
    for kind, word, line in _lexemes(grammar):
        is_wrong = {
            "rule": depth > 0 or previous == "rule",
            "times": previous not in ("name", "text", "close"),
            "close": depth == 0 or previous == "open",
        }.get(kind, previous == "start")
        if is_wrong:
            raise _refused(f"line {line} of the grammar: {word!r} cannot stand there")
        if kind == "rule":
            rules.add(word.removesuffix("::=").rstrip())
        elif kind == "name":
            names.add(word)
        depth += {"open": 1, "close": -1}.get(kind, 0)
        previous = kind
    if depth or previous == "rule":
        raise _refused("the grammar ends in the middle of a rule")
    if missing := sorted((names | {"root"}) - rules):
        raise _refused(f"the grammar has no rule {', '.join(missing)}")


def _lexemes(grammar: str) -> Iterator[tuple[str, str, int]]:
    position, line = 0, 1
    while position < len(grammar):
        match = _LEXEME.match(grammar, position)
        if match is None:
            raise _refused(f"line {line} of the grammar: cannot read {grammar[position : position + 20]!r}")
        if match.lastgroup and match.lastgroup != "space":
            yield match.lastgroup, match[0], line
        line += match[0].count("\n")
        position = match.end()


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {reason}", parameter="structured_outputs")
