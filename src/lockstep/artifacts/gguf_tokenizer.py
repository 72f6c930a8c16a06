"""Tokenizers of GGUF files: build a `tokenizers.Tokenizer` that splits text like llama.cpp.

Source: llama.cpp's `llama-vocab.cpp` (token types, defaults, split expressions, end tokens). Golden files created with
it are in `tests/golden/`. Two models are supported: byte-level BPE ("gpt2") and SentencePiece ("llama").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from lockstep.artifacts.generation_config import END_TEXTS, MARKER_TEXTS, end_token_ids
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import TokenizerParts
from lockstep.errors import MissingTokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    return (
        rf"(?:{_ANY_CASE_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(contractions: str, digits: str) -> str:
    """Expression that splits words where a capital follows a small letter. As in llama.cpp, only a to z have case."""
    capital, small = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{capital}*{small}+{contractions}|{start}{capital}+{small}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True)
class Splitter:
    """A family of pre-tokenizers: expressions that are applied in sequence, each to the pieces of the previous one."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """True if a piece that is a token in the vocabulary becomes that token regardless of the merges."""
    add_bos: bool = False
    """Whether the family adds BOS, if the file does not specify it."""


_DEFAULT = Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_SPLITTER = Splitter((_GPT2,))
_LLAMA3 = Splitter((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Splitter((_llama3(r"\p{N}"),))
_CL100K = Splitter((_llama3(r"\p{N}{1,3}"),))
_SMOLLM = Splitter((r"\p{N}", _GPT2))

SPLITTERS: Mapping[str, Splitter] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2_SPLITTER,
    "phi-2": _GPT2_SPLITTER,
    "olmo": _GPT2_SPLITTER,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "gpt-4o": Splitter((_cased(rf"(?:{_ANY_CASE_CONTRACTIONS})?", r"\p{N}{1,3}"),)),
    "tekken": Splitter((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
}
"""Splitters by value of `tokenizer.ggml.pre`."""

_MAX_TOKEN_CHARS = 4096
"""Maximum token length. The time to find the merges of an SPM token is quadratic in its length."""


class _Type(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_vocabulary(metadata: Metadata, vocab_size: int) -> TokenizerParts:
    """Build the tokenizer of a file.

    Raises:
        MissingTokenizerError: the file has weights only.
        UnsupportedArtifactError: the tokenizer model or pre-tokenizer is not supported; the error names it.
        CorruptArtifactError: the vocabulary is inconsistent or does not match the embedding.
    """
    if "tokenizer.ggml.model" not in metadata.values:
        raise MissingTokenizerError(
            "has no vocabulary; a GGUF file with tokenizer.ggml.* metadata is required", path=metadata.path
        )
    vocabulary = _Vocabulary.read(metadata, vocab_size)
    model = metadata.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocabulary)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocabulary)
    else:
        raise metadata.unsupported(
            f"tokenizer model {model!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are supported"
        )
    _add_tokens(tokenizer, vocabulary)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    _post_process(
        tokenizer, vocabulary, vocabulary.added("bos", bos, adds_bos), vocabulary.added("eos", eos, by_default=False)
    )
    named = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    special = {vocabulary.tokens[index]: index for index in vocabulary.of_type(_Type.CONTROL)}
    return TokenizerParts(
        tokenizer=tokenizer,
        chat_template=metadata.text("tokenizer.chat_template", "") or None,
        bos_token=None if bos is None else vocabulary.tokens[bos],
        eos_token=None if eos is None else vocabulary.tokens[eos],
        end_token_ids=end_token_ids([index for index in named if index is not None], special),
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens in order of id; unique and not empty."""

    metadata: Metadata
    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: Sequence[int]

    @classmethod
    def read(cls, metadata: Metadata, vocab_size: int) -> _Vocabulary:
        tokens = metadata.strings("tokenizer.ggml.tokens")
        if not 1 <= len(tokens) <= vocab_size:
            raise metadata.corrupt(
                f"{len(tokens)} tokens and an embedding of {vocab_size} rows; 1 to {vocab_size} are expected"
            )
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise metadata.corrupt(f"token {twice!r} appears twice in the vocabulary")
        longest = max(tokens, key=len)
        if len(longest) > _MAX_TOKEN_CHARS:
            raise metadata.corrupt(f"a token of {len(longest)} characters; at most {_MAX_TOKEN_CHARS} are expected")
        types = [int(_Type.NORMAL)] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata.values:
            types = metadata.numbers("tokenizer.ggml.token_type").tolist()
        if len(types) != len(tokens):
            raise metadata.corrupt(f"{len(types)} token types for {len(tokens)} tokens")
        for text in (*END_TEXTS, *MARKER_TEXTS):
            if text in ids:  # converters often mark these as normal or user-defined
                types[ids[text]] = _Type.CONTROL
        return cls(metadata, tokens, ids, types)

    def of_type(self, *types: _Type) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in types]

    def special(self, name: str) -> int | None:
        """The id under `tokenizer.ggml.{name}_token_id`, or None."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.metadata.values:
            return None
        index = self.metadata.integer(key)
        if not 0 <= index < len(self.tokens):
            raise self.metadata.corrupt(f"{key!r} is {index}; the vocabulary has {len(self.tokens)} tokens")
        return index

    def added(self, name: str, index: int | None, by_default: bool) -> int | None:
        """The id if the token is added to every text, otherwise None. Raises an error if a required token has no id."""
        key = f"tokenizer.ggml.add_{name}_token"
        if not self.metadata.flag(key, by_default):
            return None
        if index is None and key in self.metadata.values:
            raise self.metadata.corrupt(f"{key!r} is set, but the file has no {name} token")
        return index


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and whether its family adds BOS by default."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    name = metadata.text("tokenizer.ggml.pre", "default")
    splitter = SPLITTERS.get(name)
    if splitter is None:
        known = ", ".join(SPLITTERS)
        raise metadata.unsupported(f"pre-tokenizer {name!r}; supported: {known}")
    merges = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if any(part not in vocabulary.ids for part in (left, right, left + right)):
            raise metadata.corrupt(f"merge {merge!r} is not of two tokens that make a third")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(dict(vocabulary.ids), merges, ignore_merges=splitter.ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.add_bos


def _pre_tokenizer(splitter: Splitter) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitter.expressions
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Build BPE with scores as ranks: llama.cpp joins the neighbors with the best combined score, leftmost first."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    scores = metadata.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(vocabulary.tokens):
        raise metadata.corrupt(f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    if not all(math.isfinite(score) for score in scores):
        raise metadata.corrupt("'tokenizer.ggml.scores' has scores that are not finite")
    unknown = vocabulary.special("unknown") or 0
    tokenizer = Tokenizer(
        BPE(
            dict(vocabulary.ids),
            _merges_by_score(vocabulary, scores),
            unk_token=vocabulary.tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    replacements: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    steps: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        replacements.insert(0, normalizers.Prepend("\u2581"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(replacements)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a third, best score first.

    For one token, pairs with a longer left part come first, which is the leftmost pair in a run of equal characters.
    """
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(scores)), key=lambda index: (-scores[index], index)):
        token = vocabulary.tokens[index]
        splits = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in splits if left in ids and right in ids]
    return merges


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Add special tokens. Control tokens match in text only if the caller requests it; user-defined tokens always
    do."""
    from tokenizers import AddedToken

    def added(special: bool, *types: _Type) -> list[AddedToken]:
        texts = [vocabulary.tokens[index] for index in vocabulary.of_type(*types)]
        return [AddedToken(text, special=special, normalized=False) for text in texts]

    tokenizer.add_special_tokens(added(True, _Type.CONTROL, _Type.UNKNOWN))
    tokenizer.add_tokens(added(False, _Type.USER_DEFINED))


def _post_process(tokenizer: Tokenizer, vocabulary: _Vocabulary, first: int | None, last: int | None) -> None:
    from tokenizers.processors import TemplateProcessing

    if first is None and last is None:
        return
    # The template uses its own names, because token texts may contain reserved characters of the template syntax.
    names = {index: f"token{index}" for index in (first, last) if index is not None}
    begin, end = ([] if index is None else [names[index]] for index in (first, last))
    specials = [{"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]} for index, name in names.items()]
    tokenizer.post_processor = TemplateProcessing(single=[*begin, "$A", *end], special_tokens=specials)
