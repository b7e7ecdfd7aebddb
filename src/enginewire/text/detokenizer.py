"""Turning a request's tokens into text as they come, and finding its stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from enginewire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one request's output so far.

    Whatever way the tokens are cut into calls of :meth:`append`, the text is the same, and without a stop string it is
    ``tokenizer.decode`` of all of them. Two things are kept back from :meth:`take_delta`: the beginning of a character
    whose other bytes have not come yet, and as many characters as could be the beginning of a stop string.
    """

    __slots__ = (
        "_bytes_of",
        "_exempt_tokens",
        "_held_chars",
        "_include_stop",
        "_keeps_text",
        "_open",
        "_overlap",
        "_recent",
        "_stop",
        "_stopped",
        "_strips_space",
        "_taken",
        "_undecoded",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        keeps_text: bool = True,
    ) -> None:
        """Start with no text.

        Args:
            tokenizer: that of the model.
            prompt_token_ids: if there are any, the output continues a text and keeps its first space.
            skip_special_tokens: whether special tokens have no text.
            spaces_between_special_tokens: accepted for the sake of ``SamplingParams``; the tokenizers known here put
                no spaces between tokens in the first place.
            stop: non-empty texts that end the output.
            include_stop_str_in_output: whether the text ends behind the stop string or in front of it.
            min_tokens: a stop string that ends within that many first tokens does not count.
            keeps_text: whether :attr:`taken_text` and :attr:`text` are wanted; a stream of deltas can do without.
        """
        self._keeps_text = keeps_text
        self._bytes_of = tokenizer.bytes_table(skip_special_tokens).get
        self._strips_space = tokenizer.vocabulary.strips_leading_space and not prompt_token_ids
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._exempt_tokens = min_tokens if stop else 0
        self._overlap = max(map(len, stop), default=1) - 1  # characters that may belong to a match not yet complete
        # If the stop string stays in the text, nothing that was shown has to be taken back.
        self._held_chars = 0 if include_stop_str_in_output else self._overlap
        self._undecoded = b""  # the beginning of a character
        self._taken: list[str] = []
        self._open: list[str] = []  # decoded and not taken
        self._recent = ""  # the last characters, self._overlap of them at most
        self._stopped = False

    @property
    def text(self) -> str:
        """All text so far, also what :meth:`take_delta` keeps back."""
        return self.taken_text + "".join(self._open)

    @property
    def taken_text(self) -> str:
        """The text that :meth:`take_delta` has returned so far, joined: what a cumulative stream shows."""
        if len(self._taken) > 1:
            self._taken = ["".join(self._taken)]
        return self._taken[0] if self._taken else ""

    def append(self, new_token_ids: Sequence[int]) -> str | None:
        """Add tokens; leave out the one that ended the output if its text is not wanted (EOS, a stop token).

        Returns:
            The stop string that ended the output, the one that was complete first (of several, the longest). The text
            is cut there and later tokens are ignored. ``None`` while there is none.
        """
        if self._stopped:
            return None
        if (exempt := self._exempt_tokens) > 0:
            self._exempt_tokens -= len(new_token_ids)
            if exempt < len(new_token_ids):
                self._add(self._decode(new_token_ids[:exempt]))
                return self._add_until_stop(self._decode(new_token_ids[exempt:]))
            self._add(self._decode(new_token_ids))
            return None
        new = self._decode(new_token_ids)
        if self._stop:
            return self._add_until_stop(new)
        self._open.append(new)
        return None

    def append_and_take(self, new_token_ids: Sequence[int], finished: bool) -> str:
        """Do :meth:`append` and :meth:`take_delta` in one. Only where there is no stop string to look for."""
        delta = self._decode(new_token_ids)
        if finished:
            self._open.append(delta)
            return self.take_delta(True)
        if delta and self._keeps_text:
            self._taken.append(delta)
        return delta

    def take_delta(self, finished: bool) -> str:
        """Return the text that has not been returned before, as far as it is certain.

        Args:
            finished: whether no token will follow: then everything comes, an incomplete character as U+FFFD.
        """
        if finished:
            self._finish()
        delta = "".join(self._open)
        self._open.clear()
        if self._held_chars and not finished:
            kept = delta[-self._held_chars :]
            delta = delta[: -self._held_chars]
            self._open.append(kept)
        if delta and self._keeps_text:
            self._taken.append(delta)
        return delta

    def _decode(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(token_ids) == 1:
            data = self._undecoded + bytes_of(token_ids[0], b"")
        else:
            data = self._undecoded + b"".join([bytes_of(token_id, b"") for token_id in token_ids])
        text, num_decoded = utf_8_decode(data, "replace", False)
        self._undecoded = data[num_decoded:]
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def _add(self, new: str) -> None:
        self._open.append(new)
        if self._overlap:
            self._recent = (self._recent + new)[-self._overlap :]

    def _add_until_stop(self, new: str) -> str | None:
        window = self._recent + new
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            # Only matches that end in the new text: the others were looked at before, or are exempt.
            start = window.find(stop, max(0, len(self._recent) - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        self._add(new)
        if best is None:
            return None
        end, start, stop = best
        self._stopped = True
        self._undecoded = b""
        surplus = len(window) - (end if self._include_stop else start)
        text = "".join(self._open)
        self._open = [text[: len(text) - surplus]]
        return stop

    def _finish(self) -> None:
        if self._undecoded:
            self._add(self._undecoded.decode("utf-8", "replace"))
            self._undecoded = b""
