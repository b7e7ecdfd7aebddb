"""What would end a vLLM engine is refused before it is sent."""

from __future__ import annotations

import pytest

from enginewire.errors import InvalidRequestError
from enginewire.frontend.constraints import for_vllm
from enginewire.wire.sampling import StructuredOutputsParams

GOOD_GRAMMARS = [
    'root ::= "yes" | "no"',
    'root ::= item ("," item)*\nitem ::= [a-z]+ # a word\n',
    'root ::= (\n  "a" |\n  "\\"" [^"\\\\]\n){1,3}\n',
    "root::=.\n",
    'start: "yes" | "no"',  # Lark's form, which the engine's library checks without harm
]
BAD_GRAMMARS = {
    "root := x\nroot ::= y": "'root' cannot stand there",
    "root ::= a\na := x": "cannot read ':= x",
    'root ::= "open': "cannot read",
    'root ::= ("a"': "ends in the middle",
    'root ::= "a")': "cannot stand there",
    'root ::= * "a"': "cannot stand there",
    "root ::= ()": "cannot stand there",
    "root ::=": "ends in the middle",
    "root ::= other ::= x": "cannot stand there",
    '"a" root ::= "b"': "cannot stand there",
    "root ::= word": "no rule word",
    'word ::= "a"': "no rule root",
}


def test_the_library_is_chosen_for_the_engine() -> None:
    """A vLLM engine that is told none fails the request; vLLM's frontends say whether it was their choice."""
    sent = for_vllm(StructuredOutputsParams(regex="[a-z]+"))
    assert (sent.regex, sent.backend, sent.backend_was_auto) == ("[a-z]+", "guidance", True)


def test_a_library_that_the_user_chose_is_left_alone() -> None:
    """Also with what we would refuse: there are more forms than we know."""
    chosen = StructuredOutputsParams(grammar="root ::= (", backend="outlines")
    assert for_vllm(chosen) is chosen


@pytest.mark.parametrize("grammar", GOOD_GRAMMARS)
def test_a_grammar_passes(grammar: str) -> None:
    """Forms that users of xgrammar and llama.cpp know."""
    assert for_vllm(StructuredOutputsParams(grammar=grammar)).grammar == grammar


@pytest.mark.parametrize("grammar", BAD_GRAMMARS)
def test_a_broken_grammar_is_refused_with_the_place(grammar: str) -> None:
    """It would end the engine."""
    with pytest.raises(InvalidRequestError, match=BAD_GRAMMARS[grammar]):
        for_vllm(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize(
    "broken",
    [{"json": "{not json"}, {"json": '"text"'}, {"json": "[" * 100_000}, {"choice": []}, {"structural_tag": "{"}],
    ids=["no JSON", "no object", "deep", "no choice", "no tag"],
)
def test_what_is_no_constraint_is_refused(broken: dict[str, object]) -> None:
    """It would end the engine, or mean nothing."""
    with pytest.raises(InvalidRequestError, match="structured_outputs") as caught:
        for_vllm(StructuredOutputsParams(**broken))  # type: ignore[arg-type]
    assert caught.value.parameter == "structured_outputs"
