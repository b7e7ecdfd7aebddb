"""``PrefixIndex``: which engine has seen which prompt prefixes, in bounded memory and bounded time per prompt."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from enginewire.wire.messages import EngineCoreRequest

FIRST_BLOCK: Final = 256
"""Tokens of the shortest prefix. Fewer are computed again in no time, and equal short requests are to spread."""

BLOCK: Final = 16
"""Tokens of the smallest block after that: KV caches share whole blocks, and 16 tokens is the usual size."""

MAX_PREFIXES: Final = 1 << 16
"""Prefixes remembered, about 20 MB. The least recently used go first, as they do in the engines' caches."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The prefixes of one prompt, shortest first.

    Attributes:
        keys: one hash for each; it covers everything before it, so equal keys mean equal prefixes.
        lengths: their lengths in tokens.
    """

    keys: list[int]
    lengths: list[int]


class PrefixIndex:
    """Remembers where prompts went, by hash chains over their blocks.

    Blocks grow with the prefix, by an eighth of its length: a prompt of 32,000 tokens has 43 prefixes instead of 2,000,
    and a match is known to within an eighth, which is all that a choice between engines needs.

    A prefix's engines are the bits of an integer: a system prompt that all engines have costs one number.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._engines: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def prefixes(self, request: EngineCoreRequest) -> Prefixes:
        """Hash a request's prompt. None is found in a prompt of embeddings.

        What separates KV blocks on an engine separates them here: the cache salt, the adapter, the images.
        """
        tokens = request.prompt_token_ids or []
        lora, images = request.lora_request, request.mm_features
        name = (request.cache_salt, lora and lora.lora_int_id, [image.identifier for image in images or ()])
        key = zlib.crc32(repr(name).encode())  # not `hash`: that of a text differs between processes
        keys: list[int] = []
        lengths: list[int] = []
        start, end = 0, FIRST_BLOCK
        while end <= len(tokens):
            key = hash((key, *tokens[start:end]))
            keys.append(key)
            lengths.append(end)
            start, end = end, end + max(BLOCK, end // 8 // BLOCK * BLOCK)
        return Prefixes(keys, lengths)

    def cached(self, prefixes: Prefixes) -> dict[int, int]:
        """Return how many tokens of a prompt each engine has seen, by engine index; engines without any are absent."""
        masks: list[int] = []
        for key in prefixes.keys:
            if not (mask := self._engines.get(key, 0)):
                break
            masks.append(mask)
        found: dict[int, int] = {}
        seen = 0
        for mask, length in zip(reversed(masks), reversed(prefixes.lengths[: len(masks)]), strict=True):
            fresh, seen = mask & ~seen, seen | mask
            while fresh:  # one round per engine, however many prefixes it shares
                lowest = fresh & -fresh
                found[lowest.bit_length() - 1] = length
                fresh ^= lowest
        return found

    def add(self, prefixes: Prefixes, engine_index: int) -> None:
        """Remember that a prompt went to an engine."""
        engines, bit = self._engines, 1 << engine_index
        for key in reversed(prefixes.keys):  # the shortest last: it is forgotten last
            engines[key] = engines.get(key, 0) | bit
            engines.move_to_end(key)
        while len(engines) > self._max_prefixes:
            engines.popitem(last=False)

    def forget(self, engine_index: int) -> None:
        """Forget what an engine had: it died, or emptied its cache."""
        keep = ~(1 << engine_index)
        self._engines = OrderedDict((key, left) for key, mask in self._engines.items() if (left := mask & keep))
