"""A tokenizer whose encoder is Hugging Face's ``tokenizers``, wherever its parts were read from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from enginewire.text.tokenizer import Tokenizer, Vocabulary, check_encodable

if TYPE_CHECKING:
    import tokenizers

NEEDS_TOKENIZERS: Final = 'the tokenizer of a model needs the package tokenizers: pip install "enginewire[text]"'


class FastTokenizer(Tokenizer):
    """Encodes with ``tokenizers``, decodes by the table that every tokenizer has."""

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        max_model_len: int | None = None,
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
    ) -> None:
        """Wrap ``encoder``; ``prefix`` and ``suffix`` are special tokens that its own post-processor does not add."""
        super().__init__(
            vocabulary,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            chat_template=chat_template,
            max_model_len=max_model_len,
        )
        self._encoder: Final = encoder
        self._prefix: Final = prefix
        self._suffix: Final = suffix

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids; see :meth:`Tokenizer.encode`."""
        check_encodable(text)
        ids = self._encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids
