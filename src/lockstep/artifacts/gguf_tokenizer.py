"""Tokenizers of GGUF files: build a `tokenizers.Tokenizer` that splits text like llama.cpp.

Source: llama.cpp's `llama-vocab.cpp` (defaults, end tokens). Golden files created with it are in `tests/golden/`.
`TOKENIZER_MODELS` lists the supported models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.artifacts.generation_config import end_token_ids
from lockstep.artifacts.gguf_bpe import byte_level, gemma4, sentencepiece
from lockstep.artifacts.gguf_encoder_tokenizers import unigram, with_continuations, word_piece
from lockstep.artifacts.gguf_vocabulary import GgufTokenType, GgufVocabulary
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import TokenizerParts
from lockstep.errors import MissingTokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_MODELS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece BPE",
    "gemma4": "BPE of Gemma 4",
    "bert": "WordPiece",
    "t5": "Unigram",
}
"""Descriptions of the supported values of `tokenizer.ggml.model`."""


@dataclass(frozen=True, slots=True)
class _FramingTokens:
    """Special tokens around a text, and around each text of a pair."""

    first: int | None = None
    last: int | None = None
    num_between: int = 1
    """Number of `last` tokens between the texts of a pair."""
    second_type: int = 0
    """Token type of the second text of a pair."""


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
    model = metadata.text("tokenizer.ggml.model")
    if model not in TOKENIZER_MODELS:
        known = ", ".join(f"{name} ({text})" for name, text in TOKENIZER_MODELS.items())
        raise metadata.unsupported(f"tokenizer model {model!r}; supported: {known}")
    vocabulary = GgufVocabulary.read(metadata, vocab_size)
    if model == "bert":
        vocabulary = with_continuations(vocabulary)
    tokenizer, frame = _build(model, vocabulary)
    _add_tokens(tokenizer, vocabulary, absorbs_blanks=vocabulary.special("mask") if model == "t5" else None)
    _post_process(tokenizer, vocabulary, frame)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    named = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    special = {vocabulary.tokens[index]: index for index in vocabulary.of_type(GgufTokenType.CONTROL)}
    return TokenizerParts(
        tokenizer=tokenizer,
        chat_template=metadata.text("tokenizer.chat_template", "") or None,
        bos_token=None if bos is None else vocabulary.tokens[bos],
        eos_token=None if eos is None else vocabulary.tokens[eos],
        end_token_ids=end_token_ids([index for index in named if index is not None], special),
    )


def _build(model: str, vocabulary: GgufVocabulary) -> tuple[Tokenizer, _FramingTokens]:
    """Return the tokenizer without special tokens, and the special tokens that it adds to a text."""

    def frame(adds_bos: bool, adds_eos: bool = False) -> _FramingTokens:
        return _FramingTokens(vocabulary.added("bos", adds_bos), vocabulary.added("eos", adds_eos))

    if model == "gpt2":
        tokenizer, adds_bos = byte_level(vocabulary)
        return tokenizer, frame(adds_bos)
    if model == "llama":
        return sentencepiece(vocabulary), frame(adds_bos=True)
    if model == "gemma4":
        return gemma4(vocabulary), _FramingTokens(vocabulary.required("bos", "<bos>"), vocabulary.added("eos", False))
    if model == "bert":
        begin, end = vocabulary.required("cls", "[CLS]"), vocabulary.required("seperator", "[SEP]")
        return word_piece(vocabulary), _FramingTokens(begin, end, second_type=1)
    ends = frame(adds_bos=False, adds_eos=True)
    return unigram(vocabulary), _FramingTokens(ends.first, ends.last, num_between=1 if ends.first is None else 2)


def _add_tokens(tokenizer: Tokenizer, vocabulary: GgufVocabulary, absorbs_blanks: int | None) -> None:
    """Add special tokens. Control tokens match in text only if the caller requests it; user-defined tokens always
    do. The token ``absorbs_blanks`` includes the spaces before it."""
    from tokenizers import AddedToken

    def added(special: bool, *types: GgufTokenType) -> list[AddedToken]:
        return [
            AddedToken(vocabulary.tokens[index], special=special, normalized=False, lstrip=index == absorbs_blanks)
            for index in vocabulary.of_type(*types)
        ]

    tokenizer.add_special_tokens(added(True, GgufTokenType.CONTROL, GgufTokenType.UNKNOWN))
    tokenizer.add_tokens(added(False, GgufTokenType.USER_DEFINED))


def _post_process(tokenizer: Tokenizer, vocabulary: GgufVocabulary, frame: _FramingTokens) -> None:
    from tokenizers.processors import TemplateProcessing

    if frame.first is None and frame.last is None:
        return
    # The template uses its own names, because token texts may contain reserved characters of the template syntax.
    names = {index: f"token{index}" for index in (frame.first, frame.last) if index is not None}
    begin, end = ([] if index is None else [names[index]] for index in (frame.first, frame.last))
    specials = [{"id": name, "ids": [index], "tokens": [vocabulary.tokens[index]]} for index, name in names.items()]
    second = [f"{name}:{frame.second_type}" for name in ("$B", *end)]
    tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end * frame.num_between, *second],
        special_tokens=specials,
    )
