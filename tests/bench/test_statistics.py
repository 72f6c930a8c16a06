"""The figures of a run, against values computed by hand."""

from __future__ import annotations

import math

import pytest

from lockstep.bench.client import Outcome
from lockstep.bench.statistics import (
    METRICS,
    failures,
    figures,
    parse_metrics,
    parse_percentiles,
    per_request,
    text_of,
    text_of_failures,
)
from lockstep.errors import UsageError

FIRST = Outcome(True, 0.0, ttft_s=0.1, itl_s=(0.1, 0.3), e2el_s=0.5, prompt_tokens=10, output_tokens=3)
SECOND = Outcome(True, 1.0, ttft_s=0.3, itl_s=(0.2,), e2el_s=0.5, prompt_tokens=20, output_tokens=2)
SINGLE = Outcome(True, 2.2, ttft_s=0.2, e2el_s=0.2, prompt_tokens=30, output_tokens=1)
FAILED = Outcome(False, 0.5, error="HTTP 503: full")
ALL = [FIRST, SECOND, FAILED, SINGLE]


def test_counts_and_rates_leave_failures_out() -> None:
    result = figures(ALL, 2.0, tuple(METRICS), (50.0, 99.0), {})
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 6)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 3.0
    assert result["total_token_throughput"] == 33.0
    assert result["request_goodput"] is None


def test_distributions_in_milliseconds() -> None:
    """TTFT 100, 200, 300; TPOT (0.5-0.1)/2 and (0.5-0.3)/1, the single token has none; ITL 100, 300, 200."""
    result = figures(ALL, 2.0, tuple(METRICS), (50.0, 99.0, 99.9), {})
    assert result["mean_ttft_ms"] == pytest.approx(200.0)
    assert result["median_ttft_ms"] == pytest.approx(200.0)
    assert result["std_ttft_ms"] == pytest.approx(math.sqrt(2 / 3) * 100)
    assert result["p99_ttft_ms"] == pytest.approx(200 + 0.98 * 100)
    assert result["p99.9_ttft_ms"] == pytest.approx(200 + 0.998 * 100)
    assert result["mean_tpot_ms"] == pytest.approx(200.0)
    assert result["std_tpot_ms"] == pytest.approx(0.0)
    assert result["mean_itl_ms"] == pytest.approx(200.0)
    assert result["p50_itl_ms"] == pytest.approx(200.0)
    assert result["mean_e2el_ms"] == pytest.approx(400.0)


def test_the_keys_are_those_of_vllm() -> None:
    result = figures(ALL, 2.0, ("ttft", "tpot", "itl", "e2el"), (99.0,), {"ttft": 1.0})
    kinds = ("mean", "median", "std", "p99")
    distributions = {f"{kind}_{name}_ms" for kind in kinds for name in ("ttft", "tpot", "itl", "e2el")}
    assert set(result) == distributions | {
        *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
        *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
        "max_concurrent_requests",
    }
    assert set(per_request(ALL)) == {
        *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"),
    }
    assert per_request(ALL)["errors"] == ["", "", "HTTP 503: full", ""]


@pytest.mark.parametrize(
    ("goals", "good"),
    [({"ttft": 150.0}, 1), ({"ttft": 300.0}, 3), ({"tpot": 100.0}, 1), ({"ttft": 200.0, "e2el": 300.0}, 1)],
)
def test_goodput_counts_requests_that_meet_every_goal(goals: dict[str, float], good: int) -> None:
    """A single token has a TPOT of 0, as vLLM has it."""
    assert figures(ALL, 2.0, (), (), goals)["request_goodput"] == good / 2.0


def test_peaks_are_those_of_the_busiest_second() -> None:
    """Seconds 0: chunks at 0.1, 0.2, 0.5; 1: at 1.3, 1.5; 2: at 2.4."""
    result = figures(ALL, 3.0, (), (), {})
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (3.0, 1)
    together = figures([FIRST, FIRST], 1.0, (), (), {})
    assert (together["max_output_tokens_per_s"], together["max_concurrent_requests"]) == (6.0, 2)


def test_nothing_completed_is_zeros_and_not_an_error() -> None:
    result = figures([FAILED], 1.0, ("ttft",), (99.0,), {"ttft": 1.0})
    assert (result["completed"], result["p99_ttft_ms"], result["request_goodput"]) == (0, 0.0, 0.0)


def test_reasons_of_failure_are_counted_in_order() -> None:
    other = Outcome(False, 0.0, error="reset")
    assert failures([FAILED, other, FIRST, FAILED]) == [("HTTP 503: full", 2), ("reset", 1)]


def test_percentiles_and_metrics_are_checked() -> None:
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    assert parse_metrics("ttft, e2el") == ("ttft", "e2el")
    for text in ("", "101", "p99", "-1"):
        with pytest.raises(UsageError, match="50,90,99"):
            parse_percentiles(text)
    with pytest.raises(UsageError, match="ttft, tpot, itl, e2el"):
        parse_metrics("ttfb")


def test_the_text_has_the_requested_statistics_in_the_order_of_vllm() -> None:
    result = figures([FIRST], 2.0, ("ttft", "itl"), (90.0, 99.9), {})
    result |= {"request_rate": "inf", "interrupted": 0, "max_concurrency": None}
    lines = text_of(result, ("ttft", "itl"), (90.0, 99.9)).split("\n")
    assert lines[0] == " Serving Benchmark Result ".center(56, "=")
    labels = [line.split(":")[0] for line in lines if ":" in line]
    assert labels[0] == "Successful requests"
    assert not {"Request rate configured (RPS)", "Interrupted requests", "Maximum request concurrency"} & {*labels}
    assert labels[-8:] == [
        *(f"{kind} TTFT (ms)" for kind in ("Mean", "Median", "P90", "P99.9")),
        *(f"{kind} ITL (ms)" for kind in ("Mean", "Median", "P90", "P99.9")),
    ]
    assert "Mean TTFT (ms):".ljust(42) + "100.00" in lines


def test_the_first_reasons_of_failure_are_listed_and_the_others_counted() -> None:
    reasons = [(f"reason {number}", number) for number in range(1, 8)]
    lines = text_of_failures(reasons).split("\n")
    assert lines[:2] == ["Failed requests:", "  1 x reason 1"]
    assert lines[-1] == "  and 2 other reasons"
    assert "other" not in text_of_failures(reasons[:5])
