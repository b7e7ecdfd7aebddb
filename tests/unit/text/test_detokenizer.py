"""Incremental detokenisation: the same text as decoding at once, never half a character, exact stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire.text.detokenizer import IncrementalDetokenizer
from enginewire.text.tokenizer import ByteTokenizer, Tokenizer, Vocabulary

ECHO = ByteTokenizer()


class TableTokenizer(Tokenizer):
    """A vocabulary without an encoder."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError


# Tokens that end and begin inside of characters, repeat, nest and overlap.
PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aab",
    b" ",
    b" a",
    "é".encode(),
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80a",
]
PIECES += ["日本".encode(), "😀b".encode(), b"\xff", b""]
SPECIAL = len(PIECES)
TOKENIZER = TableTokenizer(Vocabulary({**dict(enumerate(PIECES)), SPECIAL: b"<s>"}, frozenset({SPECIAL}), SPECIAL + 1))
SENTENCEPIECE = TableTokenizer(Vocabulary({0: b" a", 1: b"b", 2: b" ", 3: b"\xc3"}, frozenset(), 4, True))

token_ids = st.lists(st.integers(0, SPECIAL + 1), max_size=40)  # the highest one has no text


def chunks_of(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [list(ids[a:b]) for a, b in pairwise(places)]


@given(token_ids, st.lists(st.integers(0, 1000), max_size=10), st.booleans())
def test_however_tokens_arrive_the_text_is_that_of_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip)
    shown = ""
    for chunk in chunks_of(ids, cuts):
        assert detokenizer.append(chunk) is None
        shown += detokenizer.take_delta(finished=False)
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert expected.startswith(shown)
    shown += detokenizer.take_delta(finished=True)
    assert shown == detokenizer.text == detokenizer.taken_text == expected


@given(st.lists(st.integers(0, 259), max_size=60))
def test_random_bytes_one_at_a_time_give_the_text_of_decode(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(ECHO)
    for token_id in ids:
        detokenizer.append([token_id])
    detokenizer.take_delta(finished=True)
    assert detokenizer.text == ECHO.decode(ids)


@given(st.lists(st.integers(0, 3), max_size=12))
def test_a_sentencepiece_text_loses_its_first_space_only_at_the_start(ids: list[int]) -> None:
    alone = IncrementalDetokenizer(SENTENCEPIECE)
    continued = IncrementalDetokenizer(SENTENCEPIECE, prompt_token_ids=[1])
    for token_id in ids:
        alone.append([token_id])
        continued.append([token_id])
    assert alone.take_delta(finished=True) == SENTENCEPIECE.decode(ids)
    assert "b" + continued.take_delta(finished=True) == SENTENCEPIECE.decode([1, *ids])


def test_half_a_character_is_kept_back_until_it_is_whole() -> None:
    detokenizer = IncrementalDetokenizer(ECHO)
    deltas = []
    for byte in "a😀".encode():
        detokenizer.append([byte])
        deltas.append(detokenizer.take_delta(finished=False))
    assert deltas == ["a", "", "", "", "😀"]


def test_half_a_character_at_the_end_shows_as_one_replacement() -> None:
    detokenizer = IncrementalDetokenizer(ECHO)
    detokenizer.append([97, 0xF0, 0x9F])
    assert detokenizer.take_delta(finished=False) == "a"
    assert detokenizer.take_delta(finished=True) == "\ufffd"
    assert detokenizer.take_delta(finished=True) == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one END")])
def test_a_stop_string_over_several_tokens_cuts_the_text(include: bool, expected: str) -> None:
    detokenizer = IncrementalDetokenizer(ECHO, stop=["END"], include_stop_str_in_output=include)
    found = [detokenizer.append([byte]) for byte in b"one ENDs"]
    assert found == [None] * 6 + ["END", None]
    assert detokenizer.text == detokenizer.take_delta(finished=True) == expected


def test_what_could_begin_a_stop_string_is_kept_back() -> None:
    detokenizer = IncrementalDetokenizer(ECHO, stop=["END"])
    deltas = []
    for byte in b"an EN.":
        detokenizer.append([byte])
        deltas.append(detokenizer.take_delta(finished=False))
    assert deltas == ["", "", "a", "n", " ", "E"]
    assert detokenizer.take_delta(finished=True) == "N."


def test_a_stop_string_that_stays_in_the_text_holds_nothing_back() -> None:
    detokenizer = IncrementalDetokenizer(ECHO, stop=["END"], include_stop_str_in_output=True)
    deltas = []
    for byte in b"aEND":
        detokenizer.append([byte])
        deltas.append(detokenizer.take_delta(finished=False))
    assert deltas == ["a", "E", "N", "D"]


def test_tokens_behind_the_stop_string_do_not_appear() -> None:
    detokenizer = IncrementalDetokenizer(ECHO, stop=["."])
    assert detokenizer.append(list(b"One. Two. \xc3")) == "."
    assert detokenizer.append(list(b"Three")) is None
    assert detokenizer.take_delta(finished=True) == detokenizer.text == "One"


@pytest.mark.parametrize(
    ("stop", "text", "found", "expected"),
    [
        (["abcd", "bc"], "xabcd", "bc", "xa"),
        (["bc", "abc"], "xabcd", "abc", "x"),
        (["z", "b"], "abz", "b", "a"),
        (["aa"], "baaa", "aa", "b"),
    ],
)
def test_the_stop_string_complete_first_wins_whatever_the_chunks(
    stop: list[str], text: str, found: str, expected: str
) -> None:
    at_once = IncrementalDetokenizer(ECHO, stop=stop)
    assert at_once.append(list(text.encode())) == found
    one_by_one = IncrementalDetokenizer(ECHO, stop=stop)
    assert next(filter(None, (one_by_one.append([byte]) for byte in text.encode()))) == found
    assert at_once.text == one_by_one.text == expected


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
@pytest.mark.parametrize("at_once", [True, False])
def test_stop_strings_within_the_first_min_tokens_do_not_count(min_tokens: int, expected: str, at_once: bool) -> None:
    detokenizer = IncrementalDetokenizer(ECHO, stop=["."], min_tokens=min_tokens)
    for chunk in [list(b"a.b.c")] if at_once else [[byte] for byte in b"a.b.c"]:
        detokenizer.append(chunk)
    assert detokenizer.text == expected


def expected_with_stops(ids: list[int], stop: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """Say it plainly: of all places where a stop string ends behind the exempt text, the first counts."""
    text = TOKENIZER.decode(ids)
    first = b"".join(TOKENIZER.bytes_table(True).get(i, b"") for i in ids[:min_tokens])
    exempt = len(utf_8_decode(first, "replace", False)[0])
    for end in range(exempt + 1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    token_ids,
    st.lists(st.text("abé 😀", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 8),
    st.lists(st.integers(0, 1000), max_size=12),
)
def test_stop_strings_agree_with_their_definition(
    ids: list[int], stop: list[str], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(
        TOKENIZER, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    expected, expected_stop = expected_with_stops(ids, stop, include, min_tokens)
    shown, found = "", None
    for chunk in chunks_of(ids, cuts):
        found = found or detokenizer.append(chunk)
        shown += detokenizer.take_delta(finished=False)
        assert expected.startswith(shown)
    shown += detokenizer.take_delta(finished=True)
    assert (shown, found) == (expected, expected_stop)
    assert detokenizer.text == expected
