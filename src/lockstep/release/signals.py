"""Signals of a policy: reports figures of all pairs, or of a segment, that are beyond a bound.

Signals about insufficient evidence are in `lockstep.release.coverage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import OUTPUT_TOKENS, Bools, Evidence, Floats
from lockstep.release.joining import MAX_EXAMPLES
from lockstep.release.observation import Metric
from lockstep.release.outputs import COMPARED, DIFFERENT, Output
from lockstep.release.policy import Policy
from lockstep.release.series import METRIC_OF, RATIOS, Answers
from lockstep.release.verdict import Decision, SegmentSummary, Signal, hold


class Rule(NamedTuple):
    """Bound on the 95th percentile of a metric."""

    metric: Metric
    kind: str
    """Figure that is bounded: ``ratio`` or ``difference``."""
    bound: str
    """Field of the policy that has the bound."""


RULES: tuple[Rule, ...] = (
    *(
        Rule(metric, kind, f"max_{signal}_p95_{field}")
        for signal, metric in RATIOS.items()
        for kind, field in (("ratio", "ratio"), ("difference", "increase_ms"))
    ),
    Rule(METRIC_OF["kv-pressure"], "difference", "max_kv_pressure_p95_increase"),
)
"""Bounds that hold a candidate if it exceeds them."""


def regressions(policy: Policy, evidence: Evidence, summary: SegmentSummary, mask: Bools) -> Iterator[Signal]:
    """Signals for figures of some pairs that are beyond the bounds of the policy's mode."""
    for metric, kind, field in RULES:
        bound = getattr(policy, field)
        figures = summary.figures[metric.figure]
        value = getattr(figures, kind)
        is_followed = policy.mode == "sequential" and metric.signal in RATIOS  # a series replaces the rule
        if bound is None or is_followed or value is None or not figures.pairs or not value > bound:
            continue
        unit = f" {metric.unit}" if metric.unit else ""
        by = f"{value:.4g} times" if kind == "ratio" else f"{value:.4g}{unit} above"
        both = f"{figures.baseline:.4g} -> {figures.candidate:.4g}"
        sentence = f"p95 {metric.words} is {by} the baseline's ({both}); the limit is {bound:g}"
        shown = slowest(evidence, metric, mask)
        yield hold(metric.signal, sentence, value, bound, segment=summary.name, examples=shown)


def with_examples(evidence: Evidence, signal: Signal) -> Signal:
    """Signal of a series, with example requests added."""
    pairs = evidence.pairs
    metric = METRIC_OF.get(signal.name)
    mask = evidence.mask_of(signal.segment)
    if metric is not None:
        return msgspec.structs.replace(signal, examples=slowest(evidence, metric, mask))
    affected = {
        "errors": pairs.ok[0] & ~pairs.ok[1],
        "output-mismatch": np.isin(pairs.output, DIFFERENT),
        "agreement": np.isin(pairs.output, DIFFERENT),
    }.get(signal.name)
    if affected is None:
        return signal
    return msgspec.structs.replace(signal, examples=examples(evidence, np.flatnonzero(mask & affected)))


def slowest(evidence: Evidence, metric: Metric, mask: Bools) -> tuple[str, ...]:
    """Ids of the `MAX_EXAMPLES` requests whose metric grew most from the baseline to the candidate."""
    baseline, candidate = evidence.pairs.metrics[metric.name]
    return _largest(evidence, candidate - baseline, mask & evidence.pairs.healthy)


def _largest(evidence: Evidence, numbers: Floats, mask: Bools) -> tuple[str, ...]:
    """Ids of the `MAX_EXAMPLES` requests with the largest numbers above 0."""
    places = np.flatnonzero(mask & (numbers > 0))
    return examples(evidence, places[np.argsort(-numbers[places], kind="stable")][:MAX_EXAMPLES])


def output_length(policy: Policy, evidence: Evidence, summary: SegmentSummary, mask: Bools) -> Iterator[Signal]:
    """Signal if answers are shorter or longer on average than the policy allows."""
    figures, bound = summary.figures["output_tokens_mean"], policy.max_output_length_change
    if bound is None or figures.ratio is None or not figures.pairs or not abs(figures.ratio - 1) > bound:
        return
    baseline, candidate = evidence.pairs.metrics[OUTPUT_TOKENS]
    yield hold(
        "output-length",
        f"answers have {figures.ratio:.3g} times the tokens of the baseline's on average "
        f"({figures.baseline:.4g} -> {figures.candidate:.4g}); a change of {100 * bound:g} % is allowed",
        figures.ratio - 1,
        bound,
        segment=summary.name,
        examples=_largest(evidence, np.abs(candidate - baseline), mask & evidence.pairs.healthy),
    )


def errors(policy: Policy, evidence: Evidence, summary: SegmentSummary, mask: Bools) -> Iterator[Signal]:
    """Signal if the candidate's error rate is too far above the baseline's."""
    increase = summary.figures["error_rate"].difference
    if increase is not None and increase > policy.max_error_rate_increase:
        failed = np.flatnonzero(mask & evidence.pairs.ok[0] & ~evidence.pairs.ok[1])
        yield Signal(
            name="errors",
            response=Decision.ROLLBACK,
            segment=summary.name,
            sentence=f"the candidate's error rate is {increase:.4g} points above the baseline's",
            value=increase,
            bound=policy.max_error_rate_increase,
            examples=examples(evidence, failed),
        )


# -- answers ----------------------------------------------------------------------------------------------------------


def mismatches(policy: Policy, evidence: Evidence, answers: Answers, segment: str, mask: Bools) -> Iterator[Signal]:
    """Signals for answers that differ, except differences that a series judges.

    In sequential mode a difference needs no statistics if the policy allows no difference, and either both engines
    guarantee equal answers or a rule defines which vectors are equal.
    """
    if policy.outputs == "ignore":
        return
    output = evidence.pairs.output
    compared = int((mask & np.isin(output, COMPARED)).sum())
    differing = np.flatnonzero(mask & (output == Output.DIFFERS))
    if policy.agreement_field:
        allowed = 1 - policy.min_agreement
        if policy.mode == "threshold" or not allowed:
            words = f"disagree in {policy.agreement_field}"
            yield from _unlike(evidence, "agreement", differing, compared, allowed, segment, words)
        return
    allowed = 0.0 if is_equality(policy, evidence) else policy.max_mismatch_rate
    if policy.mode == "threshold" and answers.excess is not None:
        yield from _beyond_second(policy, evidence, answers.excess, segment, mask)
    elif policy.mode == "threshold" or (all(evidence.is_deterministic) and not answers.is_estimated):
        words = "differ"
        if not all(evidence.is_deterministic):
            words += (
                ", and the engines do not guarantee equal ones: a second baseline (--aa) separates changes from noise"
            )
        yield from _unlike(evidence, "output-mismatch", differing, compared, allowed, segment, words)
    elif len(differing) and not answers.is_estimated and answers.excess is None:
        yield hold(
            "output-mismatch",
            f"{len(differing):,} of {compared:,} compared answers differ, and the engines do not "
            "guarantee equal ones: only a second baseline (--aa) shows how much is noise",
            len(differing) / compared,
            allowed,
            segment=segment,
            examples=examples(evidence, differing),
        )
    drifted = np.flatnonzero(mask & (output == Output.DRIFTED))
    words = "are vectors that differ beyond their tolerance"
    yield from _unlike(evidence, "numeric-drift", drifted, compared, allowed, segment, words)


def is_equality(policy: Policy, evidence: Evidence) -> bool:
    """True if a single differing answer is proof of a change: equal weights and precision, and both engines guarantee
    equal answers."""
    weights, precision = evidence.names["artifact"], evidence.names["precision"]
    is_same = weights[0] == weights[1] != () and precision[0] == precision[1]
    return all(evidence.is_deterministic) and is_same and policy.outputs in (None, "exact")


def _unlike(
    evidence: Evidence, name: str, places: NDArray[np.intp], compared: int, allowed: float, segment: str, words: str
) -> Iterator[Signal]:
    if compared and len(places) / compared > allowed + 1e-12:
        yield Signal(
            name=name,
            response=Decision.ROLLBACK,
            segment=segment,
            sentence=f"{len(places):,} of {compared:,} compared answers {words}",
            value=len(places) / compared,
            bound=allowed,
            examples=examples(evidence, places),
        )


def _beyond_second(policy: Policy, evidence: Evidence, excess: Floats, segment: str, mask: Bools) -> Iterator[Signal]:
    """Signal if the candidate has more mismatches than a second baseline on the same requests."""
    places = np.flatnonzero(mask & ~np.isnan(excess))
    if len(places) and excess[places].mean() > policy.max_mismatch_rate:
        mine = int(np.isin(evidence.pairs.output[places], DIFFERENT).sum())
        theirs = mine - int(excess[places].sum())
        yield Signal(
            name="output-mismatch",
            response=Decision.ROLLBACK,
            segment=segment,
            sentence=f"{mine:,} of {len(places):,} compared answers differ, and {theirs:,} of a second baseline's",
            value=float(excess[places].mean()),
            bound=policy.max_mismatch_rate,
            examples=examples(evidence, places[excess[places] > 0]),
        )


def logprob_gap(policy: Policy, evidence: Evidence, answers: Answers, segment: str, mask: Bools) -> Iterator[Signal]:
    """Signal if the log-probabilities of the same tokens differ too much on average."""
    if answers.logprob_gap is None or policy.max_logprob_gap is None:
        return
    places = np.flatnonzero(mask & ~np.isnan(answers.logprob_gap))
    gaps = answers.logprob_gap[places]
    if len(places) and gaps.mean() > policy.max_logprob_gap:
        widest = np.argsort(-gaps, kind="stable")[:MAX_EXAMPLES]
        yield Signal(
            name="logprob-gap",
            response=Decision.ROLLBACK,
            segment=segment,
            sentence=f"log-probabilities of the same tokens differ by {gaps.mean():.4g} nats on average; "
            f"the limit is {policy.max_logprob_gap:g}",
            value=float(gaps.mean()),
            bound=policy.max_logprob_gap,
            examples=examples(evidence, np.sort(places[widest])),
        )


def examples(evidence: Evidence, places: NDArray[np.intp]) -> tuple[str, ...]:
    """Ids of the first `MAX_EXAMPLES` of these pairs, in the given order."""
    return tuple(evidence.keys(places[:MAX_EXAMPLES]))


def undefined_sameness(policy: Policy, evidence: Evidence) -> Iterator[Signal]:
    """Signal if the policy does not define sameness of outputs although the weights or precisions of the sides
    differ."""
    unlike = []
    for name, words in (("artifact", "the weights"), ("precision", "the precisions")):
        baseline, candidate = evidence.names[name]
        if baseline and candidate and baseline != candidate:
            unlike.append(words if name == "artifact" else f"{words} ({', '.join(baseline)} -> {', '.join(candidate)})")
    if policy.outputs is None and unlike:
        yield hold(
            "outputs-policy",
            f"{' and '.join(unlike)} of the sides differ, so the policy must set outputs to exact, numeric, "
            "agreement(FIELD) or ignore",
        )
