"""WordPiece and Unigram vocabularies in GGUF files: tokens are those of transformers, and hostile files are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import TokenizerParts
from lockstep.errors import CorruptArtifactError
from tools.golden import encoder_vocabularies as made

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "encoder_tokenisations.json.gz"
FILE: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
MADE = {
    "bert": made.word_piece(),
    "bert cased": made.word_piece(lowercase=False),
    "xlm-roberta": made.unigram(),
    "t5": made.unigram(sentence_begin=False),
}
WORDS: made.Metadata = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "\u2581un",
        "able",
        "\u2581\u4f60",
        "\u2581a",
        "a",
        "\u2581!",
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, 3, 1, 1, 1, 1, 1, 1],
}
PIECES: made.Metadata = {
    "tokenizer.ggml.model": "t5",
    "tokenizer.ggml.tokens": ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581ab", "a", "b", "c", "<mask>"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -2.0, -3.0, -2.5, -2.5, -4.0, 0.0],
    "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1, 1, 1, 3],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.mask_token_id": 9,
    "tokenizer.ggml.add_bos_token": True,
}


def metadata(base: made.Metadata, **changes: object) -> Metadata:
    """The base with tokenizer.ggml.* replaced, or removed by None, in the types of a reader."""
    values = base | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Metadata(Path("some.gguf"), made.as_read({key: value for key, value in values.items() if value is not None}))


def parts(base: made.Metadata, **changes: object) -> TokenizerParts:
    return read_vocabulary(metadata(base, **changes), 10_000)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    found: list[str] = tokenizer.encode(text, add_special_tokens=False).tokens
    return found


@pytest.mark.parametrize("name", MADE)
def test_ids_are_those_of_transformers(name: str) -> None:
    tokenizer = parts(MADE[name]).tokenizer
    expected = FILE["ids"][name]
    wrong = [
        (text, tokenizer.encode(text).tokens, [tokenizer.id_to_token(i) for i in ids])
        for text, ids in zip(FILE["strings"], expected, strict=True)
        if tokenizer.encode(text).ids != ids
    ]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ, e.g. {wrong[:3]}"


def test_a_word_is_cut_into_its_longest_beginning_and_continuations() -> None:
    tokenizer = parts(WORDS).tokenizer
    assert tokens(tokenizer, "unable Una") == ["un", "##able", "un", "##a"]
    assert tokens(tokenizer, "able") == ["[UNK]"]
    assert tokenizer.decode(tokenizer.encode("Unable a!").ids) == "unable a!"


def test_a_word_without_pieces_or_over_100_characters_is_unknown() -> None:
    tokenizer = parts(WORDS).tokenizer
    assert tokens(tokenizer, "ab") == ["[UNK]"]
    assert tokens(tokenizer, "a" * 100) == ["a", *["##a"] * 99]
    assert tokens(tokenizer, "a" * 101) == ["[UNK]"]


def test_text_is_cleaned_before_words_are_cut() -> None:
    tokenizer = parts(WORDS).tokenizer
    assert tokens(tokenizer, "a\u4f60a\u4f60") == ["a", "\u4f60", "a", "\u4f60"]
    assert tokens(tokenizer, "\u00c5\u0301A\u0000\u200da\ta\u00a0a!!") == ["a", "##a", "##a", "a", "a", "!", "!"]


def test_case_and_accents_stay_where_the_file_requires_it() -> None:
    cased: dict[str, object] = {"normalizer.lowercase": False}
    assert tokens(parts(WORDS, **cased).tokenizer, "A \u00e1") == ["[UNK]", "[UNK]"]
    assert tokens(parts(WORDS, **cased, **{"normalizer.strip_accents": True}).tokenizer, "A \u00e1") == ["[UNK]", "a"]
    assert tokens(parts(WORDS, **{"normalizer.strip_accents": False}).tokenizer, "A \u00e1") == ["a", "[UNK]"]


def test_a_text_and_a_pair_are_framed_by_special_tokens() -> None:
    bert, xlm_roberta = parts(WORDS).tokenizer, parts(PIECES).tokenizer
    t5 = parts(PIECES, add_bos_token=None).tokenizer
    assert bert.encode("a").ids == [2, 7, 3]
    pair = bert.encode("a", "a!")
    assert (pair.ids, pair.type_ids) == ([2, 7, 3, 7, 9, 3], [0, 0, 0, 1, 1, 1])
    assert xlm_roberta.encode("ab").ids == [0, 5, 2]
    pair = xlm_roberta.encode("ab", "ab")
    assert (pair.ids, pair.type_ids) == ([0, 5, 2, 2, 5, 2], [0] * 6)
    assert t5.encode("ab").ids == [5, 2]
    assert t5.encode("ab", "ab").ids == [5, 2, 5, 2]


def test_roles_come_from_the_file_or_from_known_texts() -> None:
    assert parts(WORDS, cls_token_id=4, seperator_token_id=5, unknown_token_id=7).tokenizer.encode("z").ids == [4, 7, 5]
    assert parts(WORDS).end_token_ids == ()
    assert (parts(WORDS).bos_token, parts(WORDS).chat_template) == (None, None)
    assert (parts(PIECES).bos_token, parts(PIECES).eos_token, parts(PIECES).end_token_ids) == ("<s>", "</s>", (2,))


def test_pieces_have_the_highest_sum_of_scores() -> None:
    tokenizer = parts(PIECES).tokenizer
    assert tokens(tokenizer, "ab  abc\n c ") == ["\u2581ab", "\u2581ab", "c", "\u2581", "c"]
    assert tokens(tokenizer, "zz c") == ["\u2581", "zz", "\u2581", "c"]
    assert tokenizer.encode("zz", add_special_tokens=False).ids == [4, 3]
    assert tokenizer.decode(tokenizer.encode("ab c").ids) == "ab c"
    assert tokenizer.encode("a <mask> b", add_special_tokens=False).ids == [4, 6, 9, 4, 7]


def test_blanks_stay_where_the_file_requires_it() -> None:
    kept = parts(PIECES, remove_extra_whitespaces=False).tokenizer
    assert tokens(kept, " ab ") == ["\u2581", "\u2581ab", "\u2581"]
    assert tokens(parts(PIECES, remove_extra_whitespaces=False, add_space_prefix=False).tokenizer, "a b") == [
        "a",
        "\u2581",
        "b",
    ]
    assert tokens(parts(PIECES, add_space_prefix=False).tokenizer, " ab  ab ") == ["a", "b", "\u2581ab"]


def test_an_unknown_character_is_bytes_where_the_vocabulary_has_them() -> None:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    changes: dict[str, object] = {
        "tokens": [*PIECES["tokenizer.ggml.tokens"], *names],  # type: ignore[misc]  # a list
        "scores": [*PIECES["tokenizer.ggml.scores"], *[0.0] * 256],  # type: ignore[misc]  # a list
        "token_type": [*PIECES["tokenizer.ggml.token_type"], *[6] * 256],  # type: ignore[misc]  # a list
    }
    tokenizer = parts(PIECES, **changes).tokenizer
    ids = tokenizer.encode("a\u00e9b").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "\u2581", "a", "<0xC3>", "<0xA9>", "b", "</s>"]
    assert tokenizer.decode(ids) == "a\u00e9b"


def test_unused_pieces_match_no_text() -> None:
    """Their score of -10,000 does not change the score of an unknown piece, either."""
    changed = parts(PIECES, token_type=[3, 3, 3, 2, 1, 5, 1, 1, 1, 3]).tokenizer
    assert tokens(changed, "ab") == ["\u2581", "a", "b"]


def test_characters_are_replaced_as_the_file_requires() -> None:
    charsmap = made.precompiled_charsmap({"\u00e9": "a", "\u3000": " ", "x": "ab", "y": ""})
    tokenizer = parts(PIECES, precompiled_charsmap=charsmap).tokenizer
    assert tokens(tokenizer, "xy\u3000\u00e9") == ["\u2581ab", "\u2581", "a"]


CHARSMAP = made.precompiled_charsmap({"\u00e9": "e", "x": "\u00df"})
CORRUPT = {
    "no [CLS]": (metadata(WORDS, tokens=["[UNK]", "[SEP]"], token_type=[3, 3]), "no cls token"),
    "no [SEP]": (metadata(WORDS, tokens=["[UNK]", "[CLS]"], token_type=[3, 3]), "no seperator token"),
    "no [UNK]": (metadata(WORDS, tokens=["[SEP]", "[CLS]"], token_type=[3, 3]), "no unknown token"),
    "token twice": (
        metadata(WORDS, tokens=["[UNK]", "[CLS]", "[SEP]", "\u2581[UNK]"], token_type=[3, 3, 3, 1]),
        "'\\[UNK\\]' appears twice",
    ),
    "lowercase is a number": (metadata(WORDS, **{"normalizer.lowercase": 1}), "a boolean is expected"),
    "no scores": (metadata(PIECES, scores=None), "'tokenizer.ggml.scores' is missing"),
    "infinite score": (metadata(PIECES, scores=[np.inf] * 10), "not finite"),
    "no <unk>": (metadata(PIECES, tokens=list("0123456789")), "no unknown token"),
    "unknown out of range": (metadata(PIECES, unknown_token_id=10), "unknown_token_id' is 10"),
    "charsmap of floats": (metadata(PIECES, precompiled_charsmap=np.zeros(9)), "numbers of type float64"),
    "charsmap is empty": (metadata(PIECES, precompiled_charsmap=b""), "a trie of 0 bytes"),
    "charsmap is cut": (metadata(PIECES, precompiled_charsmap=CHARSMAP[:1000]), "a trie of"),
    "charsmap without trie": (metadata(PIECES, precompiled_charsmap=bytes(8)), "a trie of 0 bytes"),
    "charsmap leads outside": (
        metadata(PIECES, precompiled_charsmap=b"\4\0\0\0" + (1 << 18).to_bytes(4, "little")),
        "places outside",
    ),
    "charsmap without replacements": (metadata(PIECES, precompiled_charsmap=CHARSMAP[:-5]), "places outside"),
    "charsmap into a character": (
        metadata(PIECES, precompiled_charsmap=CHARSMAP[:-5] + "a\u00e9\0".encode()),
        "places outside",
    ),
    "charsmap is not UTF-8": (metadata(PIECES, precompiled_charsmap=CHARSMAP[:-2] + b"\xff\0"), "UTF-8"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_an_inconsistent_vocabulary_is_corrupt(case: str) -> None:
    values, message = CORRUPT[case]
    with pytest.raises(CorruptArtifactError, match=message):
        read_vocabulary(values, 10_000)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(CHARSMAP) - 1), st.binary(min_size=1, max_size=4), st.integers(0, 64))
def test_a_damaged_character_map_is_refused_or_harmless(position: int, change: bytes, cut: int) -> None:
    damaged = bytearray(CHARSMAP)
    damaged[position : position + len(change)] = change
    try:
        tokenizer = parts(PIECES, precompiled_charsmap=bytes(damaged[: len(damaged) - cut])).tokenizer
    except CorruptArtifactError:
        return
    for text in ("x", "\u00e9", "xx\u00e9 x", "".join(map(chr, range(1, 0x250)))):
        tokenizer.encode(text)
