"""GrammarProbe on the real grammar compiler. It needs OpenVINO, but no model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from enginewire.errors import InvalidRequestError
from enginewire.executors.openvino_grammar import MAX_REPETITION, constraint_from
from enginewire.executors.openvino_probe import GrammarProbe
from enginewire.wire.sampling import StructuredOutputsParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def probe() -> GrammarProbe:
    return GrammarProbe()


def check(probe: GrammarProbe, **params: Any) -> None:
    probe.check(constraint_from(StructuredOutputsParams(**params)))


@pytest.mark.parametrize(
    "params",
    [
        {"json": {}},
        {"json": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1000}}, "required": ["a"]}},
        {"json": {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}},
        {"regex": ""},
        {"regex": r"\d{3}-\d{4}|é+日?"},
        {"regex": "(" * 98 + "a" + ")" * 98},
        {"regex": f"((ab){{{MAX_REPETITION // 100}}}){{100}}"},
        {"grammar": 'root ::= item ("," item)*\nitem ::= [a-z]{1,3} | "\\"" [^"]* "\\""'},
        {"choice": ["yes", "", '\0\t\n"\\\x7f\u2028é日🙂', "[a-z]*", "root ::= x"]},
        {"json_object": True},
    ],
    ids=lambda params: str(params)[:40],
)
def test_a_valid_constraint_passes(probe: GrammarProbe, params: dict[str, Any]) -> None:
    check(probe, **params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"type": "nonsense"}}, 'the json schema is not valid: Unsupported type "nonsense"'),
        ({"json": {"$ref": "#/$defs/x"}}, "the json schema is not valid: Cannot find field \\$defs"),
        ({"json": {"enum": []}}, "the json schema is not valid"),
        ({"json": {"type": "string", "pattern": "(["}}, "Unclosed"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than maximum"),
        ({"json": {"const": float("nan")}}, "Failed to parse JSON"),
        ({"regex": "(un["}, "the regex is not valid: Regex parsing error at position 5: Unclosed"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"regex": r"(a)\1"}, "Backreference is not supported"),
        ({"grammar": "root ::= nowhere"}, 'the grammar is not valid: .* Rule "nowhere" is not defined'),
        ({"grammar": 'start ::= "a"'}, 'root rule with name "root" is not found'),
        ({"grammar": ""}, "not found"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_constraint_is_refused_with_the_compilers_reason_and_the_probe_goes_on(
    probe: GrammarProbe, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as info:
        check(probe, **params)
    assert info.value.parameter == "structured_outputs"
    assert "/" not in str(info.value).split("valid: ")[1].split(" ")[0], "no path of somebody's build machine"
    check(probe, regex="a+")


def test_the_probe_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check(GrammarProbe(), regex="a")
    assert list(tmp_path.iterdir()) == []
