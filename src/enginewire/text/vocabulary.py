"""Which bytes a token stands for, for the two ways in which models spell their tokens.

*Byte level* (GPT-2 and its heirs): each of the 256 bytes is written as one printable character. *SentencePiece*
(Llama 2, Mistral, Gemma): a space is written ``▁`` and a byte that has no token of its own ``<0x0A>``.
"""

from __future__ import annotations

import re
from typing import Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return character to byte: printable ones stand for themselves, the rest moved to U+0100 and up. Source: GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with a character outside of the alphabet is plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str, byte_fallback: bool) -> bytes:
    """Return the bytes of a SentencePiece token.

    Args:
        token: as the vocabulary spells it.
        byte_fallback: whether ``<0x0A>`` is a byte and not text.
    """
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()
