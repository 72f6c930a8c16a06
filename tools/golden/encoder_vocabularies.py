"""Small WordPiece and Unigram vocabularies as GGUF metadata, made from the training text by counting.

They have no randomness, so that tests and golden files use the same ones.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping

import numpy as np

from tools.golden.tricky_text import TRAINING

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
SPACE = "\u2581"
REPLACED = {"\u00bd": "1\u20442", "\u00b2": "2", "\u3000": " ", "\u00a0": " ", "\t": " ", "\n": " ", "\u200b": ""} | {
    char: unicodedata.normalize("NFKC", char) for char in "\uff46\uff55\uff4c\uff57\uff49\uff44\uff54\uff48\u2026"
}
"""Characters that the character map of the Unigram vocabulary replaces."""
_MAX_PIECE_CHARS = 8
_MIN_COUNT = 3

Metadata = dict[str, object]


def word_piece(lowercase: bool = True) -> Metadata:
    """A BERT vocabulary: characters, each also as a continuation, and the beginnings and ends of frequent words."""
    text = TRAINING.lower() if lowercase else TRAINING
    words = Counter("".join(char if char.isalnum() else " " for char in text).split())
    beginnings, ends = _frequent_parts(words)
    characters = sorted({char for char in text if not char.isspace()})
    begin = dict.fromkeys([*characters, *beginnings, *sorted(words)[::3]])
    more = dict.fromkeys([*(char for char in characters if char.isalnum()), *ends])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    metadata: Metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [*special, *(f"{SPACE}{text}" for text in begin), *more],
        "tokenizer.ggml.token_type": [CONTROL] * len(special) + [NORMAL] * (len(begin) + len(more)),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }
    return metadata if lowercase else metadata | {"tokenizer.ggml.normalizer.lowercase": False}


def unigram(sentence_begin: bool = True) -> Metadata:
    """An XLM-RoBERTa vocabulary, or that of a T5 if it has no token that begins a sentence. Scores are logarithms of
    frequencies."""
    text = TRAINING.translate({ord(char): new for char, new in REPLACED.items()})
    words = Counter(f"{SPACE}{word}" for word in text.split())
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for begin in range(len(word)):
            for end in range(begin + 1, min(len(word), begin + _MAX_PIECE_CHARS) + 1):
                pieces[word[begin:end]] += count
    kept = {piece: count for piece, count in pieces.items() if count >= _MIN_COUNT or len(piece) == 1}
    order = sorted(kept, key=lambda piece: (-kept[piece] * len(piece) ** 2, piece))
    total = sum(kept.values())
    special = ["<s>", "<pad>", "</s>", "<unk>"] if sentence_begin else ["<pad>", "</s>", "<unk>"]
    unused = ["[PAD0]", "[PAD1]"]
    scores = [*[0.0] * len(special), *(math.log(kept[piece] / total) for piece in order), *[-1e4] * len(unused)]
    types = [CONTROL] * (len(special) - 1) + [UNKNOWN] + [NORMAL] * len(order) + [UNUSED] * len(unused)
    metadata: Metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [*special, *order, *unused],
        "tokenizer.ggml.scores": [float(np.float32(score)) for score in scores],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.precompiled_charsmap": precompiled_charsmap(REPLACED),
        "tokenizer.ggml.eos_token_id": special.index("</s>"),
        "tokenizer.ggml.unknown_token_id": special.index("<unk>"),
    }
    if not sentence_begin:
        return metadata
    return metadata | {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}


def as_read(metadata: Metadata) -> Metadata:
    """The metadata with arrays in place of lists of numbers, as a reader of files returns it."""
    arrays: Metadata = {}
    for key, value in metadata.items():
        if isinstance(value, bytes):
            arrays[key] = np.frombuffer(value, np.uint8)
        elif isinstance(value, list) and not isinstance(value[0], str):
            arrays[key] = np.array(value)
    return metadata | arrays


def precompiled_charsmap(replacements: Mapping[str, str]) -> bytes:
    """SentencePiece's map of characters: a double array in which every node has a block of 256 children, and the
    replacements."""
    content = b""
    blocks: list[dict[int, int]] = [{}]  # block -> byte -> block of the child
    values: dict[int, int] = {}
    for old, new in replacements.items():
        block = 0
        for byte in old.encode():
            if byte not in blocks[block]:
                blocks.append({})
                blocks[block][byte] = len(blocks) - 1
            block = blocks[block][byte]
        values[block] = len(content)
        content += new.encode() + b"\0"
    units = np.zeros((len(blocks) + 1) * 256, "<u4")  # block b of nodes is at (b + 1) * 256, the root is unit 0
    units[0] = 256 << 10
    for block, children in enumerate(blocks):
        for byte, child in children.items():
            position = (block + 1) * 256 + byte
            units[position] = (position ^ ((child + 1) * 256)) << 10 | byte | (child in values) << 8
        if block in values:
            units[(block + 1) * 256] = 1 << 31 | values[block]
    return len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + content


def _frequent_parts(words: Counter[str]) -> tuple[list[str], list[str]]:
    """Beginnings and ends that several words have."""
    beginnings: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for word in words:
        for cut in range(2, min(len(word), _MAX_PIECE_CHARS)):
            beginnings[word[:cut]] += 1
            ends[word[-cut:]] += 1
    return tuple(sorted(text for text, count in parts.items() if count >= _MIN_COUNT) for parts in (beginnings, ends))  # type: ignore[return-value]  # two lists
