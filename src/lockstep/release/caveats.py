"""Warnings of a verdict: reports facts that do not decide, but that a person should see before a promotion.

Figures that a policy bounds are signals (`lockstep.release.signals`). Warnings are about evidence that was not read,
was not paired or has no partner, and about differences that are not visible in the figures of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.release.coverage import known_metrics
from lockstep.release.evidence import OUTPUT_TOKENS, Bools, Evidence, Floats
from lockstep.release.observation import LeftOutReason
from lockstep.release.policy import Policy
from lockstep.release.reading import Source
from lockstep.release.sequential import WORDS
from lockstep.release.series import RATIOS, has_ratio
from lockstep.release.signals import examples, slowest
from lockstep.release.verdict import Caveat, Signal
from lockstep.shown import signed_percent
from lockstep.spelling import listed

WARNINGS: Mapping[str, str] = {
    "unread-fields": "records have fields that the gate does not read; a misspelt field is one of them",
    "missing-partners": "records are in no pair, for another reason than that they were retried",
    "missing-values": "a number is known in some pairs, and in others only one side has it",
    "no-baseline-values": "the candidate has a number that the baseline never has, so nothing can be compared",
    "coarse-gaps": "gaps between tokens are too small to be evidence: tokens that a client reads at once",
    "short-answers": "a part of the answers is less than half as long as the baseline's",
    "slower-segment": "a segment is slower by more than the bound, and segments do not decide",
    "segment-outside": "a segment is outside policy in another way, and segments do not decide",
}
"""Meaning of each warning, by name."""
MIN_LOST = 0.01
"""Fraction of the pairs above which a missing number, or short answers, cause a warning."""
MIN_SLOWER_PAIRS = 10
"""Minimum number of pairs of a segment whose mean is checked."""
MIN_Z = 3.5
"""Minimum mean of the log-ratios of a slower segment, in standard errors."""
MAX_SEGMENTS = 10
"""Maximum number of segments that warnings of one kind name, the largest first."""


def warnings_of(
    policy: Policy, evidence: Evidence, sources: Sequence[Source], found: Sequence[Signal]
) -> Iterator[Caveat]:
    """All warnings, in the order of `WARNINGS`.

    Args:
        sources: input files of the evidence.
        found: signals of the verdict. Warnings do not repeat them.
    """
    yield from _unread(sources)
    yield from _partners(evidence)
    yield from _values(policy, evidence)
    yield from _short_answers(evidence)
    if policy.segments == "report" and len(evidence.pairs.segments) > 1:
        yield from _slower_segments(policy, evidence, {each.name for each in found})


def of_segments_only(policy: Policy, signals: Sequence[Signal], found: Sequence[Signal]) -> Iterator[Caveat]:
    """Warnings that replace the signals of segments if segments do not decide.

    Args:
        signals: signals of segments.
        found: signals that decide. Signals of the same name are not repeated as warnings.
    """
    names = {each.name for each in found} | set(RATIOS)  # `_slower_segments` reports slower segments
    for each in [each for each in signals if each.name not in names and policy.segments == "report"][:MAX_SEGMENTS]:
        sentence = f"{each.sentence}; segments: enforce lets segments decide"
        yield Caveat(name="segment-outside", segment=each.segment, sentence=sentence, examples=each.examples)


def _unread(sources: Sequence[Source]) -> Iterator[Caveat]:
    for each in sources:
        if each.unread:
            whose = f"the {each.side}'s records" if each.side else "records"
            sentence = f"{whose} have fields that the gate does not read: {listed(each.unread)}"
            yield Caveat(name="unread-fields", sentence=sentence)


_REASONS: Mapping[LeftOutReason, str] = {
    LeftOutReason.NO_ID: "have no id that pairs them",
    LeftOutReason.UNLIKE_DATA_SETS: "have only a place in a data set, and the other side was sent another one",
    LeftOutReason.NO_PARTNER: "have no partner on the other side",
    LeftOutReason.DUPLICATE: "share their id with another record of their side",
}
"""Text of each reason why records are in no pair."""


def _partners(evidence: Evidence) -> Iterator[Caveat]:
    joining = evidence.joining
    for each in joining.unjoined:
        if words := _REASONS.get(each.reason):
            total = joining.records[each.side]
            sentence = f"{each.count:,} of {total:,} records of the {each.side} {words}"
            yield Caveat(name="missing-partners", sentence=sentence, examples=each.examples)


def _values(policy: Policy, evidence: Evidence) -> Iterator[Caveat]:
    """Warnings about metrics that one side lacks in some pairs or the baseline lacks in all, and about token gaps that
    are too small to be evidence."""
    pairs = evidence.pairs
    for metric, baseline, candidate, rate, is_lacking in known_metrics(policy, evidence):
        words = metric.words
        if not baseline.any() and candidate.any():
            sentence = f"{words} was not compared: the baseline never has it, {int(candidate.sum()):,} answers of the "
            yield Caveat(name="no-baseline-values", sentence=f"{sentence}candidate do")
        elif not is_lacking and rate < 1 - MIN_LOST:
            only = np.flatnonzero(baseline ^ candidate)
            sentence = (
                f"{words} was compared in {int((baseline & candidate).sum()):,} pairs; in {len(only):,} others "
                f"{int((baseline & ~candidate).sum()):,} answers of the candidate and "
                f"{int((candidate & ~baseline).sum()):,} of the baseline lack it"
            )
            yield Caveat(name="missing-values", sentence=sentence, examples=examples(evidence, only))
    known = pairs.known("decode_ms")
    num_coarse = int((known & ~has_ratio(pairs, "decode")).sum())
    if num_coarse > MIN_LOST * int(known.sum()):
        sentence = f"gaps between tokens are 0.1 ms or less in {num_coarse:,} of {int(known.sum()):,} pairs: "
        yield Caveat(name="coarse-gaps", sentence=f"{sentence}tokens that came at once, or seconds for milliseconds")


def _short_answers(evidence: Evidence) -> Iterator[Caveat]:
    """Warning if clearly more answers of the candidate than of the baseline have less than half of their partner's
    length."""
    baseline, candidate = evidence.pairs.metrics[OUTPUT_TOKENS]
    healthy = evidence.pairs.healthy
    short, long = healthy & (2 * candidate < baseline), healthy & (2 * baseline < candidate)
    num_known = int(evidence.pairs.known(OUTPUT_TOKENS).sum())
    if int(short.sum()) - int(long.sum()) > MIN_LOST * num_known:
        sentence = (
            f"{int(short.sum()):,} of {num_known:,} answers have less than half of the tokens of the baseline's, "
            f"{int(long.sum()):,} more than twice as many"
        )
        shown = examples(evidence, np.flatnonzero(short))
        yield Caveat(name="short-answers", sentence=sentence, examples=shown)


def _slower_segments(policy: Policy, evidence: Evidence, found: set[str]) -> Iterator[Caveat]:
    """Warnings about segments whose times grew by more than the bound in the mean of pairs, beyond chance."""
    pairs = evidence.pairs
    for signal, metric in RATIOS.items():
        bound = policy.margin if policy.mode == "sequential" else _allowed(policy, signal)
        if bound is None or signal in found:
            continue
        usable = has_ratio(pairs, signal)
        slower = [
            (number, growth)
            for number in range(len(pairs.segments))
            if (growth := _growth(pairs.metrics[metric.name], usable & (pairs.segment == number))) > math.log1p(bound)
        ]
        for number, growth in slower[:MAX_SEGMENTS]:
            mask = pairs.segment == number
            share = 100 * int(mask.sum()) / len(pairs)
            sentence = (
                f"{WORDS[signal]} is {signed_percent(math.expm1(growth))} in the mean of "
                f"{int((mask & usable).sum()):,} pairs, {share:.3g} % of all; segments: enforce lets segments decide"
            )
            name, shown = pairs.segments[number].name, slowest(evidence, metric, mask)
            yield Caveat(name="slower-segment", segment=name, sentence=sentence, examples=shown)


def _allowed(policy: Policy, signal: str) -> float | None:
    """Growth that the threshold of a signal allows, as a fraction; None: there is no such bound."""
    ratio: float | None = getattr(policy, f"max_{signal}_p95_ratio")
    return None if ratio is None else max(0.0, ratio - 1)


def _growth(numbers: tuple[Floats, Floats], mask: Bools) -> float:
    """Mean logarithm of the ratios of some pairs; 0 if there are too few pairs or chance explains the mean."""
    if mask.sum() < MIN_SLOWER_PAIRS:
        return 0.0
    ratios = np.log(numbers[1][mask] / numbers[0][mask])
    mean, error = float(ratios.mean()), float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    return mean if mean > MIN_Z * error else 0.0
