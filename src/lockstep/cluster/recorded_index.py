"""Recorded answers by their prompts: which of them a request gets. Pure, but for how often each was given.

A request is answered by the answers to the longest recorded prompt that its own begins with, token by token; its own,
where that is recorded. Of several answers to that prompt, the first counts of this order that tells them apart:

1. those that came to their end, before those that were aborted, timed out or failed;
2. those of the request's own parameters, the seed apart;
3. those of as many completions as the request wants; with fewer than that there is nothing to give;
4. those of the request's seed, where it names one;
5. those that were given less often since the start: a prompt that was sent again and again gets what it got, in turn;
6. those that were recorded earlier.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from lockstep.core.request import FinishReason

ENDS = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons of answers that came to their end."""
_DIGEST_BYTES = 16


class Delivery(NamedTuple):
    """Tokens that came to their reader at once."""

    at_us: int
    """Since the request came."""
    completion: int
    """Of the answer's ``n``."""
    num_tokens: int


class RecordedCompletion(NamedTuple):
    """One completion as it was recorded."""

    tokens: array[int]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded request and what became of it, without its prompt."""

    name: str
    """The caller's name for the request, as ``x-request-id`` had it; else its engine and sequence."""
    parameters: bytes
    """`lockstep.worker.flight.content.parameters_as_bytes`."""
    seed: int
    sequences: tuple[RecordedCompletion, ...]
    deliveries: tuple[Delivery, ...]
    """In order of time; together they are all tokens of all sequences."""
    queue_us: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def is_whole(self) -> bool:
        return all(sequence.reason in ENDS for sequence in self.sequences)


class AnswerQuery(NamedTuple):
    """Request in the index's terms."""

    prompt_ids: Sequence[int]
    parameters: bytes
    n: int = 1
    seed: int | None = None


class Match(NamedTuple):
    """Answer that a request gets."""

    answer: RecordedAnswer
    num_prompt_tokens: int
    """Of the recorded prompt."""
    is_exact: bool
    """Whether that is the whole prompt of the request."""


class RecordedIndex:
    """Answers of one model by the digests of their prompts."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[RecordedAnswer]] = {}
        """By prompt, in recorded order."""
        self._lengths: list[int] = []
        """Of recorded prompts, each once, ascending."""
        self._num_given: dict[int, int] = {}
        """By identity of the answer."""
        self.num_answers = 0

    @property
    def num_prompts(self) -> int:
        return len(self._answers)

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of the shortest and the longest recorded prompt, in tokens."""
        return (self._lengths[0], self._lengths[-1]) if self._lengths else (0, 0)

    def add(self, prompt_ids: Iterable[int], answer: RecordedAnswer) -> None:
        """Take an answer in; in recorded order."""
        packed = array("I", prompt_ids)
        self._answers.setdefault(_digest(packed), []).append(answer)
        self.num_answers += 1
        if (at := bisect_left(self._lengths, len(packed))) == len(self._lengths) or self._lengths[at] != len(packed):
            insort(self._lengths, len(packed))

    def find(self, query: AnswerQuery, *, is_strict: bool = False) -> Match | None:
        """The answer that a request gets; None: there is none. It counts as given.

        Args:
            is_strict: the whole prompt and the parameters have to be recorded ones, and the seed, where one is named.
        """
        packed = array("I", query.prompt_ids)
        for length, answers in reversed(self._beginning(packed, is_strict)):
            able = [answer for answer in answers if len(answer.sequences) >= query.n]
            if is_strict:
                able = [answer for answer in able if _is_same(answer, query)]
            if able:
                found = min(able, key=lambda answer: self._rank(answer, query))  # of equal ones the first
                self._num_given[id(found)] = self._num_given.get(id(found), 0) + 1
                return Match(found, length, length == len(packed))
        return None

    def _beginning(self, packed: array[int], is_strict: bool) -> list[tuple[int, list[RecordedAnswer]]]:
        """Recorded prompts that a prompt begins with, the shortest first: their lengths and answers."""
        lengths = [len(packed)] if is_strict else [each for each in self._lengths if each <= len(packed)]
        digest = blake2b(digest_size=_DIGEST_BYTES)
        found = []
        at = 0
        for length in lengths:
            digest.update(packed[at:length])
            at = length
            answers = self._answers.get(digest.copy().digest())
            if answers is not None:
                found.append((length, answers))
        return found

    def _rank(self, answer: RecordedAnswer, query: AnswerQuery) -> tuple[int, ...]:
        return (
            not answer.is_whole,
            answer.parameters != query.parameters,
            len(answer.sequences) != query.n,
            query.seed is not None and answer.seed != query.seed,
            self._num_given.get(id(answer), 0),
        )


def _is_same(answer: RecordedAnswer, query: AnswerQuery) -> bool:
    is_same = answer.parameters == query.parameters and len(answer.sequences) == query.n
    return is_same and query.seed in (None, answer.seed)


def _digest(packed: array[int]) -> bytes:
    return blake2b(packed, digest_size=_DIGEST_BYTES).digest()
