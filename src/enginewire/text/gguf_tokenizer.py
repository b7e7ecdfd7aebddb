"""The tokenizer that a GGUF file describes in its metadata (``tokenizer.ggml.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from enginewire.errors import ModelError
from enginewire.text.fast_tokenizer import NEEDS_TOKENIZERS, FastTokenizer
from enginewire.text.gguf import GGUFMetadata, read_gguf
from enginewire.text.tokenizer import Tokenizer, Vocabulary
from enginewire.text.vocabulary import byte_level_bytes

if TYPE_CHECKING:
    import tokenizers

_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# End of text, end of turn, end of message: each of them ends generation where the file names it.
_END_KEYS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

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

# By ``tokenizer.ggml.pre``. Only names whose rule is known for certain: a wrong rule gives slightly wrong ids and
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


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer of the GGUF file at ``path``.

    Raises:
        ModelError: the file cannot be read, has no tokenizer, or one of an unknown kind.
    """
    metadata = read_gguf(path)
    rule = _pre_tokenizer(metadata)
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.integers("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{path}: {len(tokens):,} tokens but {len(kinds):,} token types")
    control = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
    added = {i: tokens[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    table = {i: added[i].encode() if i in added else byte_level_bytes(token) for i, token in enumerate(tokens)}

    bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens))
    ends = [end for key in _END_KEYS if (end := _token_id(metadata, key, len(tokens))) is not None]
    adds_bos = metadata.boolean("tokenizer.ggml.add_bos_token")
    adds_eos = metadata.boolean("tokenizer.ggml.add_eos_token")
    return FastTokenizer(
        _bpe_encoder(metadata, tokens, rule, added, control),
        Vocabulary(table, control, len(tokens)),
        bos_token_id=bos,
        eos_token_ids=ends,
        chat_template=metadata.string("tokenizer.chat_template"),
        max_model_len=metadata.context_length,
        prefix=(bos,) if bos is not None and (rule.adds_bos if adds_bos is None else adds_bos) else (),
        suffix=(ends[0],) if ends and adds_eos else (),
    )


def _pre_tokenizer(metadata: GGUFMetadata) -> PreTokenizer:
    kind = metadata.string("tokenizer.ggml.model")
    if kind != "gpt2":
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise ModelError(
            f"{metadata.path}: it has {found}, expected 'gpt2' (byte-level BPE); use the model's Hugging Face folder "
            "with its tokenizer.json instead"
        )
    name = metadata.string("tokenizer.ggml.pre")
    rule = PRE_TOKENIZERS.get(name or "")
    if rule is None:
        raise ModelError(
            f"{metadata.path}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; use the model's Hugging Face folder with its tokenizer.json instead"
        )
    return rule


def _required(metadata: GGUFMetadata, key: str) -> list[str]:
    texts = metadata.strings(key)
    if not texts:
        raise ModelError(f"{metadata.path}: {key} is missing or empty; the model was converted without its tokenizer")
    return texts


def _token_id(metadata: GGUFMetadata, key: str, vocab_size: int) -> int | None:
    token_id = metadata.integer(key)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise ModelError(f"{metadata.path}: {key} is {token_id}, but there are {vocab_size:,} tokens")
    return token_id


def _bpe_encoder(
    metadata: GGUFMetadata, tokens: list[str], rule: PreTokenizer, added: Mapping[int, str], control: frozenset[int]
) -> tokenizers.Tokenizer:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
    except ImportError as exc:
        raise ModelError(NEEDS_TOKENIZERS) from exc

    merges: list[tuple[str, str]] = []
    for merge in _required(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    # Stands for bytes that have no token of their own, as in SmolLM2, which would vanish from the prompt otherwise.
    unknown = _token_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
    unk_token = None if unknown is None else tokens[unknown]
    try:
        encoder = Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, ignore_merges=rule.ignore_merges))
    except Exception as exc:  # tokenizers raises bare Exception
        raise ModelError(f"{metadata.path}: its vocabulary and merges do not fit together: {exc}") from exc
    if rule.nfc:
        encoder.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(rule.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if rule.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    # Found in the vocabulary by their text, so that they keep their ids.
    encoder.add_tokens([AddedToken(text, normalized=False, special=i in control) for i, text in added.items()])
    return encoder
