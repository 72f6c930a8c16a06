"""Stats: rates and quantiles by values, over moments that are kept, and those of a real server."""

from __future__ import annotations

import pytest

from lockstep.cluster.cluster_stats import MAX_MOMENTS, ClusterStats, History, quantile, stats_of
from lockstep.engine.kv_tiers import TierStats
from lockstep.engine.metrics import HistogramSnapshot, MetricsSnapshot
from tests.server.process import IN_THREAD, serve

NUM_TOKENS = 8
BOUNDS = (0.1, 0.2)


class Watch:
    """A clock that is set by hand, and a history that reads it."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.history = History(lambda: self.at_s)

    def stats(self, at_s: float, *, window_s: float = 30.0, num_requests: int = 0, **tokens: int) -> ClusterStats:
        """Those of engines that have generated so many tokens by then."""
        self.at_s = at_s
        metrics = {name: counted(count) for name, count in tokens.items()}
        return stats_of(self.history, metrics, {}, num_requests, window_s)


def counted(tokens: int = 0, ttft: tuple[int, int, int] = (0, 0, 0)) -> MetricsSnapshot:
    histogram = HistogramSnapshot(BOUNDS, ttft, sum(ttft), 0.0)
    return MetricsSnapshot({}, {"generation_tokens": tokens}, {}, {"time_to_first_token_seconds": histogram})


def rates(stats: ClusterStats) -> list[float | None]:
    return [each.tokens_per_s for each in stats.engines]


def test_a_rate_is_the_difference_over_the_time_between() -> None:
    watch = Watch()
    watch.stats(10.0, a=100, b=7, num_requests=4)
    stats = watch.stats(12.5, a=150, b=7, num_requests=9)
    assert (rates(stats), stats.window_s, stats.requests_per_s, stats.uptime_s) == ([20.0, 0.0], 2.5, 2.0, 12.5)


def test_first_reading_has_no_rates() -> None:
    stats = Watch().stats(1.0, a=100)
    assert (rates(stats), stats.window_s, stats.requests_per_s) == ([None], None, None)


def test_an_engine_that_began_anew_and_one_that_was_just_loaded_count_from_zero() -> None:
    watch = Watch()
    watch.stats(0.0, a=100)
    assert rates(watch.stats(1.0, a=30, b=4)) == [30.0, 4.0]


def test_rates_cover_the_window_regardless_of_the_number_of_readings() -> None:
    watch = Watch()
    for at in range(1_000):
        stats = watch.stats(at / 10, a=at)
    assert stats.window_s == pytest.approx(29.9, abs=1.0)
    assert watch.stats(100.0, a=1_000, window_s=5.0).window_s == pytest.approx(5.0, abs=1.0)
    assert rates(stats) == [pytest.approx(10.0)]


def test_readings_slightly_longer_apart_than_the_window_have_rates_and_late_ones_none() -> None:
    watch = Watch()
    watch.stats(0.0, a=0)
    assert watch.stats(0.3, a=3, window_s=0.1).window_s == 0.3
    assert watch.stats(2.1, a=20, window_s=2.0).window_s == 2.1
    assert watch.stats(1_000.0, a=20, window_s=2.0).window_s is None
    assert watch.stats(1_001.0, a=30, window_s=2.0).window_s == 1.0


def test_moments_are_bounded() -> None:
    watch = Watch()
    for at in range(500):
        watch.stats(float(at), a=at)
    assert watch.stats(500.0, a=500, window_s=3_600.0).window_s == MAX_MOMENTS


@pytest.mark.parametrize(("share", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_a_quantile_lies_linearly_in_its_bucket(share: float, expected: float) -> None:
    assert quantile((1.0, 2.0), (10, 10, 0), share) == expected


def test_a_quantile_above_all_bounds_is_the_last_bound() -> None:
    assert quantile((1.0, 2.0), (1, 1, 98), 0.95) == 2.0


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert quantile((), (), 0.5) is None
    assert quantile((1.0,), (0, 0), 0.5) is None


def test_times_to_first_token_are_those_of_the_window() -> None:
    watch = Watch()
    stats_of(watch.history, {"a": counted(9, (90, 0, 0))}, {}, 0, 30.0)
    watch.at_s = 1.0
    [engine] = stats_of(watch.history, {"a": counted(9, (90, 10, 0))}, {}, 0, 30.0).engines
    assert engine.ttft_p50_s == pytest.approx(0.15)
    assert engine.ttft_p95_s == pytest.approx(0.195)
    [engine] = stats_of(watch.history, {"a": counted(9, (4, 0, 0))}, {}, 0, 30.0).engines
    assert engine.ttft_p50_s == pytest.approx(0.05)


def test_waiting_requests_of_an_engine_are_reported_without_rates() -> None:
    gauges = {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.5}
    watch = Watch()
    for at_s in (0.0, 1.0):
        watch.at_s = at_s
        metrics = {"a": MetricsSnapshot(gauges, {}, {}, {})}
        [engine] = stats_of(watch.history, metrics, {}, 0, 30.0).engines
        assert (engine.num_waiting, engine.kv_share, engine.num_blocks, engine.ttft_p50_s) == (3, 0.5, None, None)


def test_tiers_of_the_store_are_reported_by_name() -> None:
    [tier] = stats_of(History(), {}, {"host": TierStats(1, 2, 3, 4, 5, 6, 7)}, 0, 30.0).tiers
    assert (tier.name, tier.num_blocks, tier.num_bytes, tier.budget_bytes) == ("host", 1, 2, 3)
    assert (tier.num_evicted, tier.num_loaded, tier.num_rejected, tier.num_checked) == (4, 5, 6, 7)


def test_figures_of_a_real_server_are_those_of_its_requests() -> None:
    with serve("stub://alpha", "--served-model-name", 'org/"al\\pha"', *IN_THREAD) as server, server.client() as client:
        assert client.get("/v1/stats").json()["window_s"] is None
        prompt = {"prompt": "the same words again " * 40, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answers = [client.post("/v1/completions", json=prompt).json()["usage"] for _ in range(3)]
        stats = client.get("/v1/stats").json()
        assert client.get("/v1/stats?window_s=0").status_code == 400
    [engine] = stats["engines"]
    assert [usage["completion_tokens"] for usage in answers] == [NUM_TOKENS] * 3
    assert engine["model"] == 'org/"al\\pha"'
    assert engine["tokens_per_s"] * stats["window_s"] == pytest.approx(3 * NUM_TOKENS)
    assert stats["requests_per_s"] * stats["window_s"] == pytest.approx(3)
    num_prompt = sum(usage["prompt_tokens"] for usage in answers)
    num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answers)
    assert engine["prompt_tokens_per_s"] * stats["window_s"] == pytest.approx(num_prompt)
    assert num_cached > 0
    assert engine["hit_share"] == pytest.approx(num_cached / num_prompt)
    assert 0 < engine["ttft_p50_s"] <= engine["ttft_p95_s"]
    assert engine["num_blocks"] > 0
    assert 0 <= engine["kv_share"] <= 1
    assert stats["uptime_s"] > stats["window_s"] > 0
