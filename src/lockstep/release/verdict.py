"""Verdict of a gate as values: a decision, the signals behind it, figures, accounts and triage; JSON with stable
bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from lockstep.release.joining import Joining

SCHEMA = "lockstep-verdict-1"
ALL = "all"
"""Name of all pairs in the place of a segment's."""
DIGITS = 6
"""Significant digits of figures: more would be those of the machine's mathematics library."""


class Decision(StrEnum):
    """Advice on the candidate."""

    PROMOTE = "promote"
    HOLD = "hold"
    ROLLBACK = "rollback"

    @property
    def exit_code(self) -> int:
        """Exit code of the commands that judge."""
        return {Decision.PROMOTE: 0, Decision.ROLLBACK: 1, Decision.HOLD: 2}[self]

    @property
    def rank(self) -> int:
        """Place among all, the most urgent first."""
        return (Decision.ROLLBACK, Decision.HOLD, Decision.PROMOTE).index(self)


EXIT_BAD_INPUT = 3
"""Of the gate's commands when there is no verdict, whatever went wrong."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is outside policy, or that evidence is lacking of."""

    name: str
    """Kind of signal; docs/gate.md lists them."""
    response: Decision
    """What follows from it: rollback or hold."""
    segment: str
    """Segment that shows it; ``all``: all pairs together."""
    sentence: str
    """The evidence, for a person."""
    value: float | None = None
    """Figure that is outside, in the unit of its bound."""
    bound: float | None = None
    """Bound of the policy that it is beyond."""
    examples: tuple[str, ...] = ()
    """Ids of requests that show it, the first in order."""


def hold(
    name: str,
    sentence: str,
    value: float | None = None,
    bound: float | None = None,
    *,
    segment: str = ALL,
    examples: tuple[str, ...] = (),
) -> Signal:
    """A signal that holds a candidate back."""
    return Signal(
        name=name,
        response=Decision.HOLD,
        segment=segment,
        sentence=sentence,
        value=value,
        bound=bound,
        examples=examples,
    )


class Caveat(msgspec.Struct, frozen=True, kw_only=True):
    """One warning: a fact that does not decide, and that a person should see before a promotion."""

    name: str
    """Kind of warning; docs/gate.md lists them."""
    sentence: str
    """The fact, for a person."""
    segment: str = ALL
    """Segment that it is of; ``all``: all pairs."""
    examples: tuple[str, ...] = ()
    """Ids of requests that show it, the first in order."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One number of both sides."""

    baseline: float | None
    """The baseline's; null: it does not say."""
    candidate: float | None
    """The candidate's; null: it does not say."""
    difference: float | None = None
    """Candidate's less baseline's."""
    ratio: float | None = None
    """Candidate's over baseline's; null where the baseline's is 0 and the candidate's is not."""
    pairs: int = 0
    """Pairs that it is of: those in which both sides have the number. 0: no pair is such, and each side's is of all
    that it has."""


class SegmentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one segment, or of all pairs."""

    name: str
    """Model, backends, accelerator and label of the segment; ``all``: all pairs."""
    pairs: int
    """Matched pairs."""
    healthy: int
    """Pairs that both sides answered."""
    same: int
    """Pairs of the same answer."""
    differing: int
    """Pairs of answers that differ, or of vectors beyond their tolerance."""
    tolerated: int
    """Pairs of vectors that differ within their tolerance."""
    incomparable: int
    """Pairs of unlike material, prompt, parameters, seed or environment."""
    figures: dict[str, Figures]
    """By name: error_rate (percent), latency_p95_ms, ttft_p95_ms, decode_p95_ms, kv_pressure_p95, queue_depth_p95,
    output_tokens_mean."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A series at one look."""

    pairs: int
    """Pairs so far, of all series together."""
    effect: float | None
    """Mean so far."""
    lower: float | None
    """Lower confidence bound; null: none yet."""
    upper: float | None
    """Upper confidence bound; null: none yet."""


class SeriesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one segment as the sequential gate followed it."""

    signal: str
    """Signal that it gives where it is outside."""
    segment: str
    """Segment that it is of; ``all``: all pairs."""
    unit: str
    """ratio: candidate's over baseline's, a geometric mean; points: percentage points; nats: log-probability."""
    pairs: int
    """Pairs that it has a number of."""
    effect: float | None
    """Mean of all of them."""
    lower: float | None
    """Lower confidence bound of the mean at the last look, one-sided at alpha; null: none yet."""
    upper: float | None
    """Upper confidence bound of the mean at the last look, one-sided at alpha; null: none yet."""
    bound: float | None
    """Bound of the policy that the mean may not be above."""
    state: str
    """outside: certainly above the bound; within: certainly below; undecided; changing: changes too slowly for its mean
    to be evidence; no-evidence: too short or too correlated."""
    response: Decision
    """What follows from being outside."""
    excluded_pairs: int = 0
    """First pairs that were excluded as a warm-up: they are slower than the later ones."""
    excluded_effect: float | None = None
    """Mean of the excluded pairs; null: none were excluded."""
    outside_after: int | None = None
    """Pairs, of all together, after which it was outside first."""
    more_pairs: int | None = None
    """Further pairs, of all together, after which it would be within if it went on so; null: it would not, or it is."""
    curve: tuple[CurvePoint, ...] = ()
    """Its looks, 64 at most; of series of all pairs only."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that are the same in the sense of the policy."""

    field: str
    """Field that answers were compared in; empty: whole answers."""
    compared: int
    """Pairs that could be compared."""
    agreed: int
    """Pairs that agree."""
    rate: float
    """Part of the compared pairs that agree."""
    lower: float
    """Lower confidence bound of the rate at alpha, valid at any look, for bursts of at most the policy's length."""
    diverging: int
    """Pairs whose tokens differ, of those that were looked at for it."""
    median_token: int | None
    """Median place of the first differing token of these pairs."""
    earliest_token: int | None
    """Earliest place of the first differing token of these pairs."""
    logprob_gap: float | None = None
    """Mean difference of log-probabilities of the same tokens, in nats; null: not both sides give any."""


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look after."""

    signal: str
    """Kind of signal."""
    severity: str
    """critical: rollback; warning: hold."""
    segment: str
    """Place that it comes from: a segment, version, replica or route; ``all``: all pairs."""
    evidence: str
    """The signal's sentence, and the evidence of its cause."""
    response: str
    """What follows from it: rollback or hold."""
    owner: str
    """Its owner, by the file of owners, the policy, or the built-in hint."""
    action: str
    """What to look at next."""
    cause: str = ""
    """Most likely cause in a word; empty: it is unknown."""
    examples: tuple[str, ...] = ()
    """Ids of requests that show it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a gate reports. The same evidence and policy give the same bytes."""

    decision: Decision
    """promote, hold or rollback."""
    guarantee: str
    """Error rates that hold; none in threshold mode."""
    reason: str
    """The signal to look at first, in a sentence."""
    evidence: str
    """Strongest kind of evidence that there was: equality, decisions, agreement or latency."""
    signals: tuple[Signal, ...]
    """Everything outside policy, rollback first."""
    warnings: tuple[Caveat, ...]
    """Facts that do not decide and that a person should see: fields that were not read, records without a partner,
    segments that got slower."""
    notes: tuple[str, ...]
    """Sentences that decide nothing."""
    summary: SegmentSummary
    """Figures of all pairs."""
    segments: tuple[SegmentSummary, ...]
    """Figures of each segment, those with the most pairs."""
    series: tuple[SeriesSummary, ...] = ()
    """In sequential mode: every series, in the order in which they are followed."""
    coverage: dict[str, float | None]
    """Parts, 0 to 1: records that were joined, pairs that were comparable, and of each side the answers with known
    route and scheduler and with known times of tokens."""
    agreement: Agreement | None = None
    """Sameness of answers; null: none could be compared."""
    first_mismatch: dict[str, Any] | None
    """The first pair that differs, in the order of time: its request, and where tokens are known the first that
    differs."""
    transitions: tuple[str, ...]
    """Model versions of both sides, where they differ."""
    sides: dict[str, dict[str, tuple[str, ...]]]
    """Models, versions, routes, replicas, schedulers, backends, accelerators and artifacts of each side."""
    joining: Joining
    """Records of both sides: how many are in pairs, by which key, and why the others are not."""
    triage: tuple[Triage, ...]
    """An item for each signal, in the order in which to look."""
    policy: dict[str, Any]
    """All fields of the policy as they held."""
    inputs: tuple[dict[str, Any], ...]
    """Format, side and number of records of each file."""
    digests: dict[str, str]
    """Digests of each side's records, in whatever order they stood, and of the policy."""
    decisions: dict[str, Any] | None = None
    """Of two recordings: where they decide differently, and what the candidate's settings would do."""
    tool: str = ""
    """Name and version of what judged."""
    schema: str = SCHEMA
    """Version of this format."""


def to_json(verdict: Verdict) -> bytes:
    """The verdict as a file: the same evidence gives the same bytes."""
    plain = rounded(msgspec.to_builtins(verdict))
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=2) + b"\n"


def rounded(value: Any) -> Any:
    """A value whose numbers have `DIGITS` digits; what is no number is None."""
    return with_fractions(value, lambda number: float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None)


def with_fractions(value: Any, written: Callable[[float], Any]) -> Any:
    """A value of JSON in which each fraction is replaced by what a function makes of it."""
    if isinstance(value, float):
        return written(value)
    if isinstance(value, Mapping):
        return {str(name): with_fractions(each, written) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_fractions(each, written) for each in value]
    return value
