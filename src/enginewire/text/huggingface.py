"""The tokenizer of a model folder in Hugging Face's layout, which OpenVINO model folders share.

``tokenizer.json`` is needed; ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json``,
``config.json``, ``chat_template.jinja`` and ``chat_template.json`` are read where they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from enginewire.errors import ModelError
from enginewire.text.fast_tokenizer import NEEDS_TOKENIZERS, FastTokenizer
from enginewire.text.tokenizer import Tokenizer, Vocabulary
from enginewire.text.vocabulary import byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    import tokenizers

JSONObject: TypeAlias = Mapping[str, object]

# transformers writes 10^30 for "no limit" into model_max_length.
_NO_LENGTH_LIMIT: Final = 10**9


def load_folder_tokenizer(folder: Path) -> Tokenizer:
    """Build the tokenizer of the model in ``folder``.

    Raises:
        ModelError: ``tokenizer.json`` is missing or damaged, or its way of decoding is unknown.
    """
    encoder = _load_encoder(folder / "tokenizer.json")
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    names = {**_read_json(folder / "special_tokens_map.json"), **settings}

    def token_id(name: str) -> int | None:
        text = _token_text(names.get(name))
        return None if text is None else encoder.token_to_id(text)

    ends = [token_id("eos_token"), *_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    bos = token_id("bos_token")
    return FastTokenizer(
        encoder,
        _vocabulary(encoder, folder),
        bos_token_id=bos if bos is not None else next(_ids(config.get("bos_token_id")), None),
        eos_token_ids=[end for end in ends if end is not None],
        chat_template=_chat_template(folder, settings),
        max_model_len=_max_model_len(config, settings),
    )


def _load_encoder(path: Path) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer as Encoder
    except ImportError as exc:
        raise ModelError(NEEDS_TOKENIZERS) from exc
    if not path.is_file():
        raise ModelError(
            f"{path.parent}: no tokenizer.json in this folder; expected a model folder of Hugging Face or OpenVINO, "
            "or the path of a .gguf file"
        )
    try:
        encoder = Encoder.from_file(str(path))
    except Exception as exc:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: cannot be loaded: {exc}") from exc
    # A tokenizer.json made for training may cut and pad; a prompt must come through whole.
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _vocabulary(encoder: tokenizers.Tokenizer, folder: Path) -> Vocabulary:
    added = encoder.get_added_tokens_decoder()
    bytes_of, strips_leading_space = _decoding(encoder, folder)
    table = {i: bytes_of(token) for token, i in encoder.get_vocab(with_added_tokens=True).items()}
    table.update({i: token.content.encode() for i, token in added.items()})
    special = frozenset(i for i, token in added.items() if token.special)
    return Vocabulary(table, special, max(table, default=-1) + 1, strips_leading_space)


def _decoding(encoder: tokenizers.Tokenizer, folder: Path) -> tuple[Callable[[str], bytes], bool]:
    """Tell how this tokenizer's tokens become bytes, and whether a text's first space is dropped."""
    decoder = encoder.decoder
    state = cast("JSONObject", json.loads(decoder.__getstate__())) if decoder is not None else {"type": None}
    steps = cast("list[JSONObject]", state["decoders"]) if state["type"] == "Sequence" else [state]
    kinds = {str(step["type"]) for step in steps}
    strips = [step for step in steps if step["type"] == "Strip"]
    replaces = [step for step in steps if step["type"] == "Replace"]
    spaces_only = all((step["pattern"], step["content"]) == ({"String": "▁"}, " ") for step in replaces)
    one_space_only = all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in strips)

    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return byte_level_bytes, False
    if kinds == {"Metaspace"} and state["replacement"] == "▁":
        return (lambda token: sentencepiece_bytes(token, byte_fallback=False)), state["prepend_scheme"] != "never"
    if replaces and spaces_only and one_space_only and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        byte_fallback = "ByteFallback" in kinds
        return (lambda token: sentencepiece_bytes(token, byte_fallback)), bool(strips)
    raise ModelError(
        f"{folder}: tokenizer.json decodes by {', '.join(sorted(kinds))}, expected byte-level BPE (ByteLevel) or "
        "SentencePiece (Metaspace, or Replace with ByteFallback, Fuse and Strip), which language models use"
    )


def _chat_template(folder: Path, settings: JSONObject) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):  # several by name; "default" is the one for conversations
        named = {str(entry["name"]): entry["template"] for entry in cast("list[JSONObject]", found)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _max_model_len(config: JSONObject, settings: JSONObject) -> int | None:
    """Return the context length; multimodal models keep it in ``text_config``."""
    text_config = config.get("text_config")
    inner = cast("JSONObject", text_config) if isinstance(text_config, dict) else {}
    for value in (
        config.get("max_position_embeddings"),
        inner.get("max_position_embeddings"),
        settings.get("model_max_length"),
    ):
        if isinstance(value, int) and 0 < value < _NO_LENGTH_LIMIT:
            return value
    return None


def _token_text(value: object) -> str | None:
    """Return a special token's text, which these files give plainly or as a serialised AddedToken."""
    if isinstance(value, dict):
        value = cast("JSONObject", value).get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> Iterator[int]:
    """Yield the ids of a field that holds one, several or none."""
    for item in cast("list[object]", value) if isinstance(value, list) else [value]:
        if isinstance(item, int) and item >= 0:
            yield item


def _read_json(path: Path) -> JSONObject:
    """Return the object in a JSON file, an empty one if there is no such file."""
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return cast("JSONObject", value)
