"""The tokenizer that a GGUF file describes in its metadata (``tokenizer.ggml.*``).

Two kinds are known by ``tokenizer.ggml.model``: ``gpt2`` is byte-level BPE with a list of merges and a named way to cut
the text first; ``llama`` is SentencePiece's BPE, which joins the pair whose result has the best score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from enginewire.errors import ModelError
from enginewire.text.fast_tokenizer import NEEDS_TOKENIZERS, FastTokenizer
from enginewire.text.gguf import GGUFMetadata, read_gguf
from enginewire.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from enginewire.text.tokenizer import Tokenizer, Vocabulary
from enginewire.text.vocabulary import byte_level_bytes, sentencepiece_bytes

if TYPE_CHECKING:
    import tokenizers

# Values of tokenizer.ggml.token_type.
_NORMAL: Final = 1
_CONTROL: Final = 3
_USER_DEFINED: Final = 4

# End of text, end of turn, end of message: each of them ends generation where the file names it.
_END_KEYS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer of the GGUF file at ``path``.

    Raises:
        ModelError: the file cannot be read, has no tokenizer, or one of an unknown kind.
    """
    metadata = read_gguf(path)
    kind = metadata.string("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        found = "no tokenizer" if kind is None else f"a tokenizer of kind {kind!r}"
        raise ModelError(
            f"{path}: it has {found}, expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece); use the model's "
            "Hugging Face folder with its tokenizer.json instead"
        )
    tokens = _Tokens.read(metadata, spells_spaces=kind == "llama")
    if kind == "gpt2":
        rule = _pre_tokenizer(metadata)
        encoder, vocabulary = _byte_level_encoder(metadata, tokens, rule), _byte_level_vocabulary(tokens)
        adds_bos = rule.adds_bos
    else:
        adds_space = metadata.boolean("tokenizer.ggml.add_space_prefix") is not False
        encoder = _sentencepiece_encoder(metadata, tokens, adds_space)
        vocabulary = _sentencepiece_vocabulary(tokens, adds_space)
        adds_bos = True

    bos = _token_id(metadata, "tokenizer.ggml.bos_token_id", vocabulary.size)
    ends = [end for key in _END_KEYS if (end := _token_id(metadata, key, vocabulary.size)) is not None]
    if (stated := metadata.boolean("tokenizer.ggml.add_bos_token")) is not None:
        adds_bos = stated
    adds_eos = metadata.boolean("tokenizer.ggml.add_eos_token") or False
    return FastTokenizer(
        encoder,
        vocabulary,
        bos_token_id=bos,
        eos_token_ids=ends,
        chat_template=metadata.string("tokenizer.chat_template"),
        max_model_len=metadata.context_length,
        prefix=(bos,) if bos is not None and adds_bos else (),
        suffix=(ends[0],) if ends and adds_eos else (),
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The file's list of tokens.

    Attributes:
        texts: as the encoder's vocabulary spells them, ``[vocab_size]``.
        kinds: ``tokenizer.ggml.token_type``, ``[vocab_size]``.
        control: ids of the special tokens.
        added: id to text of the tokens that are found in a text before it is cut.
        unknown: id of the token for what has none, ``None`` if there is no such token.
    """

    texts: list[str]
    kinds: list[int]
    control: frozenset[int]
    added: Mapping[int, str]
    unknown: int | None

    @classmethod
    def read(cls, metadata: GGUFMetadata, spells_spaces: bool) -> _Tokens:
        """Read them; ``spells_spaces`` tells whether the file writes ``▁`` for a space."""
        texts = _required(metadata, "tokenizer.ggml.tokens")
        kinds = metadata.integers("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
        if len(kinds) != len(texts):
            raise ModelError(f"{metadata.path}: {len(texts):,} tokens but {len(kinds):,} token types")
        if spells_spaces:
            # User-defined tokens are looked for in the text as it came, which has no ▁ in it yet.
            texts = [text.replace("▁", " ") if kinds[i] == _USER_DEFINED else text for i, text in enumerate(texts)]
        return cls(
            texts,
            kinds,
            control=frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL),
            added={i: texts[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)},
            unknown=_token_id(metadata, "tokenizer.ggml.unknown_token_id", len(texts)),
        )


def _pre_tokenizer(metadata: GGUFMetadata) -> PreTokenizer:
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


def _byte_level_vocabulary(tokens: _Tokens) -> Vocabulary:
    added = tokens.added
    table = {i: added[i].encode() if i in added else byte_level_bytes(text) for i, text in enumerate(tokens.texts)}
    return Vocabulary(table, tokens.control, len(table))


def _sentencepiece_vocabulary(tokens: _Tokens, adds_space: bool) -> Vocabulary:
    control = tokens.control
    table = {
        i: text.encode() if i in control else sentencepiece_bytes(text, byte_fallback=True)
        for i, text in enumerate(tokens.texts)
    }
    return Vocabulary(table, control, len(table), strips_leading_space=adds_space)


def _byte_level_encoder(metadata: GGUFMetadata, tokens: _Tokens, rule: PreTokenizer) -> tokenizers.Tokenizer:
    merges: list[tuple[str, str]] = []
    for merge in _required(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    # The unknown token stands for bytes without a token, as in SmolLM2, which would vanish from the prompt otherwise.
    encoder = _bpe(metadata, tokens, merges, ignore_merges=rule.ignore_merges)
    from tokenizers import Regex, normalizers, pre_tokenizers

    if rule.nfc:
        encoder.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(rule.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if rule.single_digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return encoder


def _sentencepiece_encoder(metadata: GGUFMetadata, tokens: _Tokens, adds_space: bool) -> tokenizers.Tokenizer:
    scores = metadata.floats("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens.texts):
        count = "no" if scores is None else f"{len(scores):,}"
        raise ModelError(f"{metadata.path}: {count} tokenizer.ggml.scores for {len(tokens.texts):,} tokens")
    # SentencePiece would look for these behind the space it has put in front, tokenizers looks for them before.
    if adds_space and (spaced := [text for text in tokens.added.values() if text.startswith(" ")]):
        raise ModelError(
            f"{metadata.path}: user-defined tokens that begin with a space ({spaced[0]!r} …) in a model that puts a "
            "space before a text are not supported; use the model's Hugging Face folder with its tokenizer.json instead"
        )
    encoder = _bpe(metadata, tokens, list(_merges_by_score(tokens, scores)), fuse_unk=True, byte_fallback=True)
    from tokenizers import normalizers

    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if adds_space:
        steps.insert(0, normalizers.Prepend("▁"))
    encoder.normalizer = normalizers.Sequence(steps)
    return encoder


def _merges_by_score(tokens: _Tokens, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens that makes a token, that with the best score first: SentencePiece's order."""
    ids = {text: i for i, text in enumerate(tokens.texts) if tokens.kinds[i] == _NORMAL}
    for text, _ in sorted(ids.items(), key=lambda item: -scores[item[1]]):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(ids[left], ids[right]) for left, right in pairs if left in ids and right in ids]
        yield from ((tokens.texts[left], tokens.texts[right]) for left, right in sorted(known))


def _bpe(
    metadata: GGUFMetadata,
    tokens: _Tokens,
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
) -> tokenizers.Tokenizer:
    try:
        from tokenizers import AddedToken, Tokenizer, models
    except ImportError as exc:
        raise ModelError(NEEDS_TOKENIZERS) from exc
    try:
        encoder = Tokenizer(
            models.BPE(
                {text: i for i, text in enumerate(tokens.texts)},
                merges,
                unk_token=None if tokens.unknown is None else tokens.texts[tokens.unknown],
                ignore_merges=ignore_merges,
                fuse_unk=fuse_unk,
                byte_fallback=byte_fallback,
            )
        )
    except Exception as exc:  # tokenizers raises bare Exception
        raise ModelError(f"{metadata.path}: its vocabulary and merges do not fit together: {exc}") from exc
    # Found in the vocabulary by their text, so that they keep their ids.
    encoder.add_tokens(
        [AddedToken(text, normalized=False, special=i in tokens.control) for i, text in tokens.added.items()]
    )
    return encoder
