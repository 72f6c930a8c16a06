"""Index of recorded answers by prompt, and the choice of the answer for a request.

The choice depends only on the index and on how often each answer was returned. A request is answered from the longest
recorded prompt that is a prefix of its own, token by token; that may be its whole prompt. An answer needs at least as
many completions as the request. Of several answers, these are preferred, in this order:

1. answers that ended normally, over those that were aborted, timed out or failed;
2. answers with the same sampling parameters, apart from the seed;
3. answers with the same number of completions;
4. answers with the same seed, if the request sets one;
5. answers that were returned less often since the start, so that repeated prompts get the recorded answers in order;
6. answers that were recorded earlier.
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
"""Reasons of completions that ended normally."""
_DIGEST_BYTES = 16


class Delivery(NamedTuple):
    """Tokens that were sent to the client at the same time."""

    at_us: int
    """Time in microseconds since the arrival of the request."""
    completion: int
    """Index of the completion."""
    num_tokens: int


class RecordedCompletion(NamedTuple):
    """One recorded completion."""

    tokens: array[int]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One recorded request and its answer, without the prompt."""

    name: str
    """Caller's id of the request, from ``x-request-id``; if there was none, its engine and sequence."""
    parameters: bytes
    """Sampling parameters, as `lockstep.worker.flight.content.parameters_as_bytes` encodes them."""
    seed: int
    sequences: tuple[RecordedCompletion, ...]
    deliveries: tuple[Delivery, ...]
    """Deliveries in order of time; together they contain all tokens of all completions."""
    queue_us: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def is_whole(self) -> bool:
        return all(sequence.reason in ENDS for sequence in self.sequences)


class AnswerQuery(NamedTuple):
    """Request to search the index for."""

    prompt_ids: Sequence[int]
    parameters: bytes
    n: int = 1
    seed: int | None = None


class Match(NamedTuple):
    """Recorded answer for a request."""

    answer: RecordedAnswer
    num_prompt_tokens: int
    """Number of tokens of the recorded prompt."""
    is_exact: bool
    """True if the recorded prompt is the whole prompt of the request."""


class RecordedIndex:
    """Answers of one model, by the digests of their prompts."""

    def __init__(self) -> None:
        self._answers: dict[bytes, list[RecordedAnswer]] = {}
        """Answers by digest of the prompt, in recorded order."""
        self._lengths: list[int] = []
        """Lengths of recorded prompts in tokens, each once, ascending."""
        self._num_given: dict[int, int] = {}
        """Number of times that each answer was returned, by identity of the answer."""
        self.num_answers = 0

    @property
    def num_prompts(self) -> int:
        return len(self._answers)

    @property
    def lengths(self) -> tuple[int, int]:
        """Lengths of the shortest and the longest recorded prompt, in tokens."""
        return (self._lengths[0], self._lengths[-1]) if self._lengths else (0, 0)

    def add(self, prompt_ids: Iterable[int], answer: RecordedAnswer) -> None:
        """Add an answer. Answers are added in recorded order."""
        packed = array("I", prompt_ids)
        self._answers.setdefault(_digest(packed), []).append(answer)
        self.num_answers += 1
        if (at := bisect_left(self._lengths, len(packed))) == len(self._lengths) or self._lengths[at] != len(packed):
            insort(self._lengths, len(packed))

    def find(self, query: AnswerQuery, *, is_strict: bool = False) -> Match | None:
        """Find the answer for a request, and count it as returned; None: no answer matches.

        Args:
            is_strict: True if prompt, parameters and, if set, the seed must be equal to the recorded ones.
        """
        packed = array("I", query.prompt_ids)
        for length, answers in reversed(self._beginning(packed, is_strict)):
            able = [answer for answer in answers if len(answer.sequences) >= query.n]
            if is_strict:
                able = [answer for answer in able if _is_same(answer, query)]
            if able:
                found = min(able, key=lambda answer: self._rank(answer, query))  # the first of equal ones
                self._num_given[id(found)] = self._num_given.get(id(found), 0) + 1
                return Match(found, length, length == len(packed))
        return None

    def _beginning(self, packed: array[int], is_strict: bool) -> list[tuple[int, list[RecordedAnswer]]]:
        """Recorded prompts that are prefixes of a prompt, the shortest first: their lengths and answers."""
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
