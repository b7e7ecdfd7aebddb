"""What every tokenizer offers, shown on the built-in one, and the choice of a tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewire.errors import InvalidRequestError, ModelError
from enginewire.text.tokenizer import ByteTokenizer, load_tokenizer

ECHO = ByteTokenizer()


@pytest.mark.parametrize("model", ["echo", Path("echo")])
def test_echo_has_a_tokenizer_without_files(model: str | Path) -> None:
    tokenizer = load_tokenizer(model)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9]


@given(st.text())
def test_byte_tokens_give_every_text_back(text: str) -> None:
    assert ECHO.decode(ECHO.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_recognised_shown_and_skipped() -> None:
    ids = ECHO.encode("<|im_start|>a<|im_end|>")
    assert ids == [258, 97, 259]
    assert [ECHO.is_special(i) for i in ids] == [True, False, True]
    assert ECHO.decode(ids) == "a"
    assert ECHO.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert (ECHO.bos_token_id, ECHO.eos_token_id, ECHO.eos_token_ids, ECHO.vocab_size) == (256, 257, {257, 259}, 260)
    assert ECHO.max_model_len is None


def test_parts_of_characters_and_unknown_ids_decode_without_an_error() -> None:
    assert ECHO.decode([0xC3, 97]) == "\ufffda"
    assert ECHO.decode([97, 100_000, -1, 98]) == "ab"
    assert ECHO.token_text(0xC3) == "\ufffd"
    assert ECHO.token_bytes(0xC3) == b"\xc3"
    assert ECHO.token_text(-1) == ""


def test_the_chat_template_of_echo_has_one_turn_per_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert ECHO.apply_chat_template(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ECHO.apply_chat_template(messages[1:], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+DC00, at position 0"):
        ECHO.encode("\udc00")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        load_tokenizer(tmp_path / "missing.gguf")


def test_importing_the_package_loads_no_tokenizer_library() -> None:
    """Issue 2, import rule; ``echo`` needs none either."""
    code = (
        "import sys, enginewire.text, enginewire.text.detokenizer, enginewire.models\n"
        "from enginewire.text.tokenizer import load_tokenizer\n"
        "load_tokenizer('echo').encode('x')\n"
        "print(sorted({'numpy', 'tokenizers', 'jinja2', 'openvino'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
