"""Small tokenizers of embedding models, as tokenizer.json has them: WordPiece, Unigram, and two kinds of BPE.

They are made from the training text by counting, without randomness, so that tests and golden files use the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tools.golden import encoder_vocabularies as made
from tools.golden.tricky_text import TRAINING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

THINK = ("<think>", "</think>")
"""Tokens of Qwen3 that are added, but not special."""
_WORDS = (
    "the", "and", "for", "was", "my", "refund", "payment", "instruct", "query", "document", "yes", "no", "is", "of",
    "to", "in", "card", "please", "charge",
)  # fmt: skip


def word_piece(lowercase: bool = True) -> Tokenizer:
    """BERT's: lower case, unless it is a cased one, with a token type for each text of a pair."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = _texts(made.word_piece(lowercase)["tokenizer.ggml.tokens"])
    special = tokens[:5]
    named = [text[1:] if text.startswith(made.SPACE) else f"##{text}" for text in tokens[5:]]
    vocabulary = {text: index for index, text in enumerate([*special, *named])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _framed(tokenizer, special, "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")


def unigram() -> Tokenizer:
    """XLM-RoBERTa's, with two separators between the texts of a pair."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    metadata = made.unigram()
    tokens, scores = _texts(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, list)
    pieces = [(text, score) for text, score in zip(tokens, scores, strict=True) if not text.startswith("[PAD")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    charsmap = metadata["tokenizer.ggml.precompiled_charsmap"]
    assert isinstance(charsmap, bytes)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=made.SPACE, prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=made.SPACE, prepend_scheme="always")
    return _framed(tokenizer, tokens[:4], "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def byte_level(special: Sequence[str], single: str, pair: str, added: Sequence[str] = ()) -> Tokenizer:
    """BPE on bytes, as ModernBERT and Qwen3 have it: special tokens, bytes, merges of words, then added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = _with_merges([*special, *alphabet], "\u0120", ["Instruct", "Query", "Document"])
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = _framed(tokenizer, special, single, pair)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Gemma's: SentencePiece's BPE with bytes for characters that it lacks, and both ends of a text marked."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    characters = sorted({made.SPACE, *(char for char in TRAINING if char.isascii() and not char.isspace())})
    start = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    tokens, merges = _with_merges(start, made.SPACE, ["task", "title"])
    vocabulary = {text: index for index, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", made.SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(made.SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _framed(tokenizer, special, "<bos> $A <eos>", "<bos> $A <eos> <bos>:1 $B:1 <eos>:1")


def _framed(tokenizer: Tokenizer, special: Sequence[str], single: str, pair: str) -> Tokenizer:
    """The tokenizer with special tokens, and with these around a text and around a pair."""
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    ids = [(text, tokenizer.token_to_id(text)) for text in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return tokenizer


def _with_merges(start: list[str], space: str, more: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges that build words from their letters, each with a space before it and without."""
    tokens, merges = list(start), []
    for word in [*_WORDS, *more]:
        for text in (f"{space}{word}", word):
            for end in range(2, len(text) + 1):
                if text[:end] not in tokens:
                    tokens.append(text[:end])
                    merges.append((text[: end - 1], text[end - 1]))
    return tokens, merges


def _texts(value: object) -> list[Any]:
    assert isinstance(value, list)
    return value
