"""Verdict of a gate: defines the decision with its signals, figures and triage, and writes JSON with stable bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from lockstep.release.joining import Joining

SCHEMA = "lockstep-verdict-1"
ALL = "all"
"""Segment name that stands for all pairs."""
DIGITS = 6
"""Significant digits of figures. Further digits would depend on the machine's mathematics library."""


class Decision(StrEnum):
    """Advice on the candidate."""

    PROMOTE = "promote"
    HOLD = "hold"
    ROLLBACK = "rollback"

    @property
    def exit_code(self) -> int:
        """Exit code of the gate's commands."""
        return {Decision.PROMOTE: 0, Decision.ROLLBACK: 1, Decision.HOLD: 2}[self]

    @property
    def rank(self) -> int:
        """Rank by urgency, from 0 for the most urgent decision."""
        return (Decision.ROLLBACK, Decision.HOLD, Decision.PROMOTE).index(self)


EXIT_BAD_INPUT = 3
"""Exit code of the gate's commands if there is no verdict, for any reason."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is outside policy, or for which evidence is missing."""

    name: str
    """Kind of signal; docs/gate.md lists them."""
    response: Decision
    """Decision that the signal causes: rollback or hold."""
    segment: str
    """Segment of the signal; ``all``: all pairs together."""
    sentence: str
    """Evidence in one sentence, for a person."""
    value: float | None = None
    """Figure that is outside policy, in the unit of its bound."""
    bound: float | None = None
    """Bound of the policy that the figure exceeds."""
    examples: tuple[str, ...] = ()
    """Ids of the first requests that show the signal."""


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
    """Warning: a fact that does not decide, but that a person should see before a promotion."""

    name: str
    """Kind of warning; docs/gate.md lists them."""
    sentence: str
    """Fact in one sentence, for a person."""
    segment: str = ALL
    """Segment of the warning; ``all``: all pairs."""
    examples: tuple[str, ...] = ()
    """Ids of the first requests that show the fact."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both sides."""

    baseline: float | None
    """Figure of the baseline; null: unknown."""
    candidate: float | None
    """Figure of the candidate; null: unknown."""
    difference: float | None = None
    """Candidate minus baseline."""
    ratio: float | None = None
    """Candidate divided by baseline; null if the baseline's figure is 0 and the candidate's is not."""
    pairs: int = 0
    """Number of pairs in which both sides have a value, from which the figure was computed. 0: no pair has both values,
    and each side's figure was computed from all of its values."""


class SegmentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one segment, or of all pairs."""

    name: str
    """Model, backends, accelerator and label of the segment; ``all``: all pairs."""
    pairs: int
    """Matched pairs."""
    healthy: int
    """Pairs that both sides answered."""
    same: int
    """Pairs whose answers are the same."""
    differing: int
    """Pairs whose answers differ, or whose vectors differ beyond their tolerance."""
    tolerated: int
    """Pairs whose vectors differ within their tolerance."""
    incomparable: int
    """Pairs whose answers are not comparable: different material, prompt, parameters, seed or environment."""
    figures: dict[str, Figures]
    """Figures by name: error_rate (percent), latency_p95_ms, ttft_p95_ms, decode_p95_ms, kv_pressure_p95,
    queue_depth_p95, output_tokens_mean."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Series at one look (interim analysis)."""

    pairs: int
    """Number of all pairs so far, including those without a value of this series."""
    effect: float | None
    """Mean so far."""
    lower: float | None
    """Lower confidence bound; null: none yet."""
    upper: float | None
    """Upper confidence bound; null: none yet."""


class SeriesSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one segment in sequential mode."""

    signal: str
    """Signal that the series causes if it is outside."""
    segment: str
    """Segment of the series; ``all``: all pairs."""
    unit: str
    """ratio: candidate divided by baseline, as a geometric mean; points: percentage points; nats: log-probability."""
    pairs: int
    """Pairs that have a value of this series."""
    effect: float | None
    """Mean of all values."""
    lower: float | None
    """Lower confidence bound of the mean at the last look, one-sided at alpha; null: none yet."""
    upper: float | None
    """Upper confidence bound of the mean at the last look, one-sided at alpha; null: none yet."""
    bound: float | None
    """Upper bound of the policy on the mean."""
    state: str
    """outside: certainly above the bound; within: certainly below; undecided; changing: changes too slowly for its mean
    to be evidence; no-evidence: too short or too correlated."""
    response: Decision
    """Decision if the series is outside."""
    excluded_pairs: int = 0
    """Number of first pairs that were excluded as a warm-up because they are slower than the later ones."""
    excluded_effect: float | None = None
    """Mean of the excluded pairs; null: none were excluded."""
    outside_after: int | None = None
    """Number of all pairs after which the series was first outside; null: it is not outside."""
    more_pairs: int | None = None
    """Number of further pairs, of all series together, after which the series would be within if its mean stayed the
    same; null: it is decided, or would not come within."""
    curve: tuple[CurvePoint, ...] = ()
    """Up to 64 looks at the series; empty for series of segments."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of answers, as the policy defines it."""

    field: str
    """Field of the answers that was compared; empty: whole answers."""
    compared: int
    """Pairs that could be compared."""
    agreed: int
    """Pairs that agree."""
    rate: float
    """Fraction of the compared pairs that agree."""
    lower: float
    """Lower confidence bound of the rate at alpha. It is valid at every look, for bursts of failures up to the policy's
    length."""
    diverging: int
    """Pairs whose tokens differ, among the pairs that were searched for the first differing token."""
    median_token: int | None
    """Median position of the first differing token of these pairs."""
    earliest_token: int | None
    """Earliest position of the first differing token of these pairs."""
    logprob_gap: float | None = None
    """Mean difference of the log-probabilities of the same tokens, in nats; null: not available on both sides."""


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """One finding to investigate."""

    signal: str
    """Kind of signal."""
    severity: str
    """critical: rollback; warning: hold."""
    segment: str
    """Origin of the signal: a segment, version, replica or route; ``all``: all pairs."""
    evidence: str
    """Sentence of the signal, and the evidence of its cause."""
    response: str
    """Decision that the signal causes: rollback or hold."""
    owner: str
    """Owner by the owners file, the policy, or the built-in default."""
    action: str
    """Next step of the investigation."""
    cause: str = ""
    """Name of the most likely cause; empty: unknown."""
    examples: tuple[str, ...] = ()
    """Ids of requests that show the signal."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the gate. The same evidence and policy give the same bytes."""

    decision: Decision
    """Decision on the candidate: promote, hold or rollback."""
    guarantee: str
    """Guaranteed error rates; none in threshold mode."""
    reason: str
    """Sentence of the signal to investigate first."""
    evidence: str
    """Strongest available kind of evidence: equality, decisions, agreement or latency."""
    signals: tuple[Signal, ...]
    """All signals, rollback first."""
    warnings: tuple[Caveat, ...]
    """Facts that do not decide, but that a person should see: fields that were not read, records without a partner,
    segments that became slower."""
    notes: tuple[str, ...]
    """Remarks that do not affect the decision."""
    summary: SegmentSummary
    """Figures of all pairs."""
    segments: tuple[SegmentSummary, ...]
    """Figures of the segments with the most pairs."""
    series: tuple[SeriesSummary, ...] = ()
    """All series, in sequential mode only."""
    coverage: dict[str, float | None]
    """Rates from 0 to 1: joined records, comparable pairs, and for each side the answers with known route and scheduler
    and with known token times."""
    agreement: Agreement | None = None
    """Agreement of answers; null: no answers could be compared."""
    first_mismatch: dict[str, Any] | None
    """First pair that differs, in the order of time: its request, and the first differing token if tokens are
    known."""
    transitions: tuple[str, ...]
    """Model versions of baseline and candidate, if they differ."""
    sides: dict[str, dict[str, tuple[str, ...]]]
    """Models, versions, routes, replicas, schedulers, backends, accelerators and artifacts of each side."""
    joining: Joining
    """Number of paired records, the keys that paired them, and the reasons for unpaired records."""
    triage: tuple[Triage, ...]
    """One finding for each signal, in the order of investigation."""
    policy: dict[str, Any]
    """All fields of the policy, including defaults."""
    inputs: tuple[dict[str, Any], ...]
    """Format, side and number of records of each file."""
    digests: dict[str, str]
    """Digests of each side's records, independent of their order, and of the policy."""
    decisions: dict[str, Any] | None = None
    """For two recordings: differences of their scheduler decisions, and the predicted effect of the candidate's
    settings."""
    tool: str = ""
    """Name and version of the tool that judged."""
    schema: str = SCHEMA
    """Version of this format."""


def to_json(verdict: Verdict) -> bytes:
    """Content of a verdict file. The same evidence gives the same bytes."""
    plain = rounded(msgspec.to_builtins(verdict))
    return msgspec.json.format(msgspec.json.encode(plain, order="sorted"), indent=2) + b"\n"


def rounded(value: Any) -> Any:
    """Copy of a value with its numbers rounded to `DIGITS` digits; NaN and infinity become None."""
    return with_fractions(value, lambda number: float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None)


def with_fractions(value: Any, written: Callable[[float], Any]) -> Any:
    """Copy of a JSON value in which `written` has converted each floating-point number."""
    if isinstance(value, float):
        return written(value)
    if isinstance(value, Mapping):
        return {str(name): with_fractions(each, written) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_fractions(each, written) for each in value]
    return value
