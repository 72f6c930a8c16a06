"""Gate: judges evidence by a policy and returns a verdict. It is deterministic: no clock, no files, no randomness.

Rollback has precedence over hold, and hold over promote. The verdict lists every signal that is outside policy, not
only the deciding one. Signals with the same response are sorted in the order of investigation
(`lockstep.release.triage.KINDS`): slower decode steps also delay whole answers, so they come before late answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from lockstep.release import sequential, signals
from lockstep.release.agreement import DivergencePoints, divergence, excess_mismatches, logprob_gaps
from lockstep.release.caveats import of_segments_only, warnings_of
from lockstep.release.coverage import agreement_lower, coverage_of, insufficient
from lockstep.release.evidence import OUTPUT_TOKENS, Bools, Evidence, Floats, Pairs, p95
from lockstep.release.observation import METRICS, SIDES
from lockstep.release.outputs import COMPARED, DIFFERENT, Output, first_difference
from lockstep.release.policy import Policy, digest_of
from lockstep.release.reading import Source
from lockstep.release.series import Answers, series_of
from lockstep.release.triage import RANKS, find, triage_of
from lockstep.release.verdict import (
    ALL,
    Agreement,
    Decision,
    Figures,
    SegmentSummary,
    SeriesSummary,
    Signal,
    Verdict,
    hold,
)
from lockstep.version import __version__

THRESHOLD_GUARANTEE = "none beyond the thresholds: figures of all pairs are compared with bounds"


class SecondBaseline(NamedTuple):
    """Comparison of the baseline with a second instance of it (A/A). Its differences are noise."""

    evidence: Evidence
    """Evidence whose candidate is the second baseline."""
    source: Source


def judge(
    policy: Policy, evidence: Evidence, sources: tuple[Source, ...] = (), beside: SecondBaseline | None = None
) -> Verdict:
    """Judge a candidate.

    Args:
        sources: input files of the evidence, which the verdict lists.
        beside: comparison of the same baseline with a second one; None: there is no second baseline.
    """
    second = beside.evidence if beside is not None else None
    second_source = [(beside.source, "second baseline")] if beside is not None else []
    pairs = evidence.pairs
    everything = np.ones(len(pairs), np.bool_)
    summary = summarise(evidence, everything, ALL, -1)
    segments = tuple(
        summarise(evidence, pairs.segment == number, segment.name, number)
        for number, segment in enumerate(pairs.segments)
    )
    coverage = coverage_of(evidence)
    found = [*signals.undefined_sameness(policy, evidence), *insufficient(policy, evidence, summary, coverage)]
    notes = [*evidence.notes, *_notes(policy, evidence, summary)]
    answers = _answers(policy, evidence, second)
    found += _outside(policy, evidence, answers, summary, everything)
    of_segments = [*_outside_segments(policy, evidence, answers, segments)]
    found += of_segments if policy.segments == "enforce" else []
    series: tuple[SeriesSummary, ...] = ()
    guarantee = THRESHOLD_GUARANTEE
    if policy.mode == "sequential":
        series, more, remarks = _follow(policy, evidence, answers)
        facts = {(each.name, each.segment) for each in found}
        found += [each for each in more if (each.name, each.segment) not in facts]
        notes += remarks
        covered = ", ".join(dict.fromkeys(each.signal for each in series)) or "no series yet"
        guarantee = f"{sequential.guarantee_of(policy)}; it covers {covered}, and nothing else"
    if second is not None:
        found += _second_baseline_signals(policy, second)
    ordered = tuple(sorted(found, key=_order))
    findings = find(ordered, evidence)
    decision = ordered[0].response if ordered else Decision.PROMOTE
    warnings = (*warnings_of(policy, evidence, sources, ordered), *of_segments_only(policy, of_segments, ordered))
    reasons = (each.signal.sentence for each in findings if each.signal.response is decision)
    return Verdict(
        decision=decision,
        guarantee=guarantee,
        reason=next(reasons, "everything is within policy" + (f"; warnings: {len(warnings)}" if warnings else "")),
        evidence=_kind_of_evidence(policy, evidence),
        signals=ordered,
        warnings=warnings,
        notes=tuple(notes),
        summary=summary,
        segments=segments,
        series=series,
        coverage=coverage,
        agreement=_agreement(policy, evidence, answers),
        first_mismatch=_first_mismatch(evidence),
        transitions=_transitions(evidence),
        sides={
            side: {name: values[number] for name, values in evidence.names.items() if values[number]}
            for number, side in enumerate(SIDES)
        },
        joining=evidence.joining,
        triage=triage_of(findings, policy),
        policy=asdict(policy),
        inputs=tuple(
            {"format": each.format, "side": side, "records": each.num_rows}
            for each, side in [*((each, each.side) for each in sources), *second_source]
        ),
        digests={**dict(zip(SIDES, evidence.digests, strict=True)), "policy": digest_of(policy)},
        tool=f"lockstep {__version__}",
    )


def _outside(
    policy: Policy, evidence: Evidence, answers: Answers, summary: SegmentSummary, mask: Bools
) -> Iterator[Signal]:
    """Signals for all figures of some pairs that are beyond a bound and need no statistics."""
    is_defined = not any(signals.undefined_sameness(policy, evidence))
    if is_defined and (policy.mode == "threshold" or summary.name == ALL):
        yield from signals.mismatches(policy, evidence, answers, summary.name, mask)
    if policy.mode == "threshold":
        yield from signals.errors(policy, evidence, summary, mask)
        yield from signals.logprob_gap(policy, evidence, answers, summary.name, mask)
    yield from signals.regressions(policy, evidence, summary, mask)
    yield from signals.output_length(policy, evidence, summary, mask)


def _outside_segments(
    policy: Policy, evidence: Evidence, answers: Answers, segments: tuple[SegmentSummary, ...]
) -> Iterator[Signal]:
    """Signals of each segment with enough pairs, in threshold mode only, whether or not segments decide."""
    if policy.mode == "threshold" and len(segments) > 1:
        for number, segment in enumerate(segments):
            if segment.pairs >= policy.min_pairs:
                yield from _outside(policy, evidence, answers, segment, evidence.pairs.segment == number)


def _follow(
    policy: Policy, evidence: Evidence, answers: Answers
) -> tuple[tuple[SeriesSummary, ...], list[Signal], list[str]]:
    """Evaluate the series of the pairs.

    Returns:
        The series, their signals, and remarks.
    """
    early = sequential.too_early(len(evidence.pairs), evidence.pairs.is_timed)
    if early is not None:
        return (), [early], []
    findings = sequential.follow(policy, series_of(policy, evidence.pairs, answers), len(evidence.pairs))
    summaries = sequential.summaries_of(policy, findings)
    found = [signals.with_examples(evidence, each) for each in sequential.signals_of(summaries)]
    return summaries, found, [*sequential.notes_of(policy, summaries)]


def _second_baseline_signals(policy: Policy, second: Evidence) -> Iterator[Signal]:
    """Signals if the second baseline is itself outside policy: its cause may also affect the candidate."""
    everything = np.ones(len(second.pairs), np.bool_)
    summary = summarise(second, everything, ALL, -1)
    found = [*signals.errors(policy, second, summary, everything)] if policy.mode == "threshold" else []
    found += signals.regressions(policy, second, summary, everything)
    if policy.mode == "sequential":
        no_reasons = ("undecided", "no-evidence-yet", "non-stationary")
        found += [each for each in _follow(policy, second, Answers())[1] if each.name not in no_reasons]
    for each in found:
        sentence = f"a second baseline is not like the first: {each.sentence}"
        yield hold("unsound-baseline", sentence, each.value, each.bound, examples=each.examples)


def _order(signal: Signal) -> tuple[int, bool, int, str]:
    return signal.response.rank, signal.segment != ALL, RANKS[signal.name], signal.segment


def summarise(evidence: Evidence, mask: Bools, name: str, number: int) -> SegmentSummary:
    """Figures of some of the pairs.

    Args:
        mask: pairs to summarise.
        name: name of the segment.
        number: number of the segment; -1: all pairs.
    """
    pairs = evidence.pairs
    healthy = mask & pairs.healthy
    output = pairs.output[healthy]
    count = int(mask.sum())
    figures = {}
    errors = [100.0 * float((mask & ~ok).sum()) / count if count else math.nan for ok in pairs.ok]
    figures["error_rate"] = _figures(errors[0], errors[1], count)
    for metric in METRICS:
        values, num = _known(pairs, metric.name, healthy)
        both = (p95(values[0]), p95(values[1]))
        if metric.name == "decode_ms":
            both = evidence.decode_p95.get(number, (math.nan, math.nan))
        figures[metric.figure] = _figures(*both, num)
    lengths, num = _known(pairs, OUTPUT_TOKENS, healthy)
    means = [float(each.mean()) if len(each) else math.nan for each in lengths]
    figures["output_tokens_mean"] = _figures(means[0], means[1], num)
    return SegmentSummary(
        name=name,
        pairs=count,
        healthy=int(healthy.sum()),
        same=int((output == Output.SAME).sum()),
        differing=int(np.isin(output, DIFFERENT).sum()),
        tolerated=int((output == Output.TOLERATED).sum()),
        incomparable=int((output == Output.INCOMPARABLE).sum()),
        figures=figures,
    )


def _known(pairs: Pairs, metric: str, healthy: Bools) -> tuple[tuple[Floats, Floats], int]:
    """Values of a metric in the pairs in which both sides have it, and the number of these pairs.

    If no pair has both values, the result has all values of each side, and the number is 0.
    """
    known = healthy & pairs.known(metric)
    baseline, candidate = (side[known if known.any() else healthy & ~np.isnan(side)] for side in pairs.metrics[metric])
    return (baseline, candidate), int(known.sum())


def _figures(baseline: float, candidate: float, pairs: int) -> Figures:
    known = [None if math.isnan(each) else each for each in (baseline, candidate)]
    if known[0] is None or known[1] is None:
        return Figures(baseline=known[0], candidate=known[1], pairs=pairs)
    ratio = known[1] / known[0] if known[0] > 0 else (1.0 if known[1] == 0 else math.inf)
    return Figures(baseline=known[0], candidate=known[1], difference=known[1] - known[0], ratio=ratio, pairs=pairs)


# -- details of the verdict -------------------------------------------------------------------------------------------


def _notes(policy: Policy, evidence: Evidence, summary: SegmentSummary) -> Iterator[str]:
    no_material = int((evidence.pairs.output == Output.NO_MATERIAL).sum())
    if no_material:
        yield f"{no_material:,} pairs hold nothing of either answer: they are evidence of latency only"
    if any(evidence.num_empty):
        baseline, candidate = evidence.num_empty
        yield f"{baseline:,} answers of the baseline and {candidate:,} of the candidate are empty, which is a failure"
    for reason, count in evidence.incomparable.items():
        yield f"{count:,} pairs were not compared: {reason}"
    for side, fault, count in evidence.faults:
        yield f"{count:,} records of the {side} have {fault.value}; their stream events were left out"
    if summary.tolerated:
        most = f"by {evidence.max_drift:.4g} at most"
        yield f"{summary.tolerated:,} pairs of vectors differ within their tolerance, {most}"
    same, unlike = evidence.traces
    if unlike:
        yield f"{unlike:,} of {same + unlike:,} pairs have unlike traces of tokens"
    if policy.outputs == "ignore":
        yield "outputs were not compared, because the policy sets outputs to ignore"


def _transitions(evidence: Evidence) -> tuple[str, ...]:
    baseline, candidate = (", ".join(values) for values in evidence.names["model_version"])
    return (f"{baseline} -> {candidate}",) if baseline and candidate and baseline != candidate else ()


def _first_mismatch(evidence: Evidence) -> dict[str, Any] | None:
    places = np.flatnonzero(np.isin(evidence.pairs.output, DIFFERENT))
    if not len(places):
        return None
    request = evidence.keys(places[:1])[0]
    return {"request": request, **(first_difference(evidence.store, int(places[0])) or {})}


def _answers(policy: Policy, evidence: Evidence, second: Evidence | None) -> Answers:
    """Measurements by which the gate judges whether answers are the same.

    If both engines guarantee equal answers and the policy allows some mismatches, the mismatch rate is estimated. Other
    engines need a second baseline.
    """
    output, is_promised = evidence.pairs.output, all(evidence.is_deterministic)
    is_equality = signals.is_equality(policy, evidence)
    excess = None
    is_defined = not any(signals.undefined_sameness(policy, evidence))
    if not is_defined:
        is_promised = is_equality = False
    elif second is not None and not is_promised:
        excess = excess_mismatches(evidence.store, output, second.store, second.pairs.output)
    return Answers(
        is_estimated=is_promised and policy.max_mismatch_rate > 0 and not is_equality,
        is_bounded=is_defined and excess is None and not is_equality,
        excess=excess,
        logprob_gap=logprob_gaps(evidence.store, output),
    )


def _agreement(policy: Policy, evidence: Evidence, answers: Answers) -> Agreement | None:
    output = evidence.pairs.output
    places = np.flatnonzero(np.isin(output, COMPARED))
    if not len(places):
        return None
    differs = np.isin(output[places], DIFFERENT)
    gaps = np.zeros(0) if answers.logprob_gap is None else answers.logprob_gap
    known = gaps[~np.isnan(gaps)]
    is_diverging = differs.any() or policy.agreement_field
    parts = divergence(evidence.store) if is_diverging else DivergencePoints(0, None, None)
    return Agreement(
        field=policy.agreement_field,
        compared=len(places),
        agreed=int((~differs).sum()),
        rate=float(1 - differs.mean()),
        lower=agreement_lower(policy, evidence),
        diverging=parts.num_pairs,
        median_token=parts.median,
        earliest_token=parts.earliest,
        logprob_gap=float(known.mean()) if len(known) else None,
    )


def _kind_of_evidence(policy: Policy, evidence: Evidence) -> str:
    """Strongest kind of evidence that is available, and which side guarantees equal answers."""
    has_outputs = bool(np.isin(evidence.pairs.output, COMPARED).any()) and policy.outputs != "ignore"
    if not has_outputs:
        return "latency, errors and pressure of pairs; outputs were not compared"
    if policy.agreement_field:
        return f"agreement of answers in {policy.agreement_field}, then latency, errors and pressure of pairs"
    if signals.is_equality(policy, evidence):
        return (
            "equality: the weights are the same, and the answers of baseline and candidate are both independent of "
            "batch composition, so one differing token is proof"
        )
    promising = [side for side, promises in zip(SIDES, evidence.is_deterministic, strict=True) if promises]
    promise = f"; only the {promising[0]}'s answers are independent of batch composition" if len(promising) == 1 else ""
    return f"agreement of outputs, then latency, errors and pressure of pairs{promise}"
