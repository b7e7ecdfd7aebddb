"""Tokenizers out of GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from enginewire.errors import InvalidRequestError, ModelError
from enginewire.text.pre_tokenizers import PRE_TOKENIZERS
from enginewire.text.tokenizer import Tokenizer, load_tokenizer

WriteGGUF = Callable[..., Path]


def test_a_byte_level_model_encodes_by_its_merges_and_decodes_back(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_bpe))
    assert tokenizer.encode("the the") == [257, 259]
    assert tokenizer.encode("tx") == [ord("t"), ord("x")]
    text = "the 12 naïve\n\n  日本 😀\x00\u00a0"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_metadata_tells_what_the_model_is(write_gguf: WriteGGUF, tiny_bpe: dict[str, object]) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_bpe))
    assert tokenizer.vocab_size == 263
    assert tokenizer.max_model_len == 512
    assert tokenizer.bos_token_id == 261
    assert tokenizer.eos_token_id == 260
    assert tokenizer.eos_token_ids == {260, 261}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|turn|>hi<|end|>"


def test_special_tokens_in_the_text_are_recognised_and_skipped_in_decoding(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_bpe))
    ids = tokenizer.encode("a<|end|>b<tool é>")
    assert ids == [ord("a"), 260, ord("b"), 262]
    assert tokenizer.decode(ids) == "ab<tool é>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b<tool é>"
    assert tokenizer.is_special(260)
    assert not tokenizer.is_special(262)
    assert tokenizer.token_text(260) == "<|end|>"
    assert tokenizer.token_text(259) == " the"
    assert tokenizer.token_text(0xE6) == "\ufffd"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [97]),
        ({"tokenizer.ggml.add_bos_token": True}, [261, 97]),
        ({"tokenizer.ggml.add_eos_token": True}, [97, 260]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, [261, 97, 260]),
    ],
)
def test_the_file_decides_which_special_tokens_surround_a_text(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object], settings: dict[str, object], expected: list[int]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_bpe | settings))
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_llama_3_files_that_say_nothing_about_bos_get_it(write_gguf: WriteGGUF, tiny_bpe: dict[str, object]) -> None:
    del tiny_bpe["tokenizer.ggml.add_bos_token"]
    assert load_tokenizer(write_gguf(tiny_bpe)).encode("a") == [97]
    assert load_tokenizer(write_gguf(tiny_bpe | {"tokenizer.ggml.pre": "llama-bpe"})).encode("a") == [261, 97]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "I'll  pay 1234 x!?\n\n y", ["I", "'ll", " ", " pay", " 1234", " x", "!?", "\n\n", " y"]),
        ("smollm", "I'll pay 123\n", ["I", "'ll", " pay", " ", "1", "2", "3", "\n"]),
        ("llama-bpe", "I'LL pay 12345.\n\n y", ["I", "'LL", " pay", " ", "123", "45", ".\n\n", " y"]),
        ("qwen2", "I'LL pay 12.\n", ["I", "'LL", " pay", " ", "1", "2", ".\n"]),
        ("gpt-4o", "camelCase it's 1234 a/\n", ["camel", "Case", " it's", " ", "123", "4", " a", "/\n"]),
        ("tekken", "camelCase it's 12", ["camel", "Case", " it", "'s", " ", "1", "2"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_were_trained(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object], name: str, text: str, pieces: list[str]
) -> None:
    from tokenizers import pre_tokenizers

    from enginewire.text.fast_tokenizer import FastTokenizer

    tokenizer = load_tokenizer(write_gguf(tiny_bpe | {"tokenizer.ggml.pre": name}))
    assert isinstance(tokenizer, FastTokenizer)
    splitter = tokenizer._encoder.pre_tokenizer
    assert isinstance(splitter, pre_tokenizers.PreTokenizer)
    assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_known_pre_tokenizer_keeps_every_byte(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object], name: str
) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_bpe | {"tokenizer.ggml.pre": name}))
    text = "The 2nd DON'T\r\n\t  naïve — 日本語١٢ 😀 \u00a0x_y//z  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.fixture
def tiny_sentencepiece() -> dict[str, object]:
    """Give the metadata of a tiny SentencePiece model: ids 3 to 258 are bytes."""
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -1.0, "bc": -2.0, "▁a": -3.0, "▁ab": -4.0, "▁▁": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_sentencepiece_model_joins_the_best_scored_pair_first(
    write_gguf: WriteGGUF, tiny_sentencepiece: dict[str, object]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tiny_sentencepiece))

    def pieces(text: str) -> list[str]:
        return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("abc") == [" ab", "c"]  # "ab" goes before "bc"
    assert pieces("ac a") == [" a", "c", " a"]
    assert pieces("  ab") == ["  ", " ab"]
    assert pieces("é") == [" ", "\ufffd", "\ufffd"]  # bytes, as there is no such token
    assert pieces("</s>a") == ["</s>", " a"]


@pytest.mark.parametrize("adds_space", [True, False])
@pytest.mark.parametrize("text", ["abc", " abc", "  a\n\tb", "日本 😀", ""])
def test_a_sentencepiece_model_decodes_what_it_encoded(
    write_gguf: WriteGGUF, tiny_sentencepiece: dict[str, object], text: str, adds_space: bool
) -> None:
    metadata = tiny_sentencepiece | {"tokenizer.ggml.add_space_prefix": adds_space}
    tokenizer = load_tokenizer(write_gguf(metadata))
    ids = tokenizer.encode(text)
    assert ids[0] == 1, "such models begin a text with BOS unless the file says otherwise"
    assert tokenizer.decode(ids) == text


def test_user_defined_runs_of_spaces_are_found_unless_a_space_prefix_makes_them_ambiguous(
    write_gguf: WriteGGUF, tiny_sentencepiece: dict[str, object]
) -> None:
    """Gemma has such tokens and no prefix."""
    kinds = tiny_sentencepiece["tokenizer.ggml.token_type"]
    assert isinstance(kinds, list)
    kinds[-1] = 4  # "▁▁"
    plain = load_tokenizer(write_gguf(tiny_sentencepiece | {"tokenizer.ggml.add_space_prefix": False}))
    ids = plain.encode("   ab", add_special_tokens=False)
    assert [plain.token_text(i) for i in ids] == ["  ", " ab"]
    with pytest.raises(ModelError, match="user-defined tokens that begin with a space"):
        load_tokenizer(write_gguf(tiny_sentencepiece))


def test_a_sentencepiece_model_needs_its_scores(write_gguf: WriteGGUF, tiny_sentencepiece: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"1 tokenizer\.ggml\.scores for 268 tokens"):
        load_tokenizer(write_gguf(tiny_sentencepiece | {"tokenizer.ggml.scores": [0.5]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "unknown pre-tokenizer 'klingon'.*known are gpt-2, .*smollm"),
        ({"tokenizer.ggml.model": "t5"}, "a tokenizer of kind 't5', expected 'gpt2'"),
        ({"tokenizer.ggml.tokens": []}, "converted without its tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "263 tokens but 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 263}, "eos_token_id is 263, but there are 263 tokens"),
        ({"tokenizer.ggml.merges": ["t nowhere"]}, "do not fit together"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_right_is_refused(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(write_gguf(tiny_bpe | changes))
    assert "model.gguf" in str(caught.value)


def test_bytes_without_a_token_become_the_unknown_token(write_gguf: WriteGGUF, tiny_bpe: dict[str, object]) -> None:
    """SmolLM2 has no token for the byte F1; dropping it would change the prompt without a trace."""
    tokens = tiny_bpe["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[ord("q")] = "unused"
    tokenizer = load_tokenizer(write_gguf(tiny_bpe | {"tokenizer.ggml.unknown_token_id": 260}))
    assert tokenizer.encode("aqa") == [97, 260, 97]


def test_text_without_a_utf8_form_is_refused(write_gguf: WriteGGUF, tiny_bpe: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D, at position 1"):
        load_tokenizer(write_gguf(tiny_bpe)).encode("a\ud83d")


def test_a_missing_tokenizers_package_names_the_extra(
    write_gguf: WriteGGUF, tiny_bpe: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModelError, match=r'pip install "enginewire\[text\]"'):
        load_tokenizer(write_gguf(tiny_bpe))


# Computed by OpenVINO GenAI's own tokenizer for the same file.
GOLDEN: dict[str, list[int]] = {
    "": [],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    " leading  and   inner spaces\n\n\ttabs": [2899, 216, 284, 256, 6210, 5600, 1116, 197, 100, 7366],
    "I'm sure you'll pay $1,234.56 in 2024": [
        57,
        5248,
        2090,
        346,
        3060,
        2290,
        1885,
        33,
        28,
        34,
        35,
        36,
        30,
        37,
        38,
        281,
        216,
        34,
        32,
        34,
        36,
    ],
    "def f(x):\n    return x ** 2  # square": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 5222],
    "naïve café — “quotes”": [3546, 46494, 37366, 1841, 619, 385, 2346, 573],
    "日本語 中文 한국어": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        216,
        28589,
        29184,
        216,
        33085,
        246,
        181,
        130,
        251,
        183,
        240,
        129,
    ],
    "мир שלום مرحبا": [17868, 7872, 9175, 12960, 119, 31838, 23970, 162, 247, 36395, 20602, 44626, 31462, 10805],
    "👩\u200d👩\u200d👧 🇩🇪 👍🏽": [
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        119,
        321,
        231,
        10813,
        235,
        117,
        15107,
        225,
        119,
        10813,
        225,
        120,
        15107,
        235,
        231,
        10813,
        233,
        138,
    ],
    "½ ٣ ⅷ": [16738, 216, 164, 113, 216, 173, 223, 132],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "https://example.com/a?b=c&d=%20": [4687, 1742, 7434, 30, 824, 31, 81, 47, 82, 45, 83, 22, 84, 23446, 34, 32],
}


@pytest.mark.model
@pytest.mark.parametrize("text", GOLDEN)
def test_the_real_model_encodes_as_openvino_does(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.encode(text) == GOLDEN[text]
    assert smollm2.decode(GOLDEN[text], skip_special_tokens=False) == text


@pytest.mark.model
def test_the_real_models_chat_template_gives_its_training_format(smollm2: Tokenizer) -> None:
    assert smollm2.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (smollm2.eos_token_ids, smollm2.bos_token_id, smollm2.max_model_len) == ({2}, 1, 8192)
