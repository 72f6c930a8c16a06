"""Drafts by prompt lookup and by suffixes: the same guesses as a search by definition, and none across cache salts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.draft_methods import (
    NO_GUESS,
    SEPARATOR,
    AnswerCorpora,
    Guess,
    TokenBuffer,
    Tokens,
    longest_matches,
    ngram_guess,
    suffix_guess,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def array(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)


def by_definition(tokens: list[int], suffix: list[int], most: int) -> tuple[list[int], int]:
    """Places after the longest part of the suffix's end, by comparing all parts."""
    for length in range(min(most, len(suffix)), 0, -1):
        end = suffix[-length:]
        places = [at for at in range(length, len(tokens)) if tokens[at - length : at] == end]
        if places:
            return places, length
    return [], 0


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_matches_are_those_of_the_definition(tokens: list[int], suffix: list[int], most: int) -> None:
    places, length = longest_matches(array(tokens), array(suffix), most)
    assert (places.tolist(), length) == by_definition(tokens, suffix, most)


@given(TOKENS, st.integers(1, 3), st.integers(3, 5), st.integers(1, 5))
def test_ngram_continues_the_latest_place(tokens: list[int], least: int, most: int, count: int) -> None:
    places, length = by_definition(tokens, tokens, most)
    guess = ngram_guess(array(tokens), least, most, count)
    if not places or length < least:
        assert guess == NO_GUESS
    else:
        assert guess == Guess(tuple(tokens[places[-1] : places[-1] + count]), length)


def test_suffix_takes_the_most_frequent_continuation_and_of_equal_ones_the_latest() -> None:
    tokens = array([1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 3, 0, 1, 2])
    assert suffix_guess(tokens, array([]), 1, 24, 3) == Guess((6, 3, 0), 3)
    assert suffix_guess(array([7, 4, 8, 7, 3, 8, 7]), array([]), 1, 24, 1) == Guess((3,), 2)


def test_suffix_takes_the_longer_match_of_the_sequence_and_the_corpus() -> None:
    own = array([1, 2, 9, 0, 3, 1, 2])
    assert suffix_guess(own, array([3, 1, 2, 7, 7, SEPARATOR]), 1, 24, 4) == Guess((7, 7), 3)
    assert suffix_guess(own, array([1, 2, 7, SEPARATOR]), 1, 24, 1) == Guess((9,), 2), "equal: the sequence"
    assert suffix_guess(own, array([1, 2, 7, SEPARATOR]), 3, 24, 1) == NO_GUESS


@given(TOKENS, TOKENS)
def test_guesses_never_contain_a_separator(tokens: list[int], answer: list[int]) -> None:
    corpora = AnswerCorpora()
    corpora.add("", answer, 0)
    corpora.add("", tokens, 0)
    assert SEPARATOR not in suffix_guess(array(tokens), corpora.of(""), 1, 24, 8).tokens


def test_answers_are_guessed_only_for_their_salt() -> None:
    corpora = AnswerCorpora()
    corpora.add("a", [1, 2, 3, 4, 5], 2)
    assert suffix_guess(array([9, 2]), corpora.of("a"), 1, 24, 5).tokens == (3, 4, 5)
    for salt in ("", "b", "A"):
        assert len(corpora.of(salt)) == 0


def test_corpora_are_bounded() -> None:
    corpora = AnswerCorpora(max_tokens=6, max_corpora=2)
    for salt in ("a", "b", "c"):
        for answer in range(5):
            corpora.add(salt, [answer, answer + 1, answer + 2], 0)
    assert len(corpora) == 2
    assert corpora.of("a").tolist() == []
    assert corpora.of("c").tolist() == [4, SEPARATOR, 4, 5, 6, SEPARATOR][-6:] or len(corpora.of("c")) == 6
    corpora.add("c", range(100), 0)
    assert corpora.of("c").tolist() == [95, 96, 97, 98, 99, SEPARATOR]
    corpora.of("b")
    corpora.add("d", [1], 0)
    assert len(corpora.of("b")), "the most recently used ones are kept"
    assert not len(corpora.of("c"))


def test_an_answer_without_tokens_is_no_source() -> None:
    corpora = AnswerCorpora()
    corpora.add("", [1, 2], 2)
    assert len(corpora) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_buffer_has_all_tokens_in_order(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    buffer, tokens = TokenBuffer(), []
    for _ in range(50):
        new = [rng.randrange(200_000) for _ in range(rng.choice([0, 1, 1, 5, 400]))]
        buffer.extend(new)
        tokens += new
        assert len(buffer) == len(tokens)
    assert buffer.tokens.tolist() == tokens
