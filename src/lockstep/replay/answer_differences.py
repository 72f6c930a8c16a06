"""Differences of answers between two recordings: compares the tokens of the sequences that both have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.core.request import FinishReason
from lockstep.replay.explain import called
from lockstep.replay.playback import played
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.trace import Trace

_CUT = (FinishReason.ABORT, FinishReason.DEADLINE)
"""Ends that depend on time, so that answers differ in length."""


class Work(NamedTuple):
    """Steps of one engine in a recording."""

    num_steps: int
    num_drafts: int
    num_accepted: int


class AnswerDifferences(NamedTuple):
    """Comparison of one engine's answers. Sequences are matched by their ids, if they have the same request."""

    a: Work
    b: Work
    num_compared: int = 0
    """Number of sequences whose tokens can be compared."""
    num_tokens: int = 0
    """Number of their tokens in A."""
    differing: tuple[str, ...] = ()
    """Sequences with other tokens, as sentences."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """The comparison in words."""
        steps = f"A has {_work_text(self.a)}, and B {_work_text(self.b)}"
        if not self.num_compared:
            return (steps, "no answer is in both recordings with content, or with a digest of the same key")
        answers = f"{self.num_compared:,} answer{'s' * (self.num_compared != 1)}"
        if not self.differing:
            return (steps, f"no token differs: {answers} with {self.num_tokens:,} tokens are equal")
        return (steps, f"{len(self.differing):,} of {answers} differ, first {self.differing[0]}")


def answer_differences(a: Trace, b: Trace, engine: int) -> AnswerDifferences:
    """Compare the answers of an engine in two recordings: their tokens if both have content, else their digests.

    Raises:
        TraceError: a recording is damaged, or differs from this version's decisions.
    """
    (work_a, ended_a), (work_b, ended_b) = _ended(a, engine), _ended(b, engine)
    has_one_key = a.header.key_name == b.header.key_name != ""
    num_compared = num_tokens = 0
    differing: list[str] = []
    for seq_id, x in ended_a.items():
        y = ended_b.get(seq_id)
        if y is None or not _are_of_one_request(x, y, has_one_key):
            continue
        if x.tokens and y.tokens:
            place = _first_difference(x.tokens, y.tokens)
        elif has_one_key and x.end is not None and y.end is not None:
            place = None if x.end.output == y.end.output else -1
        else:
            continue
        num_compared += 1
        num_tokens += x.outcome.num_output_tokens
        if place is not None:
            at = f" from token {place:,} on" if place >= 0 else ""
            differing.append(f"{called(str(seq_id))}{at}")
    return AnswerDifferences(work_a, work_b, num_compared, num_tokens, tuple(differing))


def _ended(trace: Trace, engine: int) -> tuple[Work, dict[int, PlayedSequence]]:
    """The work of an engine, and its sequences that ended by themselves, by id."""
    sequences = PlayedSequences(with_tokens=True)
    ended: dict[int, PlayedSequence] = {}
    num_steps = num_drafts = num_accepted = 0
    for event in played(trace):
        if isinstance(event, DecidedStep) and event.engine == engine:
            num_steps += 1
            num_drafts += sum(event.plan.drafts)
            num_accepted += sum(event.events.num_accepted) if event.events is not None else 0
        for sequence in sequences.take(event):
            is_whole = sequence.end is None or sequence.end.reason not in _CUT
            if sequence.engine.number == engine and is_whole:
                ended[sequence.added.seq_id] = sequence
    return Work(num_steps, num_drafts, num_accepted), ended


def _are_of_one_request(x: PlayedSequence, y: PlayedSequence, has_one_key: bool) -> bool:
    """True unless the recordings show different requests."""
    if x.added.request != y.added.request or x.index != y.index:
        return False
    if x.digest is None or y.digest is None or not has_one_key:
        return True
    return (x.digest.prompt, x.digest.parameters) == (y.digest.prompt, y.digest.parameters) and (
        not x.digest.draws or (x.arrival is not None and y.arrival is not None and x.arrival.seed == y.arrival.seed)
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _work_text(work: Work) -> str:
    drafts = f", {work.num_accepted:,} of {work.num_drafts:,} drafts accepted" if work.num_drafts else ""
    return f"{work.num_steps:,} steps{drafts}"
