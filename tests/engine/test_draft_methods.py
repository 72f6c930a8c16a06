"""Drafts by prompt lookup and by suffixes: the same guesses as a search by definition, and none across cache salts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine import draft_methods
from lockstep.engine.draft_methods import (
    NO_GUESS,
    NUM_FOLLOWING,
    SEPARATOR,
    AnswerCorpora,
    Guess,
    longest_match,
    matched_guess,
    missed_part,
    resumed_guess,
    text_of,
    tokens_of,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def by_definition(tokens: Sequence[int], suffix: Sequence[int], most: int) -> tuple[int, int]:
    """The latest place after the longest part of the suffix's end, by comparing all parts at all places."""
    for length in range(min(most, len(suffix)), 0, -1):
        end = suffix[-length:]
        places = [at for at in range(length, len(tokens)) if tokens[at - length : at] == end]
        if places:
            return places[-1], length
    return 0, 0


@given(TOKENS, TOKENS, st.integers(1, 30))
def test_the_match_is_that_of_the_definition(tokens: list[int], suffix: list[int], most: int) -> None:
    assert longest_match(text_of(tokens), text_of(suffix), most) == by_definition(tokens, suffix, most)


@given(st.lists(st.integers(0, 1), max_size=90), st.integers(1, 30))
def test_the_match_of_a_sequence_itself_is_that_of_the_definition(tokens: list[int], most: int) -> None:
    text = text_of(tokens)
    assert longest_match(text, text[-most:], most) == by_definition(tokens, tokens, most)


def test_only_the_latest_tokens_are_searched() -> None:
    assert longest_match("ab" + "c" * draft_methods.MAX_SEARCHED, "ab", 24) == (0, 0)
    assert longest_match("ab" + "c" * (draft_methods.MAX_SEARCHED - 2), "ab", 24) == (2, 2)


@given(st.lists(st.integers(0, 0x10FFFE)))
def test_a_text_has_the_tokens_of_any_vocabulary(tokens: list[int]) -> None:
    """Also those whose numbers are no valid characters, such as surrogates."""
    assert tokens_of(text_of(tokens)) == tuple(tokens)
    assert SEPARATOR not in text_of(tokens)


@given(TOKENS, st.integers(1, 3), st.integers(3, 5))
def test_a_guess_continues_the_place(tokens: list[int], least: int, most: int) -> None:
    place, length = by_definition(tokens, tokens, most)
    guess = matched_guess(text_of(tokens), "", least, most)
    if length < least:
        assert guess == NO_GUESS
    else:
        assert tokens_of(guess.text) == tuple(tokens[place : place + NUM_FOLLOWING])
        assert guess.num_matched == length


def test_a_guess_takes_the_longer_match_of_the_sequence_and_the_corpus() -> None:
    own = "ab9031ab"
    assert matched_guess("ab903ab", "3ab77" + SEPARATOR, 1, 24) == Guess("77", 3)
    assert matched_guess(own, "ab7" + SEPARATOR, 1, 24) == Guess("9031ab", 2), "equal: the sequence"
    assert matched_guess(own, "ab7" + SEPARATOR, 3, 24) == NO_GUESS
    assert matched_guess(own, "1ab" + SEPARATOR, 1, 24) == NO_GUESS, "nothing follows"


@given(TOKENS, TOKENS)
def test_guesses_never_contain_a_separator(tokens: list[int], answer: list[int]) -> None:
    corpora = AnswerCorpora()
    corpora.add("", answer, 0)
    corpora.add("", tokens, 0)
    assert SEPARATOR not in matched_guess(text_of(tokens), corpora.of(""), 1, 24).text


def test_a_guess_resumes_after_another_value() -> None:
    guess = Guess("Oslo, count", 5)
    missed = missed_part(guess, "Rome")
    assert missed == "Oslo, count"
    assert resumed_guess("city Rome", missed) == NO_GUESS, "the last token does not come next"
    assert resumed_guess("city Rome,", missed) == Guess(" count", 0)
    assert missed_part(guess, "Oslo; c") == ", count"
    assert missed_part(guess, "Oslo, ") == "", "all are right"
    assert resumed_guess("city Rome,", "") == NO_GUESS
    assert resumed_guess("t", missed) == NO_GUESS, "nothing follows"


def test_matches_of_a_few_tokens_are_not_reliable() -> None:
    assert [Guess("a", length).is_reliable for length in range(5)] == [True, False, False, True, True]


def test_answers_are_guessed_only_for_their_salt() -> None:
    corpora = AnswerCorpora()
    corpora.add("a", [1, 2, 3, 4, 5], 2)
    assert tokens_of(matched_guess(text_of([9, 2]), corpora.of("a"), 1, 24).text) == (3, 4, 5)
    for salt in ("", "b", "A"):
        assert corpora.of(salt) == ""


def test_corpora_are_bounded() -> None:
    corpora = AnswerCorpora(max_tokens=6, max_corpora=2)
    for salt in ("a", "b", "c"):
        for answer in range(5):
            corpora.add(salt, [answer, answer + 1, answer + 2], 0)
    assert len(corpora) == 2
    assert corpora.of("a") == ""
    assert corpora.of("c") == text_of([5]) + SEPARATOR + text_of([4, 5, 6]) + SEPARATOR
    corpora.add("c", range(100), 0)
    assert corpora.of("c") == text_of(range(95, 100)) + SEPARATOR
    corpora.of("b")
    corpora.add("d", [1], 0)
    assert corpora.of("b"), "the most recently used ones are kept"
    assert not corpora.of("c")


def test_an_answer_without_tokens_is_no_source() -> None:
    corpora = AnswerCorpora()
    corpora.add("", [1, 2], 2)
    assert len(corpora) == 0
