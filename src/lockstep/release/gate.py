"""Gate: a policy and evidence in, a verdict out. Closed: no clock, no file, no randomness.

Rollback goes before hold, and hold before promote; every signal that is outside policy is listed, not the deciding one
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from lockstep.release import sequential
from lockstep.release.evidence import METRICS, Bools, Evidence, p95
from lockstep.release.gaps import P95
from lockstep.release.joining import MAX_EXAMPLES
from lockstep.release.observation import SIDES
from lockstep.release.outputs import Output, first_difference
from lockstep.release.policy import Policy
from lockstep.release.reading import Source
from lockstep.release.triage import triage_of
from lockstep.release.verdict import Decision, Figures, SegmentSummary, Signal, Verdict
from lockstep.version import __version__

ALL = "all"
_DIFFERENT = (Output.DIFFERS, Output.DRIFTED)
_COMPARED = (Output.SAME, Output.DIFFERS, Output.TOLERATED, Output.DRIFTED)
THRESHOLD_GUARANTEE = "none beyond the thresholds: figures of all pairs are compared with bounds"


@dataclass(frozen=True, slots=True)
class Rule:
    """A bound on a figure."""

    signal: str
    figure: str
    bound: str
    """The policy's field."""
    kind: Literal["ratio", "difference"]
    words: str


RULES: tuple[Rule, ...] = (
    Rule("latency", "latency_p95_ms", "max_latency_p95_ratio", "ratio", "p95 latency"),
    Rule("latency", "latency_p95_ms", "max_latency_p95_increase_ms", "difference", "p95 latency"),
    Rule("ttft", "ttft_p95_ms", "max_ttft_p95_ratio", "ratio", "p95 time to the first token"),
    Rule("ttft", "ttft_p95_ms", "max_ttft_p95_increase_ms", "difference", "p95 time to the first token"),
    Rule("decode", "decode_p95_ms", "max_decode_p95_ratio", "ratio", "p95 gap between tokens"),
    Rule("decode", "decode_p95_ms", "max_decode_p95_increase_ms", "difference", "p95 gap between tokens"),
    Rule("kv-pressure", "kv_pressure_p95", "max_kv_pressure_p95_increase", "difference", "p95 KV pressure"),
)
"""Regressions that hold a candidate back in threshold mode."""


def judge(policy: Policy, evidence: Evidence, sources: tuple[Source, ...] = ()) -> Verdict:
    """Judge a candidate."""
    pairs = evidence.pairs
    everything = np.ones(len(pairs), np.bool_)
    summary = summarise(evidence, everything, ALL, -1)
    segments = tuple(
        summarise(evidence, pairs.segment == number, segment.name, number)
        for number, segment in enumerate(pairs.segments)
    )
    coverage = _coverage(evidence)
    signals = [*_sameness(policy, evidence, summary), *_missing(policy, evidence, summary, coverage)]
    notes = [*evidence.joining.notes, *_notes(policy, evidence, summary)]
    guarantee = THRESHOLD_GUARANTEE
    if policy.mode == "threshold":
        signals += _regressions(policy, summary)
        if policy.segments == "enforce":
            for segment in segments:
                if segment.healthy >= policy.min_pairs and len(segments) > 1:
                    signals += [*_regressions(policy, segment), *_segment_mismatches(policy, evidence, segment)]
    else:
        findings = sequential.follow(policy, evidence)
        signals += findings.signals
        notes += findings.notes
        guarantee = findings.guarantee
        summary, *rest = [findings.with_bounds(each) for each in (summary, *segments)]
        segments = tuple(rest)
    ordered = tuple(sorted(signals, key=_severity))
    decision = ordered[0].response if ordered else Decision.PROMOTE
    return Verdict(
        decision=decision,
        guarantee=guarantee,
        reason=ordered[0].sentence if ordered else "everything is within policy",
        evidence=_kind_of_evidence(policy, evidence, ordered),
        signals=ordered,
        notes=tuple(notes),
        summary=summary,
        segments=segments,
        coverage=coverage,
        first_mismatch=_first_mismatch(evidence),
        transitions=_transitions(evidence),
        sides={
            side: {name: values[number] for name, values in evidence.names.items() if values[number]}
            for number, side in enumerate(SIDES)
        },
        joining=_account(evidence),
        triage=triage_of(ordered, policy, evidence),
        policy=asdict(policy),
        inputs=tuple({"format": each.format, "side": each.side, "records": each.num_rows} for each in sources),
        digests=dict(zip(SIDES, evidence.digests, strict=True)),
        tool=f"lockstep {__version__}",
    )


def summarise(evidence: Evidence, mask: Bools, name: str, number: int) -> SegmentSummary:
    """Figures of some of the pairs.

    Args:
        number: of the segment; -1: all of them.
    """
    pairs = evidence.pairs
    healthy = mask & pairs.healthy
    output = pairs.output[healthy]
    count = int(mask.sum())
    figures = {}
    errors = [100.0 * float((mask & ~ok).sum()) / count if count else math.nan for ok in pairs.ok]
    figures["error_rate"] = _figures(errors[0], errors[1], count)
    for metric in METRICS:
        if metric == "decode_ms":
            values = evidence.decode_p95.get(number, (math.nan, math.nan))
        else:
            both = pairs.metrics[metric]
            values = (p95(both[0][healthy]), p95(both[1][healthy]))
        stem = metric.removesuffix("_ms")
        figures[f"{stem}_p95{'_ms' if stem != metric else ''}"] = _figures(*values, int(healthy.sum()))
    return SegmentSummary(
        name=name,
        pairs=count,
        healthy=int(healthy.sum()),
        same=int((output == Output.SAME).sum()),
        differing=int(np.isin(output, _DIFFERENT).sum()),
        tolerated=int((output == Output.TOLERATED).sum()),
        incomparable=int((output == Output.INCOMPARABLE).sum()),
        figures=figures,
    )


def _figures(baseline: float, candidate: float, pairs: int) -> Figures:
    known = [None if math.isnan(each) else each for each in (baseline, candidate)]
    if known[0] is None or known[1] is None:
        return Figures(baseline=known[0], candidate=known[1], pairs=pairs)
    ratio = known[1] / known[0] if known[0] > 0 else (1.0 if known[1] == 0 else math.inf)
    return Figures(baseline=known[0], candidate=known[1], difference=known[1] - known[0], ratio=ratio, pairs=pairs)


# -- signals ----------------------------------------------------------------------------------------------------------


def _sameness(policy: Policy, evidence: Evidence, summary: SegmentSummary) -> Iterator[Signal]:
    """Signals of answers and errors."""
    pairs = evidence.pairs
    weights = evidence.names["artifact"]
    if policy.outputs is None and weights[0] and weights[1] and weights[0] != weights[1]:
        yield Signal(
            name="outputs-policy",
            response=Decision.HOLD,
            segment=ALL,
            sentence="the weights of the sides differ, so the policy has to say what sameness of outputs means: "
            "exact, numeric, agreement(FIELD) or ignore",
        )
    if policy.outputs != "ignore":
        yield from _mismatches(policy, evidence, summary, np.ones(len(pairs), np.bool_))
        if summary.healthy and not summary.same + summary.differing + summary.tolerated:
            yield Signal(
                name="no-output-evidence",
                response=Decision.HOLD,
                segment=ALL,
                sentence="no pair of answers could be compared; such evidence may promote only with outputs: ignore",
            )
    increase = summary.figures["error_rate"].difference
    if policy.mode == "threshold" and increase is not None and increase > policy.max_error_rate_increase:
        failed = np.flatnonzero(pairs.ok[0] & ~pairs.ok[1])
        yield Signal(
            name="errors",
            response=Decision.ROLLBACK,
            segment=ALL,
            sentence=f"the candidate's error rate is {increase:.4g} points above the baseline's",
            value=increase,
            bound=policy.max_error_rate_increase,
            examples=tuple(evidence.keys(failed[:MAX_EXAMPLES])),
        )


def _mismatches(policy: Policy, evidence: Evidence, summary: SegmentSummary, mask: Bools) -> Iterator[Signal]:
    output = evidence.pairs.output
    compared = summary.same + summary.differing + summary.tolerated
    drifted = np.flatnonzero(mask & (output == Output.DRIFTED))
    differing = np.flatnonzero(mask & (output == Output.DIFFERS))
    for name, places, words in (
        ("output-mismatch", differing, "answers differ"),
        ("numeric-drift", drifted, "vectors differ beyond their tolerance"),
    ):
        if compared and len(places) / compared > policy.max_mismatch_rate:
            yield Signal(
                name=name,
                response=Decision.ROLLBACK,
                segment=summary.name,
                sentence=f"{len(places):,} of {compared:,} compared {words}",
                value=len(places) / compared,
                bound=policy.max_mismatch_rate,
                examples=tuple(evidence.keys(places[:MAX_EXAMPLES])),
            )


def _segment_mismatches(policy: Policy, evidence: Evidence, segment: SegmentSummary) -> Iterator[Signal]:
    if policy.outputs == "ignore":
        return
    number = next(at for at, each in enumerate(evidence.pairs.segments) if each.name == segment.name)
    yield from _mismatches(policy, evidence, segment, evidence.pairs.segment == number)


def _regressions(policy: Policy, summary: SegmentSummary) -> Iterator[Signal]:
    for rule in RULES:
        bound = getattr(policy, rule.bound)
        value = getattr(summary.figures[rule.figure], rule.kind)
        if bound is None or value is None or not value > bound:
            continue
        figures = summary.figures[rule.figure]
        by = f"{value:.4g} times the baseline's" if rule.kind == "ratio" else f"{value:.4g} above the baseline's"
        yield Signal(
            name=rule.signal,
            response=Decision.HOLD,
            segment=summary.name,
            sentence=f"{rule.words} is {by} ({figures.baseline:.4g} -> {figures.candidate:.4g})",
            value=value,
            bound=bound,
        )


def _missing(
    policy: Policy, evidence: Evidence, summary: SegmentSummary, coverage: Mapping[str, float | None]
) -> Iterator[Signal]:
    """Signals of evidence that is not there."""
    if summary.pairs < policy.min_pairs:
        yield Signal(
            name="too-few-pairs",
            response=Decision.HOLD,
            segment=ALL,
            sentence=f"{summary.pairs:,} matched pairs, and the policy wants {policy.min_pairs:,}",
            value=summary.pairs,
            bound=policy.min_pairs,
        )
    for name, field, rate, words in (
        (
            "provenance",
            "min_candidate_routing_provenance_rate",
            "candidate_routing_provenance_rate",
            "route and scheduler",
        ),
        ("streaming", "min_candidate_streaming_trace_rate", "candidate_streaming_trace_rate", "times of tokens"),
        ("join", "min_join_rate", "join_rate", "a partner on the other side"),
        ("comparable", "min_comparable_rate", "comparable_rate", "comparable answers"),
    ):
        bound, value = getattr(policy, field), coverage[rate]
        if bound and (value is None or value < bound):
            yield Signal(
                name=f"missing-{name}",
                response=Decision.HOLD,
                segment=ALL,
                sentence=f"{100 * (value or 0.0):.4g} % have {words}, and the policy wants {100 * bound:.4g} %",
                value=value,
                bound=bound,
            )


def _severity(signal: Signal) -> tuple[int, bool, str, str]:
    return (
        (Decision.ROLLBACK, Decision.HOLD, Decision.PROMOTE).index(signal.response),
        signal.segment != ALL,
        signal.name,
        signal.segment,
    )


# -- accounts ---------------------------------------------------------------------------------------------------------


def _coverage(evidence: Evidence) -> dict[str, float | None]:
    pairs = evidence.pairs
    count = len(pairs)

    def rate(number: float, of: float) -> float | None:
        return float(number) / of if of else None

    healthy = int(pairs.healthy.sum())
    compared = int(np.isin(pairs.output, _COMPARED).sum())
    most = max(evidence.joining.num_records)
    found: dict[str, float | None] = {
        "join_rate": rate(evidence.joining.num_pairs, most),
        "comparable_rate": rate(compared, healthy),
    }
    for number, side in enumerate(SIDES):
        found[f"{side}_routing_provenance_rate"] = rate(int(pairs.routed[number].sum()), count)
        found[f"{side}_streaming_trace_rate"] = rate(int(pairs.streamed[number].sum()), count)
    return dict(sorted(found.items()))


def _notes(policy: Policy, evidence: Evidence, summary: SegmentSummary) -> Iterator[str]:
    no_material = int((evidence.pairs.output == Output.NO_MATERIAL).sum())
    if no_material:
        yield f"{no_material:,} pairs hold nothing of either answer: they are evidence of latency only"
    for reason, count in evidence.incomparable.items():
        yield f"{count:,} pairs were not compared: {reason}"
    for side, fault, count in evidence.faults:
        yield f"{count:,} records of the {side} have {fault.value}; their stream events were left out"
    if summary.tolerated:
        yield f"{summary.tolerated:,} pairs of vectors differ within their tolerance, by {evidence.max_drift:.4g} at most"
    if policy.outputs == "ignore":
        yield "outputs were not compared: the policy says ignore"


def _transitions(evidence: Evidence) -> tuple[str, ...]:
    baseline, candidate = (", ".join(values) for values in evidence.names["model_version"])
    return (f"{baseline} -> {candidate}",) if baseline and candidate and baseline != candidate else ()


def _first_mismatch(evidence: Evidence) -> dict[str, Any] | None:
    places = np.flatnonzero(np.isin(evidence.pairs.output, _DIFFERENT))
    if not len(places):
        return None
    request = evidence.keys(places[:1])[0]
    return {"request": request, **(first_difference(evidence.store, int(places[0])) or {})}


def _account(evidence: Evidence) -> dict[str, Any]:
    joining = evidence.joining
    return {
        "records": dict(zip(SIDES, joining.num_records, strict=True)),
        "pairs": joining.num_pairs,
        "by_key": dict(joining.pairs_by_key),
        "unjoined": [
            {"side": each.side, "reason": each.reason.value, "count": each.count, "examples": list(each.examples)}
            for each in joining.unjoined
        ],
    }


def _kind_of_evidence(policy: Policy, evidence: Evidence, signals: tuple[Signal, ...]) -> str:
    """What the decision stands on, the strongest kind that there is."""
    weights = evidence.names["artifact"]
    is_promised = all(evidence.is_deterministic) and weights[0] == weights[1] != ()
    has_outputs = bool(np.isin(evidence.pairs.output, _COMPARED).any()) and policy.outputs != "ignore"
    if is_promised and has_outputs and policy.outputs in (None, "exact"):
        return "equality: both engines promise equal answers of these weights, so one differing token is proof"
    if has_outputs:
        return "agreement of outputs, then latency, errors and pressure of pairs"
    return "latency, errors and pressure of pairs; outputs were not compared"


assert P95 == 0.95  # the figures' names say so
