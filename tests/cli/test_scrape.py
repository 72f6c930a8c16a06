"""Scrapes: rates and quantiles by values, and from the text that a real server writes."""

from __future__ import annotations

import math

import pytest

from lockstep.cli.scrape import Scrape, engine_figures, increase, quantile, rate, store_tiers
from tests.server.process import IN_THREAD, serve

TOKENS = "lockstep:generation_tokens_total"
NUM_TOKENS = 8


def tokens(at_s: float, *counts: tuple[str, float]) -> Scrape:
    """A scrape that has one counter of some models."""
    return Scrape.parse("".join(f'{TOKENS}{{engine="0",model_name="{name}"}} {n}\n' for name, n in counts), at_s)


def times(at_s: float, *counts: tuple[str, float]) -> Scrape:
    """A scrape that has times to first token: how many are not above each bound."""
    name = "lockstep:time_to_first_token_seconds_bucket"
    return Scrape.parse("".join(f'{name}{{le="{le}",model_name="a"}} {n}\n' for le, n in counts), at_s)


def test_a_rate_is_the_difference_over_the_time_between() -> None:
    before, after = tokens(10.0, ("a", 100), ("b", 7)), tokens(12.5, ("a", 150), ("b", 7))
    assert rate(before, after, TOKENS, model_name="a") == 20.0
    assert rate(before, after, TOKENS, model_name="b") == 0.0
    assert rate(before, after, TOKENS) == 20.0


def test_a_counter_that_began_anew_counts_from_zero() -> None:
    assert increase(tokens(0.0, ("a", 100)), tokens(1.0, ("a", 30)), TOKENS) == 30.0


def test_a_model_that_was_just_loaded_counts_from_zero() -> None:
    assert increase(tokens(0.0, ("a", 100)), tokens(1.0, ("a", 100), ("b", 4)), TOKENS, model_name="b") == 4.0


def test_one_scrape_has_no_rates_and_unknown_models_have_no_figures() -> None:
    after = tokens(1.0, ("a", 100))
    assert rate(None, after, TOKENS) is None
    assert rate(after, after, TOKENS) is None
    assert rate(after, tokens(2.0), TOKENS) is None
    assert set(engine_figures(after, after, "nobody")) == {None}


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)],
)
def test_a_quantile_lies_linearly_in_its_bucket(share: float, expected: float) -> None:
    assert quantile([(1.0, 10), (2.0, 20), (math.inf, 20)], share) == expected


def test_a_quantile_above_all_bounds_is_the_last_bound() -> None:
    assert quantile([(1.0, 1), (2.0, 2), (math.inf, 100)], 0.95) == 2.0


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0), (math.inf, 0)], 0.5) is None


def test_times_to_first_token_are_those_between_two_scrapes() -> None:
    before = times(0.0, ("0.1", 90), ("0.2", 90), ("+Inf", 90))
    after = times(1.0, ("0.1", 90), ("0.2", 100), ("+Inf", 100))
    figures = engine_figures(before, after, "a")
    assert figures.ttft_p50_s == pytest.approx(0.15)
    assert figures.ttft_p95_s == pytest.approx(0.195)
    assert engine_figures(after, times(2.0, ("0.1", 4), ("0.2", 4), ("+Inf", 4)), "a").ttft_p50_s == pytest.approx(0.05)


def test_figures_of_a_real_server_are_those_of_its_requests() -> None:
    flags = ("stub://alpha", "--served-model-name", 'org/"al\\pha"', *IN_THREAD, "--host-kv-mb", "8")
    with serve(*flags) as server, server.client() as client:
        before = Scrape.parse(client.get("/metrics").text, 100.0)
        prompt = {"prompt": "the same words again " * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answers = [client.post("/v1/completions", json=prompt).json()["usage"] for _ in range(3)]
        after = Scrape.parse(client.get("/metrics").text, 102.0)
    figures = engine_figures(before, after, 'org/"al\\pha"')
    assert [usage["completion_tokens"] for usage in answers] == [NUM_TOKENS] * 3
    assert figures.tokens_per_s == 3 * NUM_TOKENS / 2
    num_prompt = sum(usage["prompt_tokens"] for usage in answers)
    num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answers)
    assert figures.prompt_tokens_per_s == num_prompt / 2
    assert num_cached > 0
    assert figures.hit_share == pytest.approx(num_cached / num_prompt)
    assert figures.ttft_p50_s is not None
    assert figures.ttft_p95_s is not None
    assert 0 < figures.ttft_p50_s <= figures.ttft_p95_s
    assert figures.num_blocks is not None
    assert figures.num_blocks > 0
    assert figures.kv_share is not None
    assert 0 <= figures.kv_share <= 1
    assert (after.total("process_start_time_seconds") or 0) > 1e9


def test_tiers_of_the_store_are_those_of_the_text() -> None:
    names = ("bytes", "budget_bytes", "blocks", "loaded_total", "evicted_total", "rejected_total")
    lines = [f'lockstep:kv_store_{name}{{tier="host"}} {at}\n' for at, name in enumerate(names, 1)]
    assert store_tiers(Scrape.parse("".join(lines), 0.0)) == [("host", 1, 2, 3, 4, 5, 6)]
    assert store_tiers(Scrape.parse("", 0.0)) == []


def test_what_is_no_text_of_metrics_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        Scrape.parse("lockstep:generation_tokens_total{ broken", 0.0)
