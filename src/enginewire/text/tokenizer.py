"""What every tokenizer offers, the built-in one of the model ``echo``, and the way from a model to its tokenizer.

A token stands for bytes, and decoding is joining them: :class:`Tokenizer` holds one table from id to bytes, so that
:meth:`Tokenizer.decode` and the incremental detokenizer cannot disagree. All byte-level BPE and SentencePiece-like
tokenizers are of this kind; others (WordPiece …) are refused when they are loaded.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from enginewire.errors import InvalidRequestError
from enginewire.text.chat import Message, render_chat

ECHO_MODEL: Final = "echo"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer mean.

    Attributes:
        token_bytes: id to the bytes it stands for; ids that have no text are absent.
        special_ids: ids that structure the input (``<|im_end|>``) and are no text of the answer.
        size: one more than the highest id.
        strips_leading_space: whether a text's first space is an artefact of tokenization (SentencePiece).
    """

    token_bytes: Mapping[int, bytes]
    special_ids: frozenset[int]
    size: int
    strips_leading_space: bool = False


class Tokenizer(ABC):
    """Text to token ids and back. Instances are immutable and may be used by several threads.

    Attributes:
        vocabulary: the bytes of every token.
        vocab_size: one more than the highest id.
        bos_token_id: begins a sequence; ``None`` if the model has no such token.
        eos_token_id: the primary end token; ``None`` if the model has none.
        eos_token_ids: every token that ends generation (end of text, end of turn …).
        chat_template: Jinja source, ``None`` if the model has none.
        max_model_len: tokens the model was made for, prompt and output together; ``None`` if it does not say.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Set what the models' files tell; the first of ``eos_token_ids`` is the primary one."""
        eos = tuple(eos_token_ids)
        self.vocabulary: Final = vocabulary
        self.vocab_size: Final = vocabulary.size
        self.bos_token_id: Final = bos_token_id
        self.eos_token_id: Final = eos[0] if eos else None
        self.eos_token_ids: Final = frozenset(eos)
        self.chat_template: Final = chat_template
        self.max_model_len: Final = max_model_len
        self._visible_bytes: Final = {
            token_id: text
            for token_id, text in vocabulary.token_bytes.items()
            if token_id not in vocabulary.special_ids
        }

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids; special tokens that are spelled out in the text are recognised.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: whether to add what the model expects around a text (BOS for most that have one).
                Pass False for a rendered chat template, which has them already.

        Raises:
            InvalidRequestError: the text has no UTF-8 form.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn ids into text. Bytes that are not UTF-8 become U+FFFD; ids without a text are left out."""
        bytes_of = self.bytes_table(skip_special_tokens)
        text = b"".join([bytes_of.get(token_id, b"") for token_id in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.vocabulary.strips_leading_space else text

    def bytes_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Return the table from id to bytes, with or without the special tokens. It must not be changed."""
        return self._visible_bytes if skip_special_tokens else self.vocabulary.token_bytes

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, empty for an id without a text."""
        return self.vocabulary.token_bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """Return one token for display; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Tell whether a token structures the input instead of being text."""
        return token_id in self.vocabulary.special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **template_kwargs: object,
    ) -> str:
        """Render a conversation into the text that the model was trained on.

        Args:
            messages: mappings with ``role`` and ``content`` (text, or OpenAI content parts of type text).
            add_generation_prompt: whether to open the assistant's turn at the end.
            tools: function descriptions, for templates that know them.
            template_kwargs: further variables for the template (``enable_thinking=False``).

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
            ModelError: the model has no chat template, or a broken one.
        """
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            bos_token="" if self.bos_token_id is None else self.token_text(self.bos_token_id),
            eos_token="" if self.eos_token_id is None else self.token_text(self.eos_token_id),
            **template_kwargs,
        )


def check_encodable(text: str) -> None:
    """Refuse text that has no UTF-8 form, naming the first offending character."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"the text has a lone surrogate, U+{ord(text[exc.start]):04X}, at position {exc.start}; "
            "it must be encodable as UTF-8",
            parameter="prompt",
        ) from exc


class ByteTokenizer(Tokenizer):
    """The tokenizer of the model ``echo``: ids 0 to 255 are bytes, then four special tokens. It needs no files."""

    SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
    CHAT_TEMPLATE: Final = (
        "{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def __init__(self) -> None:
        """Make the one there is."""
        self._special_ids: Final = {text: 256 + index for index, text in enumerate(self.SPECIAL_TOKENS)}
        self._special_pattern: Final = re.compile("(" + "|".join(map(re.escape, self.SPECIAL_TOKENS)) + ")")
        table = {byte: bytes([byte]) for byte in range(256)}
        table.update({token_id: text.encode() for text, token_id in self._special_ids.items()})
        super().__init__(
            Vocabulary(table, frozenset(self._special_ids.values()), len(table)),
            bos_token_id=self._special_ids["<|bos|>"],
            eos_token_ids=(self._special_ids["<|eos|>"], self._special_ids["<|im_end|>"]),
            chat_template=self.CHAT_TEMPLATE,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into its UTF-8 bytes; nothing is added around it."""
        check_encodable(text)
        ids: list[int] = []
        for part in self._special_pattern.split(text):
            special = self._special_ids.get(part)
            ids.extend(part.encode() if special is None else (special,))
        return ids


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Load the tokenizer that belongs to a model.

    Args:
        model: ``"echo"``, a GGUF file, or a folder in Hugging Face's layout (``tokenizer.json`` …).

    Raises:
        ModelError: there is no such model, its tokenizer is of an unknown kind, or the extra ``text`` is missing.
    """
    if str(model) == ECHO_MODEL:
        return ByteTokenizer()
    path = Path(model)
    # Imported here, so that a model's kind loads only what it needs.
    if path.is_dir():
        from enginewire.text.huggingface import load_folder_tokenizer

        return load_folder_tokenizer(path)
    from enginewire.text.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(path)
