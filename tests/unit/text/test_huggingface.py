"""Tokenizers out of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Encoder

from enginewire.errors import ModelError
from enginewire.text.tokenizer import load_tokenizer

EOS = {"eos_token": "</s>", "bos_token": {"content": "<s>", "special": True}}


def byte_level_encoder() -> Encoder:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|eot|>")])
    encoder.add_tokens([AddedToken("<think>", special=False)])
    encoder.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return encoder


def sentencepiece_encoder() -> Encoder:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    encoder = Encoder(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return encoder


def make_folder(folder: Path, encoder: Encoder, **files: Any) -> Path:
    encoder.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_byte_level_folder_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, byte_level_encoder(), tokenizer_config=EOS))
    text = "naïve 日本 😀\n"
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id == 256
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a</s><think>", add_special_tokens=False)) == "a<think>"
    assert tokenizer.vocab_size == 260
    assert [tokenizer.is_special(i) for i in (257, 258, 259)] == [True, True, False]


@pytest.mark.parametrize("text", ["a a", " a", "é a😀", "", "a  a"])
def test_a_sentencepiece_folder_decodes_as_tokenizers_does(tmp_path: Path, text: str) -> None:
    encoder = sentencepiece_encoder()
    tokenizer = load_tokenizer(make_folder(tmp_path, encoder))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == encoder.decode(ids) == text


def test_metaspace_decoders_drop_the_first_space_unless_they_never_add_it(tmp_path: Path) -> None:
    encoder = sentencepiece_encoder()
    for scheme, expected in [("always", "a a"), ("never", " a a")]:
        encoder.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = load_tokenizer(make_folder(tmp_path, encoder))
        ids = [259, 259]
        assert tokenizer.decode(ids) == encoder.decode(ids) == expected


def test_end_tokens_come_from_all_files_and_the_tokenizers_one_is_primary(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path,
        byte_level_encoder(),
        special_tokens_map=EOS,
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 257, "max_position_embeddings": 4096},
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (257, {257, 258})
    assert tokenizer.max_model_len == 4096


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config": {"model_max_length": 10**30}}, None),
        ({"tokenizer_config": {"model_max_length": 512}}, 512),
        ({"config": {"text_config": {"max_position_embeddings": 64}}}, 64),
    ],
)
def test_the_context_length_is_looked_for_where_models_state_it(
    tmp_path: Path, files: dict[str, Any], expected: int | None
) -> None:
    assert load_tokenizer(make_folder(tmp_path, byte_level_encoder(), **files)).max_model_len == expected


def test_the_chat_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = make_folder(tmp_path, byte_level_encoder(), tokenizer_config={"chat_template": "C"})
    assert load_tokenizer(folder).chat_template == "C"
    make_folder(tmp_path, byte_level_encoder(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).chat_template == "J"


def test_cutting_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    encoder = byte_level_encoder()
    encoder.enable_truncation(3)
    encoder.enable_padding(length=8)
    tokenizer = load_tokenizer(make_folder(tmp_path, encoder))
    assert len(tokenizer.encode("abcdefghijkl", add_special_tokens=False)) == 12
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in this folder"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path, byte_level_encoder())
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        load_tokenizer(tmp_path)


def test_a_way_of_decoding_that_is_not_joining_bytes_is_refused(tmp_path: Path) -> None:
    encoder = byte_level_encoder()
    encoder.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decodes by WordPiece, expected byte-level BPE"):
        load_tokenizer(make_folder(tmp_path, encoder))
