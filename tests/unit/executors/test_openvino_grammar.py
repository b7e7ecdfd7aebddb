"""Constraints in OpenVINO's terms, and their bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginewire.errors import InvalidRequestError
from enginewire.executors.openvino_grammar import MAX_CHARS, Constraint, constraint_from, ebnf_literal
from enginewire.wire.sampling import StructuredOutputsParams


def constraint(**params: Any) -> Constraint:
    return constraint_from(StructuredOutputsParams(**params))


def test_a_schema_may_be_text_or_a_map() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    for given in (schema, json.dumps(schema)):
        field, text = constraint(json=given)
        assert (field, json.loads(text)) == ("json_schema", schema)


def test_regex_and_grammar_are_handed_over_as_they_are() -> None:
    assert constraint(regex="[0-9]+") == ("regex", "[0-9]+")
    assert constraint(grammar='root ::= "a"') == ("grammar", 'root ::= "a"')


def test_any_json_object_is_a_schema() -> None:
    assert constraint(json_object=True) == ("json_schema", '{"type": "object"}')


def test_a_choice_becomes_alternatives_of_quoted_texts() -> None:
    assert constraint(choice=["yes", 'no "x"']) == ("grammar", 'root ::= "yes" | "no \\U00000022x\\U00000022"')


def test_a_literal_escapes_what_a_grammar_would_take_for_its_own() -> None:
    assert ebnf_literal('a"\\\n\0é日') == '"a\\U00000022\\U0000005c\\U0000000a\\U00000000é日"'


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": "{"}, "not JSON"),
        ({"json": {"a": {1, 2}}}, "not JSON"),
        ({"json": "[1]"}, "must be an object, got list"),
        ({"choice": []}, "at least one"),
        ({"json_object": False}, "json_object must be true"),
        ({"structural_tag": "x"}, "expected one of json, regex, choice, grammar, json_object"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "65537 bytes, expected at most 65536"),
        ({"json": {}, "whitespace_pattern": "x"}, "whitespace_pattern is not supported"),
        ({"json": {}, "disable_any_whitespace": True}, "disable_any_whitespace is not supported"),
        ({"json": {}, "disable_additional_properties": True}, "disable_additional_properties is not supported"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_reason(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as info:
        constraint(**params)
    assert info.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(" * 100 + "a" + ")" * 100},
        {"grammar": "root ::= " + "(" * 100 + '"a"' + ")" * 100},
        {"json": '{"items":' * 101 + "{}" + "}" * 101},
        {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
        {"json": {"pattern": "(" * 100 + "a" + ")" * 100}},
        {"json": {"patternProperties": {"(" * 100 + "a" + ")" * 100: {}}}},
    ],
)
def test_deep_nesting_is_refused(params: dict[str, Any]) -> None:
    """Some 50,000 brackets overflow the compiler's stack, which ends the process."""
    with pytest.raises(InvalidRequestError, match="nested more than 100 deep"):
        constraint(**params)


def nested(depth: int, atom: str) -> str:
    return "(" * depth + atom + "{4}" + "){4}" * depth


@pytest.mark.parametrize(
    "params",
    [
        {"regex": nested(10, "x")},
        {"regex": f"a|({nested(6, 'x')}y){{100}}"},
        {"regex": "([a-z]{1,1000}){0,1000}"},
        {"regex": "(a{9}){99999999999999999999}"},
        {"grammar": "root ::= " + nested(10, '"x"')},
        {"json": {"type": "string", "pattern": nested(10, "x")}},
    ],
)
def test_nested_repetitions_that_would_exhaust_memory_are_refused(params: dict[str, Any]) -> None:
    """Ten times {4} inside each other take 500 MB, twelve times 8 GB."""
    with pytest.raises(InvalidRequestError, match="nested repetitions"):
        constraint(**params)


@pytest.mark.parametrize(
    "regex",
    [
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}",
        "[a-z]{1000}[0-9]{1000}[A-Z]{1000}",
        "(ab){1000}(cd){1000}",
        "[(((((]{5}" * 50,
        r"\(\(" * 200,
        '"(a|b){3}"',
        "a{,5}",
        ")))",
    ],
)
def test_ordinary_patterns_are_not_refused(regex: str) -> None:
    assert constraint(regex=regex).text == regex


def test_brackets_in_a_grammars_literals_do_not_count() -> None:
    text = 'root ::= "' + "(" * 500 + '" [(((]'
    assert constraint(grammar=text).text == text
