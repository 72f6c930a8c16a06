"""Which recorded answer a request gets, beside a search that looks at every one of them."""

from __future__ import annotations

import random
from array import array

import pytest

from lockstep.cluster.recorded_index import AnswerQuery, RecordedAnswer, RecordedCompletion, RecordedIndex
from lockstep.core.request import FinishReason

SEEDS = range(40)
Known = list[tuple[tuple[int, ...], RecordedAnswer]]


def answer_of(
    name: str,
    parameters: bytes = b"",
    seed: int = 0,
    n: int = 1,
    reason: FinishReason = FinishReason.STOP,
) -> RecordedAnswer:
    return RecordedAnswer(name, parameters, seed, (RecordedCompletion(array("I"), reason),) * n, ())


def index_of(known: Known) -> RecordedIndex:
    index = RecordedIndex()
    for prompt, answer in known:
        index.add(prompt, answer)
    return index


def searched(known: Known, given: dict[str, int], query: AnswerQuery, *, is_strict: bool) -> str | None:
    """The name of the answer that the rules choose, one after the other; ``given`` counts."""
    asked = tuple(query.prompt_ids)
    left = [(prompt, answer) for prompt, answer in known if asked[: len(prompt)] == prompt]
    left = [(prompt, answer) for prompt, answer in left if len(answer.sequences) >= query.n]
    if is_strict:
        left = [
            (prompt, answer)
            for prompt, answer in left
            if prompt == asked
            and answer.parameters == query.parameters
            and len(answer.sequences) == query.n
            and query.seed in (None, answer.seed)
        ]
    if not left:
        return None
    longest = max(len(prompt) for prompt, _ in left)
    answers = [answer for prompt, answer in left if len(prompt) == longest]
    for better in (
        lambda answer: answer.is_whole,
        lambda answer: answer.parameters == query.parameters,
        lambda answer: len(answer.sequences) == query.n,
        lambda answer: query.seed in (None, answer.seed),
        lambda answer: given.get(answer.name, 0) == min(given.get(each.name, 0) for each in answers),  # noqa: B023
    ):
        answers = [answer for answer in answers if better(answer)] or answers
    given[answers[0].name] = given.get(answers[0].name, 0) + 1
    return answers[0].name


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_get_the_answers_that_a_direct_search_by_the_rules_finds(seed: int) -> None:
    draw = random.Random(seed)

    def prompt() -> tuple[int, ...]:
        return tuple(draw.choices((1, 2), k=draw.randrange(1, 6)))

    reasons = (*[FinishReason.STOP] * 4, FinishReason.LENGTH, FinishReason.ABORT)
    known: Known = [
        (
            prompt(),
            answer_of(
                str(number),
                draw.choice((b"a", b"b")),
                draw.randrange(3),
                draw.choice((1, 1, 2)),
                draw.choice(reasons),
            ),
        )
        for number in range(draw.randrange(1, 30))
    ]
    index, given = index_of(known), dict[str, int]()
    for _ in range(60):
        query = AnswerQuery(prompt(), draw.choice((b"a", b"b")), draw.choice((1, 1, 2)), draw.choice((None, 0, 1, 2)))
        is_strict = draw.random() < 0.3
        match = index.find(query, is_strict=is_strict)
        expected = searched(known, given, query, is_strict=is_strict)
        assert (match.answer.name if match else None) == expected, f"seed {seed}: {query}"
        if match is not None:
            recorded = next(prompt for prompt, answer in known if answer is match.answer)
            assert (match.num_prompt_tokens, match.is_exact) == (len(recorded), recorded == tuple(query.prompt_ids))


def test_repeated_prompt_gets_its_recorded_answers_in_rotation() -> None:
    index = index_of([((1, 2), answer_of(name)) for name in "abc"])
    given = [index.find(AnswerQuery((1, 2), b"")) for _ in range(4)]
    assert [match.answer.name for match in given if match] == ["a", "b", "c", "a"]


def test_answer_of_two_completions_serves_a_request_for_one_but_not_vice_versa() -> None:
    index = index_of([((1,), answer_of("two", n=2)), ((2,), answer_of("one"))])
    assert index.find(AnswerQuery((1,), b"", n=1)) is not None
    assert index.find(AnswerQuery((2,), b"", n=2)) is None


def test_index_reports_number_and_lengths_of_prompts() -> None:
    index = index_of([((1, 2, 3), answer_of("a")), ((1, 2, 3), answer_of("b")), ((4,), answer_of("c"))])
    assert (index.num_answers, index.num_prompts, index.lengths) == (3, 2, (1, 3))
    assert RecordedIndex().lengths == (0, 0)
