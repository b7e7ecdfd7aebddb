"""Rendering a conversation with the model's chat template.

Templates come with the model and expect what Hugging Face's ``transformers`` gives them: Jinja with ``trim_blocks``,
``lstrip_blocks``, ``break``/``continue``, ``{% generation %}``, ``raise_exception``, ``strftime_now`` and a ``tojson``
that keeps non-ASCII text. They run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

from enginewire.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

Message: TypeAlias = Mapping[str, object]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    bos_token: str = "",
    eos_token: str = "",
    **template_kwargs: object,
) -> str:
    """Render ``messages``; see ``Tokenizer.apply_chat_template`` for the arguments.

    Raises:
        InvalidRequestError: the messages are malformed, or the template refuses them.
        ModelError: ``template`` is ``None`` or not Jinja, or jinja2 is not installed.
    """
    checked = check_messages(messages)
    if template is None:
        raise ModelError("this model has no chat template: send it a plain prompt, or use an instruction-tuned model")
    compiled = _compile(template)
    variables: dict[str, object] = {
        "bos_token": bos_token,
        "eos_token": eos_token,
        **template_kwargs,
        "messages": checked,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return compiled.render(variables)
    except Exception as exc:
        raise InvalidRequestError(
            f"the model's chat template refused these messages: {type(exc).__name__}: {exc}", parameter="messages"
        ) from exc


def check_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Check a conversation and bring it into the form that templates know: content is one text.

    Text parts are joined by line breaks. Other keys (``name``, ``tool_calls`` …) are passed on as they are.

    Raises:
        InvalidRequestError: naming the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise InvalidRequestError(
            f"messages must be a non-empty list of messages, got {_shorten(messages)}", parameter="messages"
        )
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: object, index: int) -> dict[str, object]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _bad_message(f"{where} must be a mapping with 'role' and 'content', got {_shorten(message)}")
    fields = dict(cast("Message", message))
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise _bad_message(f"{where} must have a 'role' such as 'user', got {_shorten(role)}")
    content = fields.get("content")
    if content is None:
        # An assistant's message may be nothing but calls of tools.
        if not fields.get("tool_calls"):
            raise _bad_message(f"{where} has no 'content'")
        fields["content"] = ""
    elif isinstance(content, list):
        parts = cast("list[object]", content)
        fields["content"] = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    elif not isinstance(content, str):
        raise _bad_message(f"{where}.content must be text or a list of text parts, got {_shorten(content)}")
    return fields


def _part_text(part: object, where: str) -> str:
    if isinstance(part, Mapping):
        fields = cast("Message", part)
        text = fields.get("text")
        if fields.get("type") == "text" and isinstance(text, str):
            return text
    raise _bad_message(f"{where} must be {{'type': 'text', 'text': …}}, the only known kind, got {_shorten(part)}")


def _bad_message(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, parameter="messages")


def _shorten(value: object) -> str:
    """Tell the kind of a wrong value and no more of it than helps: it may be a prompt or an image."""
    preview = repr(value)
    return f"{type(value).__name__} {preview if len(preview) <= 60 else preview[:57] + '…'}"


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compile a template once: it takes milliseconds, rendering takes microseconds."""
    try:
        import jinja2
    except ImportError as exc:
        raise ModelError('chat templates need the package jinja2: pip install "enginewire[text]"') from exc
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as exc:
        raise ModelError(f"the model's chat template is not valid Jinja: line {exc.lineno}: {exc.message}") from exc


def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training: its body, to us."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain set)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it stands in a prompt; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
