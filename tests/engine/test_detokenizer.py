"""Pieces of text end at characters, and their concatenation is the decoded text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.tokenizer import Tokenizer
from tests.engine.text_models import TEXTS, byte_level, metaspace, parts, sentencepiece, wordpiece

FAMILIES: dict[str, Callable[[], Library]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(legacy=False),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}
TABLED = [name for name in FAMILIES if name != "wordpiece"]


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(parts(FAMILIES[family]()))


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], after: int | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, after=after)
    return [*[detokenizer.append(token) for token in ids], detokenizer.flush()]


@pytest.mark.parametrize("family", TABLED)
@settings(max_examples=150)
@given(data=st.data())
def test_pieces_of_any_tokens_concatenate_to_the_decoded_text(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100)
@given(text=st.one_of(st.text(max_size=60), st.lists(st.sampled_from(TEXTS[:5]), max_size=3).map(" ".join)))
def test_pieces_of_a_text_equal_the_librarys_decoding(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = FAMILIES[family]().decode(ids)
    assert tokenizer.decode(ids) == expected
    assert "".join(pieces_of(tokenizer, ids)) == expected


@settings(max_examples=200)
@given(st.lists(st.integers(0, 430), max_size=40))
def test_byte_level_decoding_of_any_tokens_equals_the_librarys(ids: list[int]) -> None:
    for skip in (True, False):
        assert tokenizer_of("byte level").decode(ids, skip) == byte_level().decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", TABLED[:3])
@settings(max_examples=100)
@given(text=st.text(max_size=40))
@example(text="<end_of_turn>")
@example(text="<think>0")
def test_no_piece_has_a_partial_character(family: str, text: str) -> None:
    tokenizer = tokenizer_of(family)
    [ids] = tokenizer.encode_plain([text])  # a special token has no text
    pieces = pieces_of(tokenizer, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    # Spaces are left out, because SentencePiece puts one behind an added token.
    assert "".join(pieces).replace(" ", "").endswith(text.replace(" ", "")[-5:])


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("sentencepiece without prefix")
    vocabulary = sentencepiece(legacy=False).get_vocab()
    ids = [vocabulary[f"<0x{byte:02X}>"] for byte in "a😀".encode()]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "😀", ""]
    assert pieces_of(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]
    assert pieces_of(tokenizer, [*ids[:-2], ids[0]]) == ["a", "", "", "\ufffda", ""]


def test_a_partial_character_at_the_end_is_replaced_once() -> None:
    detokenizer = Detokenizer(tokenizer_of("byte level"))
    ids = tokenizer_of("byte level").encode("😀", add_special_tokens=False)
    assert [detokenizer.append(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("family", ["sentencepiece", "metaspace"])
def test_the_leading_space_is_dropped_at_the_beginning_only(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode("The dog", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == "The dog"
    assert "".join(pieces_of(tokenizer, ids, after=next(iter(tokenizer.special_token_ids)))) == "The dog"
    assert "".join(pieces_of(tokenizer, ids, after=ids[-1])) == " The dog"


@pytest.mark.parametrize("family", ["byte level", "sentencepiece without prefix"])
def test_special_tokens_have_no_text(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode("a<|im_end|>b</think>", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == "ab</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b</think>"


def test_ids_outside_of_the_vocabulary_have_no_text() -> None:
    """Models pad their vocabulary, so such an id may be sampled."""
    tokenizer = tokenizer_of("byte level")
    assert tokenizer.decode([10**6]) == ""
    assert "".join(pieces_of(tokenizer, [10**6, *tokenizer.encode("ab")])) == "ab"


def test_continued_text_without_a_byte_table_keeps_its_context() -> None:
    tokenizer = tokenizer_of("wordpiece")
    ids = tokenizer.encode("the quick dog", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids[1:], after=ids[0])) == FAMILIES["wordpiece"]().decode(ids)[len("the") :]


@pytest.mark.parametrize("family", TABLED)
def test_a_special_token_that_is_shown_is_text_and_others_are_not(family: str) -> None:
    tokenizer = tokenizer_of(family)
    shown = tokenizer.special_ids(["[INST]", "<think>", "no such token"])
    assert [tokenizer.special_text(token) for token in shown] == ["[INST]"]
    [inst], [user] = shown, tokenizer.special_ids(["<|user|>"])
    detokenizer = Detokenizer(tokenizer, shown=shown)
    words = tokenizer.encode("dog", add_special_tokens=False)
    pieces = [detokenizer.append(token) for token in (user, *words, inst, user, *words)]
    assert "".join(pieces).replace(" ", "") == "dog[INST]dog"
    assert "[INST]" in pieces


def test_a_shown_token_ends_a_character_that_was_open() -> None:
    for family, open_id in (("byte level", byte_level().encode("😀").ids[0]), ("wordpiece", 5)):
        tokenizer = tokenizer_of(family)
        [mark] = tokenizer.special_ids(["[INST]" if family == "byte level" else "[UNK]"])
        detokenizer = Detokenizer(tokenizer, shown=frozenset([mark]))
        before = detokenizer.append(open_id)
        piece = detokenizer.append(mark)
        assert before + piece == tokenizer.decode([open_id]) + tokenizer.special_text(mark)
        assert detokenizer.flush() == ""
