"""A promotion needs evidence: fields that only one side has, and answers without output, cause a hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.release.verdict import Decision
from tests.release.judging import judged, named, rows, signal, states, with_tokens

SEQUENTIAL: Any = {"mode": "sequential"}
TIMES: Any = {"ttft_ms": 10.0, "token_latencies_ms": [5.0, 6.0]}


def only(*numbers: int, value: Any = None) -> Any:
    """Value of some requests; the default is the tokens of `with_tokens`."""
    return lambda number: (value or [number, 1, 2]) if number in numbers else None


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["latency_ms", "ttft_ms", "token_latencies_ms"])
def test_gate_holds_when_candidate_lacks_a_metric_that_the_baseline_has(tmp_path: Path, lost: str) -> None:
    verdict = judged(tmp_path, with_tokens(30, **TIMES), with_tokens(30, **{**TIMES, lost: None}))
    assert named(verdict) == {"missing-metric": "hold"}
    found = signal(verdict, "missing-metric")
    assert (found.value, found.bound, found.examples[:2]) == (0.0, 0.9, ("r0", "r1"))
    assert verdict.warnings == ()


def test_a_metric_without_a_bound_is_not_required_in_threshold_mode(tmp_path: Path) -> None:
    sides: Any = with_tokens(30, **TIMES), with_tokens(30)
    unbounded: Any = {"max_ttft_p95_ratio": None, "max_decode_p95_ratio": None}
    assert judged(tmp_path, *sides, **unbounded).decision is Decision.PROMOTE
    assert judged(tmp_path, *sides, min_metric_rate=0).decision is Decision.PROMOTE
    assert named(judged(tmp_path, *sides, policy=SEQUENTIAL, **unbounded))["missing-metric"] == "hold"


def test_sequential_promotion_needs_latency_unless_the_policy_requires_no_series(tmp_path: Path) -> None:
    baseline = with_tokens(4_000, **TIMES)
    without = with_tokens(4_000, latency_ms=None, **TIMES)
    verdict = judged(tmp_path, baseline, without, policy=SEQUENTIAL)
    assert named(verdict) == {"missing-metric": "hold"}
    neither = judged(tmp_path, without, without, policy=SEQUENTIAL)
    assert named(neither) == {"missing-metric": "hold"}
    assert "required_series" in neither.reason
    allowed = judged(tmp_path, without, without, policy=SEQUENTIAL, required_series=[])
    assert allowed.decision is Decision.PROMOTE
    assert "it covers ttft, decode, errors, output-mismatch, missing-pairs, and nothing else" in allowed.guarantee


def test_percentiles_use_pairs_with_the_number_on_both_sides(tmp_path: Path) -> None:
    """Otherwise a candidate that is 30 % slower, with missing latencies of its slow answers, would look faster."""
    latency = [100.0 + number for number in range(100)]
    baseline = with_tokens(100, latency_ms=lambda number: latency[number])
    candidate = with_tokens(100, latency_ms=lambda number: 1.3 * latency[number] if number < 56 else None)
    verdict = judged(tmp_path, baseline, candidate)
    figures = verdict.summary.figures["latency_p95_ms"]
    assert figures.ratio == pytest.approx(1.3)
    assert figures.pairs == 56
    assert named(verdict) == {"latency": "hold", "missing-metric": "hold"}
    assert signal(verdict, "missing-metric").value == pytest.approx(0.56)


def test_gaps_are_pooled_over_pairs_that_have_them_on_both_sides(tmp_path: Path) -> None:
    baseline = with_tokens(40, token_latencies_ms=lambda number: [10.0 if number < 36 else 50.0])
    candidate = with_tokens(40, token_latencies_ms=lambda number: [10.0] if number < 36 else None)
    figures = judged(tmp_path, baseline, candidate).summary.figures["decode_p95_ms"]
    assert (figures.baseline, figures.candidate, figures.pairs) == (10.0, 10.0, 36)


def test_a_few_missing_values_are_a_warning_and_many_hold(tmp_path: Path) -> None:
    def verdict(num_lost: int) -> Any:
        lost = with_tokens(100, latency_ms=lambda number: None if number < num_lost else 100.0)
        return judged(tmp_path, with_tokens(100), lost)

    assert (verdict(0).warnings, verdict(1).warnings) == ((), ())
    few = verdict(10)
    assert few.decision is Decision.PROMOTE
    assert [(each.name, each.examples[0]) for each in few.warnings] == [("missing-values", "r0")]
    assert named(verdict(11)) == {"missing-metric": "hold"}


def test_a_field_that_the_baseline_never_has_is_a_warning(tmp_path: Path) -> None:
    verdict = judged(tmp_path, with_tokens(30), with_tokens(30, **TIMES))
    assert verdict.decision is Decision.PROMOTE
    assert [each.name for each in verdict.warnings] == ["no-baseline-values"] * 2
    assert verdict.summary.figures["ttft_p95_ms"].ratio is None


def test_gaps_of_a_tenth_of_a_millisecond_on_one_side_are_not_evidence(tmp_path: Path) -> None:
    """Gaps in seconds are as small as those of tokens that a gateway buffered."""
    seconds = with_tokens(30, token_latencies_ms=[0.05, 0.06])
    verdict = judged(tmp_path, with_tokens(30, token_latencies_ms=[5.0, 6.0]), seconds)
    assert named(verdict) == {"missing-metric": "hold"}
    both = judged(tmp_path, seconds, seconds)
    assert (both.decision, [each.name for each in both.warnings]) == (Decision.PROMOTE, ["coarse-gaps"])


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_gate_holds_when_one_answer_of_many_can_be_compared(tmp_path: Path) -> None:
    one = rows(60, token_ids=only(5))
    few = {"no-output-evidence": "hold", "missing-comparable": "hold"}
    for candidate in (one, with_tokens(60)):
        assert named(judged(tmp_path, one, candidate)) == {**few, "missing-output": "hold"}
    seeds = with_tokens(60, seed=lambda number: 1 if number == 5 else 2)
    assert named(judged(tmp_path, with_tokens(60, seed=1), seeds)) == few
    allowed: Any = {"min_comparable_rate": 0, "min_output_rate": 0}
    assert named(judged(tmp_path, one, one, policy=allowed)) == {"no-output-evidence": "hold"}


def test_gate_holds_when_a_successful_answer_carries_no_output(tmp_path: Path) -> None:
    candidate = with_tokens(60, token_ids=lambda number: None if number == 5 else [number, 1, 2])
    verdict = judged(tmp_path, with_tokens(60), candidate)
    assert named(verdict) == {"missing-output": "hold"}
    assert signal(verdict, "missing-output").examples == ("r5",)
    assert judged(tmp_path, with_tokens(60), candidate, min_output_rate=0.99).decision is Decision.PROMOTE
    assert judged(tmp_path, with_tokens(60), candidate, outputs="ignore").decision is Decision.PROMOTE
    failed = [{**row, "ok": row["request_id"] != "r5"} for row in candidate]
    assert "missing-output" not in named(judged(tmp_path, with_tokens(60), failed))


def test_answers_without_the_field_are_excluded_from_the_comparable_rate(tmp_path: Path) -> None:
    side = rows(60, text=lambda number: '{"x": 1}' if number % 2 else "prose")
    verdict = judged(tmp_path, side, side, outputs="agreement(x)")
    assert (verdict.decision, verdict.coverage["comparable_rate"]) == (Decision.PROMOTE, 1.0)
    one = rows(60, text=lambda number: '{"x": 1}' if number == 5 else "prose")
    assert named(judged(tmp_path, one, one, outputs="agreement(x)")) == {"no-output-evidence": "hold"}


def test_the_lower_bound_of_agreement_takes_part_in_the_decision(tmp_path: Path) -> None:
    sides: Any = with_tokens(300), with_tokens(300)
    verdict = judged(tmp_path, *sides)
    assert verdict.agreement is not None
    lower = verdict.agreement.lower
    assert 0.8 < lower < 0.9
    at, beyond = judged(tmp_path, *sides, min_agreement_lower=lower), judged(tmp_path, *sides, min_agreement_lower=0.9)
    assert at.decision is Decision.PROMOTE
    assert named(beyond) == {"uncertain-agreement": "hold"}
    assert signal(beyond, "uncertain-agreement").value == lower


def test_sequential_promotion_needs_mismatches_to_be_certainly_rare(tmp_path: Path) -> None:
    """Half of the answers are comparable, so their rate of mismatches is less certain than that of errors."""
    half = rows(4_000, token_ids=lambda number: [number, 1, 2] if number % 2 else None)
    few: Any = {**SEQUENTIAL, "min_comparable_rate": 0, "min_output_rate": 0}
    verdict = judged(tmp_path, half, half, policy=few)
    assert (states(verdict)["errors"], states(verdict)["output-mismatch"]) == ("within", "undecided")
    assert named(verdict) == {"undecided": "hold"}
    assert judged(tmp_path, half, half, policy=few, mismatch_margin=3).decision is Decision.PROMOTE


# -- length of answers ------------------------------------------------------------------------------------------------

IGNORE: Any = {"outputs": "ignore"}


@pytest.mark.parametrize("mode", ["threshold", "sequential"])
def test_empty_answers_are_failures_even_if_outputs_are_ignored(tmp_path: Path, mode: str) -> None:
    baseline, candidate = (rows(300, output_tokens=tokens) for tokens in (64, 0))
    verdict = judged(tmp_path, baseline, candidate, policy=IGNORE, mode=mode)
    assert (verdict.decision, verdict.signals[0].name) == (Decision.ROLLBACK, "errors")
    assert "an empty answer" in verdict.triage[0].evidence
    assert verdict.summary.healthy == 0


def test_answers_that_are_empty_on_both_sides_are_neither_a_difference_nor_evidence(tmp_path: Path) -> None:
    some = rows(40, output_tokens=lambda number: 64 * (number % 4 > 0))
    assert judged(tmp_path, some, some, policy=IGNORE).decision is Decision.PROMOTE
    empty = rows(40, output_tokens=0)
    assert named(judged(tmp_path, empty, empty, policy=IGNORE)) == {"too-few-pairs": "hold"}


@pytest.mark.parametrize("mode", ["threshold", "sequential"])
@pytest.mark.parametrize("tokens", [32, 96])
def test_gate_holds_when_answers_change_their_length(tmp_path: Path, tokens: int, mode: str) -> None:
    sides: Any = (rows(300, output_tokens=number) for number in (64, tokens))
    verdict = judged(tmp_path, *sides, policy=IGNORE, mode=mode)
    found = signal(verdict, "output-length")
    assert found.response is Decision.HOLD
    assert found.value == pytest.approx(tokens / 64 - 1)


@pytest.mark.parametrize("bound", [0.5, None])
def test_a_change_of_length_may_be_allowed(tmp_path: Path, bound: float | None) -> None:
    sides: Any = (rows(30, output_tokens=number) for number in (64, 32))
    verdict = judged(tmp_path, *sides, policy=IGNORE, max_output_length_change=bound)
    assert (verdict.decision, [each.name for each in verdict.warnings]) == (Decision.PROMOTE, [])
    assert verdict.summary.figures["output_tokens_mean"].ratio == 0.5


def test_a_share_of_shortened_answers_is_a_warning(tmp_path: Path) -> None:
    cut = rows(100, output_tokens=lambda number: 20 if number % 10 == 3 else 64)
    verdict = judged(tmp_path, rows(100, output_tokens=64), cut, policy=IGNORE)
    assert verdict.decision is Decision.PROMOTE
    assert [(each.name, each.examples[:2]) for each in verdict.warnings] == [("short-answers", ("r3", "r13"))]
    sampled = rows(100, output_tokens=lambda number: 40 + 30 * math.sin(number))
    other = rows(100, output_tokens=lambda number: 40 - 30 * math.sin(number))
    assert judged(tmp_path, sampled, other, policy=IGNORE).warnings == (), "as many are longer"
