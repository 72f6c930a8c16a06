"""Each signal of the threshold policy is given beyond its bound and not at it, and the strongest decides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.release.verdict import Decision
from tests.release.judging import judged, named, rows, signal, states, with_tokens


def test_equal_sides_are_promoted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(20), with_tokens(20))
    assert verdict.decision is Decision.PROMOTE
    assert not verdict.signals
    assert not verdict.triage
    assert verdict.reason == "everything is within policy"
    assert verdict.guarantee.startswith("none")


# -- answers ----------------------------------------------------------------------------------------------------------


def other_tokens(*numbers: int) -> Any:
    return lambda number: [number, 1, 9 if number in numbers else 2]


def test_a_differing_answer_rolls_back_and_the_first_one_is_shown(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(30), with_tokens(30, token_ids=other_tokens(12, 7)))
    found = signal(verdict, "output-mismatch")
    assert (verdict.decision, found.value, found.bound) == (Decision.ROLLBACK, 2 / 30, 0.0)
    assert found.examples == ("r7", "r12")
    assert verdict.first_mismatch is not None
    assert verdict.first_mismatch["request"] == "r7"
    assert (verdict.first_mismatch["token_index"], verdict.first_mismatch["candidate_token"]) == (2, 9)


@pytest.mark.parametrize(("rate", "decision"), [(0.1, Decision.PROMOTE), (0.099, Decision.ROLLBACK)])
def test_a_value_at_the_bound_gives_no_signal(tmp_path: Path, rate: float, decision: Decision) -> None:
    verdict = judged(
        tmp_path, with_tokens(30), with_tokens(30, token_ids=other_tokens(1, 2, 3)), max_mismatch_rate=rate
    )
    assert verdict.decision is decision


def test_vectors_within_their_rule_are_tolerated_and_beyond_it_roll_back(tmp_path: Path) -> None:
    baseline = rows(20, vector=[1.0, 2.0])
    near = rows(20, vector=lambda number: [1.0, 2.0 + (0.01 if number < 4 else 0.0)])
    rules: Any = {"outputs": "numeric", "numeric_tolerances": [{"absolute": 0.02}]}
    verdict = judged(tmp_path, baseline, near, **rules)
    assert (verdict.decision, verdict.summary.tolerated) == (Decision.PROMOTE, 4)
    far = rows(20, vector=lambda number: [1.0, 2.0 + (0.03 if number == 5 else 0.0)])
    verdict = judged(tmp_path, baseline, far, **rules)
    assert named(verdict) == {"numeric-drift": "rollback"}
    assert signal(verdict, "numeric-drift").examples == ("r5",)


@pytest.mark.parametrize("field", ["artifact", "precision"])
def test_different_weights_need_an_outputs_policy(tmp_path: Path, field: str) -> None:
    """Equality of answers is then not required, so differing answers do not roll back."""
    sides: Any = with_tokens(20, **{field: "a"}), with_tokens(20, **{field: "b"}, token_ids=other_tokens(3))
    unsaid = judged(tmp_path, *sides)
    assert named(unsaid) == {"outputs-policy": "hold"}
    assert ("(a -> b)" in unsaid.reason) == (field == "precision")
    assert named(judged(tmp_path, *sides, outputs="exact")) == {"output-mismatch": "rollback"}
    assert judged(tmp_path, *sides, outputs="ignore").decision is Decision.PROMOTE


def test_another_model_version_alone_has_no_effect(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(20, model_version="1"), with_tokens(20, model_version="2"))
    assert verdict.decision is Decision.PROMOTE
    assert verdict.transitions == ("1 -> 2",)


def test_without_comparable_answers_promotion_requires_ignoring_outputs(tmp_path: Path) -> None:
    verdict = judged(tmp_path, rows(20), rows(20))
    assert named(verdict) == {"no-output-evidence": "hold"}
    assert verdict.evidence == "latency, errors and pressure of pairs; outputs were not compared"
    assert judged(tmp_path, rows(20), rows(20), outputs="ignore").decision is Decision.PROMOTE


def test_answers_agree_in_a_field_in_any_formatting(tmp_path: Path) -> None:
    baseline = rows(40, text='{"intent": "billing", "why": "a"}', artifact="a")
    candidate = rows(
        40, artifact="b", text=lambda n: f'{{"why": "{n}", "intent": "{"legal" if n == 3 else "billing"}"}}'
    )
    rules: Any = {"outputs": "agreement(intent)"}
    verdict = judged(tmp_path, baseline, candidate, **rules, min_agreement=0.975)
    assert verdict.decision is Decision.PROMOTE
    assert verdict.agreement is not None
    assert (verdict.agreement.agreed, verdict.agreement.compared, verdict.agreement.field) == (39, 40, "intent")
    assert verdict.agreement.lower < 0.975
    verdict = judged(tmp_path, baseline, candidate, **rules, min_agreement=0.98)
    assert named(verdict) == {"agreement": "rollback"}
    assert signal(verdict, "agreement").examples == ("r3",)


def test_an_answer_that_lost_the_field_disagrees_and_two_without_it_are_no_evidence(tmp_path: Path) -> None:
    def text(side: str) -> Any:
        return lambda number: "no" if number < 5 or (number == 9 and side == "candidate") else '{"x": 1}'

    verdict = judged(
        tmp_path, rows(30, text=text("baseline")), rows(30, text=text("candidate")), outputs="agreement(x)"
    )
    assert (verdict.summary.incomparable, verdict.summary.differing) == (5, 1)
    assert "5 pairs were not compared: no such field in either" in verdict.notes


def test_log_probabilities_of_equal_tokens_are_bounded(tmp_path: Path) -> None:
    """After the first differing token they belong to other texts, and do not count."""
    baseline = with_tokens(20, logprobs=[-0.5, -0.5, -0.5])
    candidate = with_tokens(20, token_ids=other_tokens(*range(20)), logprobs=[-0.5, -0.75, -9.0], artifact="b")
    rules: Any = {"max_mismatch_rate": 1.0}
    verdict = judged(tmp_path, baseline, candidate, **rules, max_logprob_gap=0.125)
    assert verdict.decision is Decision.PROMOTE
    assert verdict.agreement is not None
    assert verdict.agreement.logprob_gap == pytest.approx(0.125)
    assert (verdict.agreement.median_token, verdict.agreement.diverging) == (2, 20)
    verdict = judged(tmp_path, baseline, candidate, **rules, max_logprob_gap=0.12)
    assert named(verdict) == {"logprob-gap": "rollback"}


def test_the_evidence_names_the_side_with_deterministic_answers(tmp_path: Path) -> None:
    promise: Any = {"artifact": "a", "deterministic": True}
    both = judged(tmp_path, with_tokens(20, **promise), with_tokens(20, **promise))
    assert both.evidence.startswith("equality")
    other = judged(tmp_path, with_tokens(20, **promise), with_tokens(20, **promise, precision="int8"), outputs="exact")
    assert not other.evidence.startswith("equality"), "of the same weights in another precision answers differ"
    one = judged(tmp_path, with_tokens(20, **promise), with_tokens(20, artifact="a"))
    assert one.evidence.endswith("only the baseline's answers are independent of batch composition")


def test_no_mismatch_is_accepted_for_equal_weights_on_deterministic_engines(tmp_path: Path) -> None:
    promise: Any = {"artifact": "a", "deterministic": True}
    candidate = with_tokens(20, token_ids=other_tokens(4), **promise)
    verdict = judged(tmp_path, with_tokens(20, **promise), candidate, max_mismatch_rate=0.5)
    assert named(verdict) == {"output-mismatch": "rollback"}


def test_a_second_baseline_removes_noise(tmp_path: Path) -> None:
    candidate, second = with_tokens(40, token_ids=other_tokens(3, 4)), with_tokens(40, token_ids=other_tokens(5, 6, 7))
    assert judged(tmp_path, with_tokens(40), candidate, second).decision is Decision.PROMOTE
    worse = with_tokens(40, token_ids=other_tokens(1, 2, 3, 4))
    verdict = judged(tmp_path, with_tokens(40), worse, second)
    assert signal(verdict, "output-mismatch").sentence == (
        "4 of 40 compared answers differ, and 3 of a second baseline's"
    )
    assert (verdict.inputs[-1]["side"], verdict.inputs[-1]["records"]) == ("second baseline", 40)


def test_a_second_baseline_that_is_slower_than_the_first_invalidates_the_comparison(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(40), with_tokens(40), with_tokens(40, latency_ms=120.0))
    assert named(verdict) == {"unsound-baseline": "hold"}


# -- errors, latency, pressure ----------------------------------------------------------------------------------------


def failing(*numbers: int) -> Any:
    return lambda number: number not in numbers


def test_failures_of_one_side_are_errors_and_those_of_both_sides_are_not(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(20, ok=failing(1, 2)), with_tokens(20, ok=failing(1, 3, 4)))
    found = signal(verdict, "errors")
    assert (found.value, found.examples) == (5.0, ("r3", "r4"))
    assert (verdict.summary.healthy, verdict.summary.same) == (16, 16)
    assert judged(tmp_path, with_tokens(20, ok=failing(1)), with_tokens(20, ok=failing(1))).decision is Decision.PROMOTE
    assert judged(tmp_path, with_tokens(20, ok=failing(1)), with_tokens(20)).decision is Decision.PROMOTE


def test_an_increase_of_errors_within_the_limit_is_accepted(tmp_path: Path) -> None:
    sides: Any = with_tokens(20), with_tokens(20, ok=failing(1))
    assert judged(tmp_path, *sides, max_error_rate_increase=5.0).decision is Decision.PROMOTE
    assert judged(tmp_path, *sides, max_error_rate_increase=4.9).decision is Decision.ROLLBACK


@pytest.mark.parametrize(
    ("name", "field", "baseline", "candidate", "bound"),
    [
        ("latency", "latency_ms", 100.0, 120.0, {"max_latency_p95_ratio": 1.2}),
        ("latency", "latency_ms", 100.0, 120.0, {"max_latency_p95_ratio": None, "max_latency_p95_increase_ms": 20}),
        ("ttft", "ttft_ms", 10.0, 12.0, {"max_ttft_p95_ratio": 1.2}),
        ("ttft", "ttft_ms", 10.0, 12.0, {"max_ttft_p95_ratio": None, "max_ttft_p95_increase_ms": 2}),
        ("decode", "token_latencies_ms", [1.0, 10.0], [1.0, 12.0], {"max_decode_p95_ratio": 1.2}),
        (
            "decode",
            "token_latencies_ms",
            [1.0, 10.0],
            [1.0, 12.0],
            {"max_decode_p95_ratio": None, "max_decode_p95_increase_ms": 2},
        ),
        ("kv-pressure", "kv_used", 50.0, 75.0, {"max_kv_pressure_p95_increase": 0.25}),
    ],
)
def test_a_regression_beyond_its_bound_holds(
    tmp_path: Path, name: str, field: str, baseline: Any, candidate: Any, bound: dict[str, Any]
) -> None:
    first, second = (with_tokens(20, kv_total=100.0, **{field: value}) for value in (baseline, candidate))
    assert judged(tmp_path, first, second, policy=bound).decision is Decision.PROMOTE
    narrower = {key: value and value * 0.99 for key, value in bound.items()}
    verdict = judged(tmp_path, first, second, policy=narrower)
    assert named(verdict) == {name: "hold"}
    assert verdict.triage[0].signal == name


def test_only_the_tail_affects_a_p95(tmp_path: Path) -> None:
    slow_once = with_tokens(20, latency_ms=lambda number: 900.0 if number == 3 else 100.0)
    assert judged(tmp_path, with_tokens(20), slow_once).decision is Decision.PROMOTE
    slow_twice = with_tokens(20, latency_ms=lambda number: 900.0 if number in (3, 5) else 100.0)
    assert named(judged(tmp_path, with_tokens(20), slow_twice)) == {"latency": "hold"}


# -- evidence that is lacking -----------------------------------------------------------------------------------------


def test_too_few_pairs_hold(tmp_path: Path) -> None:
    assert named(judged(tmp_path, with_tokens(19), with_tokens(19))) == {"too-few-pairs": "hold"}
    assert judged(tmp_path, with_tokens(19), with_tokens(19), min_pairs=19).decision is Decision.PROMOTE


def test_ids_that_never_match_hold(tmp_path: Path) -> None:
    other = [{**row, "request_id": f"x{row['request_id']}"} for row in with_tokens(20)]
    verdict = judged(tmp_path, with_tokens(20), other)
    assert named(verdict) == {"missing-join": "hold", "too-few-pairs": "hold"}
    assert {each.reason.value for each in verdict.joining.unjoined} == {"no-partner"}


@pytest.mark.parametrize(
    ("rate", "name", "fields"),
    [
        ("candidate_routing_provenance_rate", "missing-provenance", {"route_id": "r", "scheduler": "s"}),
        ("candidate_streaming_trace_rate", "missing-streaming", {"token_latencies_ms": [1.0]}),
    ],
)
def test_coverage_counts_only_if_required(tmp_path: Path, rate: str, name: str, fields: dict[str, Any]) -> None:
    half: Any = {key: (lambda number, value=value: value if number % 2 else None) for key, value in fields.items()}
    whole, lacking = with_tokens(20), with_tokens(20, **half)
    verdict = judged(tmp_path, whole, lacking)
    assert verdict.decision is Decision.PROMOTE
    assert verdict.coverage[rate] == 0.5
    at, beyond = ({f"min_{rate}": bound} for bound in (0.5, 0.51))
    assert judged(tmp_path, whole, lacking, policy=at).decision is Decision.PROMOTE
    assert named(judged(tmp_path, whole, lacking, policy=beyond)) == {name: "hold"}


def test_a_route_without_a_scheduler_is_not_provenance(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(20), with_tokens(20, route_id="r"))
    assert verdict.coverage["candidate_routing_provenance_rate"] == 0.0


def test_gate_holds_when_records_lack_partners_or_answers_lack_comparable_ones(tmp_path: Path) -> None:
    fewer = with_tokens(30, prompt_digest=lambda number: "other" if number < 3 else "same")[:24]
    sides: Any = with_tokens(30, prompt_digest="same"), fewer
    verdict = judged(tmp_path, *sides)
    assert (verdict.coverage["join_rate"], verdict.coverage["comparable_rate"]) == (0.8, 21 / 24)
    assert named(verdict) == {"missing-join": "hold", "missing-comparable": "hold"}
    allowed: Any = {"min_join_rate": 0.8, "min_comparable_rate": 21 / 24}
    assert judged(tmp_path, *sides, **allowed).decision is Decision.PROMOTE


# -- all together -----------------------------------------------------------------------------------------------------


def test_rollback_precedes_hold_and_all_signals_are_listed(tmp_path: Path) -> None:
    candidate = with_tokens(20, token_ids=other_tokens(1), latency_ms=200.0, ok=failing(2))
    verdict = judged(tmp_path, with_tokens(20), candidate, min_pairs=21)
    assert [(each.name, each.response) for each in verdict.signals] == [
        ("output-mismatch", Decision.ROLLBACK),
        ("errors", Decision.ROLLBACK),
        ("latency", Decision.HOLD),
        ("too-few-pairs", Decision.HOLD),
    ]
    assert verdict.reason == verdict.signals[0].sentence
    assert [each.signal for each in verdict.triage] == [each.name for each in verdict.signals]


def test_segments_decide_only_if_enforced_and_large_enough(tmp_path: Path) -> None:
    def sides(num_slow: int) -> Any:
        is_slow = [number < num_slow for number in range(600)]
        label: Any = {"segment": lambda number: "slow" if is_slow[number] else "rest"}
        return with_tokens(600, **label), with_tokens(
            600, latency_ms=lambda number: 200.0 if is_slow[number] else 100.0, **label
        )

    assert judged(tmp_path, *sides(25)).decision is Decision.PROMOTE
    verdict = judged(tmp_path, *sides(25), segments="enforce")
    assert [(each.name, each.segment) for each in verdict.signals] == [("latency", "slow")]
    assert judged(tmp_path, *sides(19), segments="enforce").decision is Decision.PROMOTE


def test_a_segment_with_failures_and_mismatches_is_named(tmp_path: Path) -> None:
    label: Any = {"segment": lambda number: "odd" if number % 2 else "even"}
    candidate = with_tokens(80, ok=failing(1, 3), token_ids=other_tokens(4), **label)
    rules: Any = {"segments": "enforce", "max_error_rate_increase": 2.5, "max_mismatch_rate": 0.02}
    verdict = judged(tmp_path, with_tokens(80, **label), candidate, **rules)
    assert [(each.name, each.segment) for each in verdict.signals] == [("output-mismatch", "even"), ("errors", "odd")]


def test_different_token_traces_are_reported_and_decide_nothing(tmp_path: Path) -> None:
    sides: Any = [
        rows(20, text="a", token_trace_fingerprint=lambda number, side=side: f"{number * (1 + side * (number > 16))}")
        for side in (0, 1)
    ]
    verdict = judged(tmp_path, *sides)
    assert verdict.decision is Decision.PROMOTE
    assert "3 of 20 pairs have unlike traces of tokens" in verdict.notes


def test_the_verdict_has_digests_of_inputs_and_policy(tmp_path: Path) -> None:
    first = judged(tmp_path, with_tokens(20), with_tokens(20))
    other_policy = judged(tmp_path, with_tokens(20), with_tokens(20), min_pairs=10)
    other_side = judged(tmp_path, with_tokens(20), with_tokens(20, ttft_ms=1.0))
    assert first.digests["policy"] != other_policy.digests["policy"]
    assert first.digests["candidate"] != other_side.digests["candidate"]
    assert first.digests["baseline"] == other_policy.digests["baseline"] == other_side.digests["baseline"]


# -- sequential mode --------------------------------------------------------------------------------------------------


SEQUENTIAL: Any = {"mode": "sequential", "warmup_pairs": 0}


def test_sequential_evidence_states_its_guarantee(tmp_path: Path) -> None:
    candidate = with_tokens(1_000, latency_ms=lambda number: 115.0 + number % 7)
    verdict = judged(
        tmp_path, with_tokens(1_000, latency_ms=lambda number: 100.0 + number % 5), candidate, policy=SEQUENTIAL
    )
    assert set(named(verdict).values()) == {"rollback"}
    assert "at most 0.05, asymptotically" in verdict.guarantee
    assert states(verdict)["latency"] == "outside"
    assert verdict.reason.startswith("latency is +1")


def test_without_times_there_is_no_sequential_evidence(tmp_path: Path) -> None:
    sides: Any = [with_tokens(200, ts=lambda number: None if number == 7 else 1.0) for _ in range(2)]
    verdict = judged(tmp_path, *sides, policy=SEQUENTIAL)
    assert named(verdict) == {"missing-times": "hold"}
    assert verdict.series == ()


def test_p95_bounds_apply_to_thresholds_and_pressure_and_coverage_to_both_modes(tmp_path: Path) -> None:
    candidate = with_tokens(
        5_000, kv_used=90.0, kv_total=100.0, ttft_ms=lambda number: 100.0 if number % 15 == 0 else 9.9
    )
    baseline = with_tokens(5_000, kv_used=50.0, kv_total=100.0, ttft_ms=10.0)
    rules: Any = {"min_candidate_routing_provenance_rate": 0.5, "margin": 0.3}
    verdict = judged(tmp_path, baseline, candidate, policy=SEQUENTIAL, **rules)
    assert named(verdict) == {"kv-pressure": "hold", "missing-provenance": "hold"}
    assert named(judged(tmp_path, baseline, candidate, **rules)).keys() == {"kv-pressure", "missing-provenance", "ttft"}


def test_a_mismatch_rolls_back_if_equality_is_promised_and_otherwise_holds(tmp_path: Path) -> None:
    promise: Any = {"artifact": "a", "deterministic": True}
    differing: Any = {"token_ids": other_tokens(130)}
    proof = judged(tmp_path, with_tokens(150, **promise), with_tokens(150, **promise, **differing), policy=SEQUENTIAL)
    assert signal(proof, "output-mismatch").response is Decision.ROLLBACK
    unsaid = judged(
        tmp_path, with_tokens(150, artifact="a"), with_tokens(150, artifact="a", **differing), policy=SEQUENTIAL
    )
    found = signal(unsaid, "output-mismatch")
    assert found.response is Decision.HOLD
    assert "a second baseline (--aa)" in found.sentence
    assert found.examples == ("r130",)


def test_an_accepted_mismatch_rate_is_estimated_on_engines_that_promise_equal_answers(tmp_path: Path) -> None:
    promise: Any = {"deterministic": True}
    candidate = with_tokens(2_000, token_ids=other_tokens(*range(0, 2_000, 100)), **promise)
    for rate, state in ((0.1, "within"), (0.01, "undecided"), (0.001, "outside")):
        rules: Any = {**SEQUENTIAL, "max_mismatch_rate": rate}
        verdict = judged(tmp_path, with_tokens(2_000, **promise), candidate, policy=rules)
        assert states(verdict)["output-mismatch"] == state
        assert ("output-mismatch" in named(verdict)) == (state == "outside")


def test_mismatches_are_not_estimated_without_an_outputs_policy(tmp_path: Path) -> None:
    baseline = with_tokens(300, artifact="a", deterministic=True)
    candidate = with_tokens(300, artifact="b", deterministic=True, token_ids=other_tokens(*range(0, 300, 2)))
    verdict = judged(tmp_path, baseline, candidate, policy=SEQUENTIAL, max_mismatch_rate=0.1)
    assert named(verdict) == {"outputs-policy": "hold", "undecided": "hold"}
    assert "output-mismatch" not in states(verdict)


def test_with_a_second_baseline_mismatches_are_judged_at_any_look(tmp_path: Path) -> None:
    def side(every: int, start: int) -> Any:
        return with_tokens(4_000, token_ids=other_tokens(*range(start, 4_000, every)))

    as_noisy = judged(tmp_path, with_tokens(4_000), side(50, 3), side(50, 29), policy=SEQUENTIAL, mismatch_margin=3)
    assert states(as_noisy)["output-mismatch"] == "within"
    worse = judged(tmp_path, with_tokens(4_000), side(8, 3), side(50, 29), policy=SEQUENTIAL)
    assert named(worse) == {"output-mismatch": "rollback"}
    assert signal(worse, "output-mismatch").value == pytest.approx(100 * (1 / 8 - 1 / 50), abs=0.1)


def test_only_a_second_baseline_that_is_certainly_slower_invalidates_the_comparison(tmp_path: Path) -> None:
    def side(mean: float) -> Any:
        return with_tokens(400, latency_ms=lambda number: mean + 10 * math.sin(number * mean))

    slower = judged(tmp_path, side(100.0), side(101.0), side(120.0), policy=SEQUENTIAL)
    assert "unsound-baseline" in named(slower)
    alike = judged(tmp_path, side(100.0), side(101.0), side(102.0), policy=SEQUENTIAL)
    assert named(alike) == {"undecided": "hold"}
