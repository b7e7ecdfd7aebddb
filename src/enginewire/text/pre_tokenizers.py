"""How byte-level models cut a text before BPE, by the names that GGUF files use (``tokenizer.ggml.pre``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_O200K: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut before BPE.

    Attributes:
        pattern: regular expression whose matches are the pieces.
        single_digits: whether every digit is cut out first.
        nfc: whether the text is brought into Unicode's NFC first.
        ignore_merges: whether a piece that is a token as a whole is never taken apart.
        adds_bos: whether a text gets BOS where the file does not say.
    """

    pattern: str
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_plain = PreTokenizer(_GPT2)
_digits = PreTokenizer(_GPT2, single_digits=True)
_llama3 = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
_qwen2 = PreTokenizer(_QWEN2, nfc=True)
_o200k = PreTokenizer(_O200K)

# Only names whose rule is known for certain: a wrong rule gives slightly wrong ids and
# slightly worse answers, which nobody would trace back to here.
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {
        "gpt-2": _plain,
        "gpt-4o": _o200k,
        "llama-bpe": _llama3,
        "llama-v3": _llama3,
        "llama3": _llama3,
        "llama4": _o200k,
        "mpt": _plain,
        "olmo": _plain,
        "phi-2": _plain,
        "qwen2": _qwen2,
        "refact": _digits,
        "smollm": _digits,
        "starcoder": _digits,
        "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    }
)
