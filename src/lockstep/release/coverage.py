"""Coverage of the evidence: measures its completeness and reports signals if it is insufficient for a promotion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.release.agreement import NO_FIELD
from lockstep.release.evidence import Bools, Evidence
from lockstep.release.observation import METRICS, SIDES, Metric
from lockstep.release.outputs import COMPARED, DIFFERENT
from lockstep.release.policy import Policy
from lockstep.release.sequential import BLOCKS_PER_BURST
from lockstep.release.series import RATIOS, has_ratio
from lockstep.release.signals import RULES, examples
from lockstep.release.statistics import bet_upper
from lockstep.release.verdict import SegmentSummary, Signal, hold


def coverage_of(evidence: Evidence) -> dict[str, float | None]:
    """Rates from 0 to 1, by name: joined records, comparable pairs, and answers with output, route and token times."""
    pairs = evidence.pairs

    def rate(number: float, of: float) -> float | None:
        return float(number) / of if of else None

    healthy = int(pairs.healthy.sum())
    compared = int(np.isin(pairs.output, COMPARED).sum())
    num_answers, num_bare = (int(pairs.ok[side].sum()) for side in (0, 1)), map(len, evidence.without_output)
    joining = evidence.joining
    found: dict[str, float | None] = {
        "join_rate": rate(joining.pairs, joining.num_tried),
        "comparable_rate": rate(compared, healthy - evidence.incomparable.get(NO_FIELD, 0)),
        "output_rate": rate((total := sum(num_answers)) - sum(num_bare), total),
    }
    for number, side in enumerate(SIDES):
        answered = pairs.ok[number]  # a failure has no token times, and is counted as a failure elsewhere
        num = int(answered.sum())
        found[f"{side}_routing_provenance_rate"] = rate(int((pairs.routed[number] & answered).sum()), num)
        found[f"{side}_streaming_trace_rate"] = rate(int((pairs.streamed[number] & answered).sum()), num)
    return dict(sorted(found.items()))


def insufficient(
    policy: Policy, evidence: Evidence, summary: SegmentSummary, coverage: Mapping[str, float | None]
) -> Iterator[Signal]:
    """Signals for evidence that is insufficient for a promotion."""
    if summary.pairs < policy.min_pairs or not summary.healthy:
        words = f"{summary.pairs:,} matched pairs, and the policy needs {policy.min_pairs:,}"
        if summary.pairs >= policy.min_pairs:
            words = f"none of the {summary.pairs:,} matched pairs was answered by both sides"
        yield hold("too-few-pairs", words, summary.pairs, policy.min_pairs)
    yield from _few_metrics(policy, evidence)
    if policy.outputs != "ignore" and summary.healthy:
        yield from _few_outputs(policy, evidence, summary, coverage)
    for name, rate, words in (
        ("provenance", "candidate_routing_provenance_rate", "of the candidate's answers have a route and a scheduler"),
        ("streaming", "candidate_streaming_trace_rate", "of the candidate's answers have times of tokens"),
        ("join", "join_rate", "of the records have a partner on the other side"),
    ):
        yield from _low(policy, coverage, name, rate, words)


def _few_outputs(
    policy: Policy, evidence: Evidence, summary: SegmentSummary, coverage: Mapping[str, float | None]
) -> Iterator[Signal]:
    """Signals if too few answers contain output, or too few could be compared."""
    num = int(np.isin(evidence.pairs.output, COMPARED).sum())
    wanted = min(policy.min_pairs, summary.healthy)
    if num < wanted:
        words = "no pair of answers could be compared; such evidence may promote only with outputs: ignore"
        if num:
            words = (
                f"{num:,} of {summary.healthy:,} pairs of answers could be compared, and the policy needs {wanted:,}"
            )
        yield hold("no-output-evidence", words, num, wanted)
    if not coverage["output_rate"]:
        return
    for found in _low(policy, coverage, "output", "output_rate", "of the successful answers carry output material"):
        places = np.union1d(*evidence.without_output)
        yield msgspec.structs.replace(found, examples=examples(evidence, places))
    yield from _low(policy, coverage, "comparable", "comparable_rate", "of the healthy pairs have comparable answers")
    if policy.min_agreement_lower is not None:
        lower = agreement_lower(policy, evidence)
        if lower < policy.min_agreement_lower:
            words = f"with confidence {1 - policy.alpha:g} only {100 * lower:.4g} % of the answers agree"
            sentence = f"{words} ({num:,} were compared), and the policy needs {100 * policy.min_agreement_lower:.4g} %"
            yield hold("uncertain-agreement", sentence, lower, policy.min_agreement_lower)


def agreement_lower(policy: Policy, evidence: Evidence) -> float:
    """Lower confidence bound of the fraction of compared answers that agree, at alpha, valid at every look."""
    output = evidence.pairs.output
    differs = np.isin(output[np.isin(output, COMPARED)], DIFFERENT)
    return 1 - bet_upper(differs.astype(float), policy.alpha, BLOCKS_PER_BURST * policy.burst_pairs)


class Known(NamedTuple):
    """Pairs in which a metric is known."""

    metric: Metric
    baseline: Bools
    """Pairs in which the baseline has a value."""
    candidate: Bools
    """Pairs in which the candidate has a value."""
    rate: float
    """Fraction of the pairs with at least one value that have both values; 1 if no pair has a value."""
    is_lacking: bool
    """True if the rate is below the policy's minimum."""

    @property
    def both(self) -> Bools:
        """Pairs in which both sides have a value."""
        return self.baseline & self.candidate


def known_metrics(policy: Policy, evidence: Evidence) -> Iterator[Known]:
    """Known pairs of each metric that the policy can bound, among the pairs that both sides answered."""
    pairs = evidence.pairs
    bounded = {rule.metric for rule in RULES if getattr(policy, rule.bound) is not None}
    for metric in (each for each in METRICS if each.signal):
        baseline, candidate = (pairs.healthy & (side > metric.least) for side in pairs.metrics[metric.name])
        num_one, num_both = int((baseline | candidate).sum()), int((baseline & candidate).sum())
        is_judged = policy.mode == "sequential" or metric in bounded
        rate = num_both / num_one if num_one else 1.0
        is_lacking = is_judged and bool(baseline.any()) and rate < policy.min_metric_rate
        yield Known(metric, baseline, candidate, rate, is_lacking)


def _few_metrics(policy: Policy, evidence: Evidence) -> Iterator[Signal]:
    """One signal for metrics that only one side has in too many pairs, and for missing required series."""
    pairs = evidence.pairs
    few = [each for each in known_metrics(policy, evidence) if each.is_lacking]
    words = [
        f"{each.metric.words} is known in {int(each.candidate.sum()):,} of the candidate's answers and "
        f"{int(each.baseline.sum()):,} of the baseline's; {int(each.both.sum()):,} pairs have both"
        for each in few
    ]
    if policy.mode == "sequential" and pairs.healthy.any():
        without = [name for name in policy.required_series if not has_ratio(pairs, name).any()]
        named = ", ".join(RATIOS[name].words for name in without)
        words += [f"no pair has {named} on both sides, and the policy requires it (required_series)"] if without else []
    if words:
        lowest = min((each.rate for each in few), default=0.0)
        only = np.logical_or.reduce([each.baseline ^ each.candidate for each in few] or [np.zeros(len(pairs), bool)])
        found = hold("missing-metric", "; ".join(words), lowest, policy.min_metric_rate)
        yield msgspec.structs.replace(found, examples=examples(evidence, np.flatnonzero(only)))


def _low(policy: Policy, coverage: Mapping[str, float | None], name: str, rate: str, words: str) -> Iterator[Signal]:
    """Signal if a rate of the coverage is below the policy's minimum."""
    bound, value = getattr(policy, f"min_{rate}"), coverage[rate]
    if bound and (value is None or value < bound):
        sentence = f"{100 * (value or 0.0):.4g} % {words}, and the policy needs {100 * bound:.4g} %"
        yield hold(f"missing-{name}", sentence, value, bound)
