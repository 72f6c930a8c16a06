"""Signals of a plain policy: figures of all pairs, or of a segment, that are beyond a bound, and evidence that is
lacking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Bools, Evidence, Floats
from lockstep.release.joining import MAX_EXAMPLES
from lockstep.release.outputs import COMPARED, DIFFERENT, Output
from lockstep.release.policy import Policy
from lockstep.release.series import ALL, Answers
from lockstep.release.verdict import Decision, SegmentSummary, Signal


@dataclass(frozen=True, slots=True)
class Rule:
    """A bound on a figure."""

    signal: str
    figure: str
    bound: str
    """The policy's field."""
    kind: Literal["ratio", "difference"]
    words: str
    unit: str = ""
    is_of_service: bool = False
    """Whether it is of the server and not of requests: no series of pairs tells it, so it holds in every mode."""


RULES: tuple[Rule, ...] = (
    Rule("latency", "latency_p95_ms", "max_latency_p95_ratio", "ratio", "p95 latency"),
    Rule("latency", "latency_p95_ms", "max_latency_p95_increase_ms", "difference", "p95 latency", " ms"),
    Rule("ttft", "ttft_p95_ms", "max_ttft_p95_ratio", "ratio", "p95 time to the first token"),
    Rule("ttft", "ttft_p95_ms", "max_ttft_p95_increase_ms", "difference", "p95 time to the first token", " ms"),
    Rule("decode", "decode_p95_ms", "max_decode_p95_ratio", "ratio", "p95 gap between tokens"),
    Rule("decode", "decode_p95_ms", "max_decode_p95_increase_ms", "difference", "p95 gap between tokens", " ms"),
    Rule(
        "kv-pressure",
        "kv_pressure_p95",
        "max_kv_pressure_p95_increase",
        "difference",
        "p95 KV pressure",
        is_of_service=True,
    ),
)
"""Regressions that hold a candidate back."""


def regressions(policy: Policy, summary: SegmentSummary) -> Iterator[Signal]:
    """Figures of some pairs that are beyond the bounds of the policy's mode."""
    for rule in RULES:
        bound = getattr(policy, rule.bound)
        figures = summary.figures[rule.figure]
        value = getattr(figures, rule.kind)
        is_asked = bound is not None and (rule.is_of_service or policy.mode == "threshold")
        if not is_asked or value is None or not value > bound:
            continue
        by = f"{value:.4g} times" if rule.kind == "ratio" else f"{value:.4g}{rule.unit} above"
        both = f"{figures.baseline:.4g} -> {figures.candidate:.4g}"
        yield Signal(
            name=rule.signal,
            response=Decision.HOLD,
            segment=summary.name,
            sentence=f"{rule.words} is {by} the baseline's ({both}); {bound:g} is borne",
            value=value,
            bound=bound,
        )


def errors(policy: Policy, evidence: Evidence, summary: SegmentSummary, mask: Bools) -> Iterator[Signal]:
    """An error rate of the candidate that is too far above the baseline's."""
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
            examples=_examples(evidence, failed),
        )


# -- answers ----------------------------------------------------------------------------------------------------------


def mismatches(policy: Policy, evidence: Evidence, answers: Answers, segment: str, mask: Bools) -> Iterator[Signal]:
    """Answers that are not the same, as facts: what is left to sequential evidence is not among them.

    In sequential mode a fact is what needs no statistics: answers may not differ at all, and either both engines
    promise equal ones or a rule says which vectors are equal.
    """
    if policy.outputs == "ignore":
        return
    output = evidence.pairs.output
    compared = int((mask & np.isin(output, COMPARED)).sum())
    differing = np.flatnonzero(mask & (output == Output.DIFFERS))
    if policy.agreement_field:
        borne = 1 - policy.min_agreement
        if policy.mode == "threshold" or not borne:
            words = f"disagree in {policy.agreement_field}"
            yield from _unlike(evidence, "agreement", differing, compared, borne, segment, words)
        return
    borne = 0.0 if is_equality(policy, evidence) else policy.max_mismatch_rate
    if policy.mode == "threshold" and answers.excess is not None:
        yield from _beyond_second(policy, evidence, answers.excess, segment, mask)
    elif policy.mode == "threshold" or (all(evidence.is_deterministic) and not answers.is_estimated):
        yield from _unlike(evidence, "output-mismatch", differing, compared, borne, segment, "differ")
    elif len(differing) and not answers.is_estimated and answers.excess is None:
        yield Signal(
            name="output-mismatch",
            response=Decision.HOLD,
            segment=segment,
            sentence=f"{len(differing):,} of {compared:,} compared answers differ, and the engines do not promise "
            "equal ones: only a second baseline (--aa) can tell a change from noise",
            value=len(differing) / compared,
            bound=borne,
            examples=_examples(evidence, differing),
        )
    drifted = np.flatnonzero(mask & (output == Output.DRIFTED))
    words = "are vectors that differ beyond their tolerance"
    yield from _unlike(evidence, "numeric-drift", drifted, compared, borne, segment, words)


def is_equality(policy: Policy, evidence: Evidence) -> bool:
    """True if any differing answer is proof: the same weights, on engines that both promise equal answers."""
    weights, precision = evidence.names["artifact"], evidence.names["precision"]
    is_same = weights[0] == weights[1] != () and precision[0] == precision[1]
    return all(evidence.is_deterministic) and is_same and policy.outputs in (None, "exact")


def _unlike(
    evidence: Evidence, name: str, places: NDArray[np.intp], compared: int, borne: float, segment: str, words: str
) -> Iterator[Signal]:
    if compared and len(places) / compared > borne + 1e-12:
        yield Signal(
            name=name,
            response=Decision.ROLLBACK,
            segment=segment,
            sentence=f"{len(places):,} of {compared:,} compared answers {words}",
            value=len(places) / compared,
            bound=borne,
            examples=_examples(evidence, places),
        )


def _beyond_second(policy: Policy, evidence: Evidence, excess: Floats, segment: str, mask: Bools) -> Iterator[Signal]:
    """More mismatches than a second baseline has on the same requests."""
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
            examples=_examples(evidence, places[excess[places] > 0]),
        )


def logprob_gap(policy: Policy, evidence: Evidence, answers: Answers, segment: str, mask: Bools) -> Iterator[Signal]:
    """Log-probabilities of the same tokens that are too far apart on average."""
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
            f"{policy.max_logprob_gap:g} are borne",
            value=float(gaps.mean()),
            bound=policy.max_logprob_gap,
            examples=_examples(evidence, np.sort(places[widest])),
        )


def _examples(evidence: Evidence, places: NDArray[np.intp]) -> tuple[str, ...]:
    return tuple(evidence.keys(places[:MAX_EXAMPLES]))


# -- evidence that is not there ---------------------------------------------------------------------------------------


def unsaid(policy: Policy, evidence: Evidence) -> Iterator[Signal]:
    """A policy that does not say what sameness is where it has to."""
    unlike = []
    for name, words in (("artifact", "the weights"), ("precision", "the precisions")):
        baseline, candidate = evidence.names[name]
        if baseline and candidate and baseline != candidate:
            unlike.append(words if name == "artifact" else f"{words} ({', '.join(baseline)} -> {', '.join(candidate)})")
    if policy.outputs is None and unlike:
        yield Signal(
            name="outputs-policy",
            response=Decision.HOLD,
            segment=ALL,
            sentence=f"{' and '.join(unlike)} of the sides differ, so the policy has to say what sameness of outputs "
            "means: exact, numeric, agreement(FIELD) or ignore",
        )


def lacking(
    policy: Policy, evidence: Evidence, summary: SegmentSummary, coverage: Mapping[str, float | None]
) -> Iterator[Signal]:
    """Evidence that there is too little of."""
    if summary.pairs < policy.min_pairs:
        yield Signal(
            name="too-few-pairs",
            response=Decision.HOLD,
            segment=ALL,
            sentence=f"{summary.pairs:,} matched pairs, and the policy wants {policy.min_pairs:,}",
            value=summary.pairs,
            bound=policy.min_pairs,
        )
    if policy.outputs != "ignore" and summary.healthy and not np.isin(evidence.pairs.output, COMPARED).any():
        yield Signal(
            name="no-output-evidence",
            response=Decision.HOLD,
            segment=ALL,
            sentence="no pair of answers could be compared; such evidence may promote only with outputs: ignore",
        )
    for name, rate, words in (
        ("provenance", "candidate_routing_provenance_rate", "of the candidate's answers have a route and a scheduler"),
        ("streaming", "candidate_streaming_trace_rate", "of the candidate's answers have times of tokens"),
        ("join", "join_rate", "of the records have a partner on the other side"),
        ("comparable", "comparable_rate", "of the healthy pairs have comparable answers"),
    ):
        bound, value = getattr(policy, f"min_{rate}"), coverage[rate]
        if bound and (value is None or value < bound):
            yield Signal(
                name=f"missing-{name}",
                response=Decision.HOLD,
                segment=ALL,
                sentence=f"{100 * (value or 0.0):.4g} % {words}, and the policy wants {100 * bound:.4g} %",
                value=value,
                bound=bound,
            )
