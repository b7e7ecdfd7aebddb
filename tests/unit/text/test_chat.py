"""Chat templates: what they are given, and what becomes of bad messages and bad templates."""

from __future__ import annotations

import re
from typing import Any

import pytest

from enginewire.errors import InvalidRequestError, ModelError
from enginewire.text.chat import check_messages, render_chat

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if true %}\n  {% set x = 1 %}\nA{{ x }}\n{% endif %}", "A1\n"),
        ("{{ {'k': 'é<&>'} | tojson }}", '{"k": "é<&>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", "Hi."),
        ("{{ bos_token }}{{ messages[0]['role'] }}{{ eos_token }}", "<s>user</s>"),
        ("{{ tools is none }} {{ add_generation_prompt }} {{ enable_thinking }}", "True True False"),
        ("{{ messages | length }}{{ undefined_name }}", "1"),
    ],
)
def test_templates_get_what_transformers_gives_them(template: str, expected: str) -> None:
    rendered = render_chat(template, [USER], bos_token="<s>", eos_token="</s>", enable_thinking=False)
    assert rendered == expected


def test_the_date_is_there_for_templates_that_state_it() -> None:
    assert re.fullmatch(r"\d\d \w{3} \d{4}", render_chat("{{ strftime_now('%d %b %Y') }}", [USER]))


def test_tools_reach_the_template() -> None:
    assert render_chat("{{ tools[0].name }}", [USER], tools=[{"name": "search"}]) == "search"


def test_text_parts_become_one_text_and_other_keys_stay() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts, "name": "Eve"}]) == [
        {"role": "user", "content": "a\nb", "name": "Eve"}
    ]


def test_a_message_may_be_nothing_but_tool_calls() -> None:
    calls = [{"type": "function"}]
    assert check_messages([{"role": "assistant", "content": None, "tool_calls": calls}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list of messages, got list"),
        ("Hi", "non-empty list of messages, got str 'Hi'"),
        (USER, "non-empty list of messages, got dict"),
        ([USER, "Hi"], r"messages\[1\] must be a mapping"),
        ([{"content": "Hi"}], r"messages\[0\] must have a 'role'.* got NoneType"),
        ([{"role": 3, "content": "Hi"}], "must have a 'role'.* got int 3"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text or a list of text parts, got int 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be \{'type': 'text'.*image_url"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render_chat("{{ messages }}", messages)
    assert caught.value.parameter == "messages"


def test_long_values_are_not_repeated_in_the_error() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages([{"role": "user", "content": {"data": "x" * 10_000}}])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_blames_the_messages_and_says_why(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render_chat(template, [USER])


def test_a_template_that_is_not_jinja_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="not valid Jinja: line 2"):
        render_chat("\n{% if %}", [USER])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        render_chat(None, [USER])


def test_a_missing_jinja2_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ModelError, match=r'pip install "enginewire\[text\]"'):
        render_chat("only here, hence not compiled before", [USER])
