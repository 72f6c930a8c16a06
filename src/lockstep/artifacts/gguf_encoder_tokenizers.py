"""Tokenizers of encoders in GGUF files: WordPiece ("bert") and Unigram ("t5"), as `tokenizers` pipelines.

The pipelines are those of Hugging Face's `BertTokenizer`, `XLMRobertaTokenizer` and `T5Tokenizer`. llama.cpp differs in
details: it does not limit the length of a word, it lowers the case of single characters only, it removes spacing marks
together with accents, and it replaces the longest match of a character map instead of whole graphemes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.artifacts.charsmap import charsmap_fault
from lockstep.artifacts.gguf_bpe import SPACE, space_decoder
from lockstep.artifacts.gguf_vocabulary import GgufTokenType, GgufVocabulary
from lockstep.artifacts.metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

_CONTINUATION = "##"
_MAX_WORD_CHARS = 100
"""Maximum length of a word, as in Hugging Face's tokenizer. A longer one is unknown."""
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


def with_continuations(vocabulary: GgufVocabulary) -> GgufVocabulary:
    """Restore the names of WordPiece's tokens. A file marks the tokens that begin a word, and not those that continue
    one."""
    kept = {*vocabulary.of_type(GgufTokenType.CONTROL, GgufTokenType.UNKNOWN)}
    tokens = [
        token if index in kept else token[1:] if token.startswith(SPACE) else f"{_CONTINUATION}{token}"
        for index, token in enumerate(vocabulary.tokens)
    ]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise vocabulary.metadata.corrupt(f"token {twice!r} appears twice in the vocabulary")
    return replace(vocabulary, tokens=tokens, ids=ids)


def word_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build WordPiece. Its names are those of `with_continuations`."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    metadata = vocabulary.metadata
    lowercase = metadata.flag("tokenizer.ggml.normalizer.lowercase", True)
    unknown = vocabulary.tokens[vocabulary.required("unknown", "[UNK]")]
    tokenizer = Tokenizer(
        WordPiece(
            dict(vocabulary.ids),
            unk_token=unknown,
            max_input_chars_per_word=_MAX_WORD_CHARS,
            continuing_subword_prefix=_CONTINUATION,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=metadata.flag("tokenizer.ggml.normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUATION)
    return tokenizer


def unigram(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build Unigram: the pieces of a text have the highest sum of scores."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    metadata = vocabulary.metadata
    tokenizer = Tokenizer(
        Unigram(
            _pieces(vocabulary),
            unk_id=vocabulary.required("unknown", "<unk>"),
            byte_fallback=bool(vocabulary.of_type(GgufTokenType.BYTE)),
        )
    )
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[Normalizer] = []
    if _CHARSMAP in metadata.values:
        steps.append(normalizers.Precompiled(_checked_charsmap(metadata)))
    removes_blanks = metadata.flag("tokenizer.ggml.remove_extra_whitespaces", True)
    if removes_blanks and has_prefix:
        words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    else:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Strip()] if removes_blanks else []
        steps += [normalizers.Prepend(SPACE)] if has_prefix else []
        steps.append(normalizers.Replace(" ", SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = space_decoder(has_prefix)
    return tokenizer


def _pieces(vocabulary: GgufVocabulary) -> list[tuple[str, float]]:
    """Pieces with scores. Unused ones match no text, and only scores of normal ones decide that of an unknown piece."""
    scores = vocabulary.scores()
    lowest = min((scores[index] for index in vocabulary.of_type(GgufTokenType.NORMAL)), default=0.0)
    unused = {*vocabulary.of_type(GgufTokenType.UNUSED)}
    # A text has no space when it is matched: it is written as U+2581.
    return [
        (f" {token}" if index in unused else token, max(scores[index], lowest))
        for index, token in enumerate(vocabulary.tokens)
    ]


def _checked_charsmap(metadata: Metadata) -> bytes:
    data = metadata.numbers(_CHARSMAP)
    content = data.tobytes()
    fault = charsmap_fault(content) if data.dtype.itemsize == 1 else f"has numbers of type {data.dtype}"
    if fault is not None:
        raise metadata.corrupt(f"{_CHARSMAP!r} {fault}")
    return content
