"""Times and their distributions, compared with a recount of every token."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from lockstep.replay.cost import CostModel
from lockstep.replay.latencies import Distribution, distribution
from lockstep.replay.report import Report, report_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import Tick
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload
from tests.replay.sample import config, request, workload

COST = CostModel(3 * PS_PER_MS, 17_000_000, 211_000_000, 1_300_000)


def crowd(seed: int) -> Workload:
    rng = random.Random(seed)
    arrival = 0
    requests = []
    for index in range(60):
        arrival += rng.choice([0, 5, 40, 200]) * PS_PER_MS
        most = rng.randrange(1, 60)
        requests.append(
            request(
                str(index), rng.randrange(1, 90), rng.randrange(1, most + 1), arrival, most, tenant=rng.choice("ab")
            )
        )
    return workload(*requests, unit=ArrivalUnit.PS)


def tokens_of(load: Workload) -> tuple[Report, dict[int, list[tuple[int, int]]]]:
    """Report, and the times at which each sequence got its tokens: (tick, end of its step)."""
    seen: dict[int, list[tuple[int, int]]] = {}

    def watch(tick: Tick) -> None:
        assert tick.num_ticks == 1
        if tick.plan is not None:
            for seq_id, samples in zip(tick.plan.seq_ids, tick.plan.samples, strict=True):
                if samples:
                    seen.setdefault(seq_id, []).append((tick.tick, tick.start_ps + tick.duration_ps))

    limits = config(num_blocks=12, num_host_blocks=5, max_model_len=190, max_num_decode_seqs=7)
    single = Simulation(load, limits, COST, watchers=(watch,), run_lengths=False).run()
    assert single.stats.num_preemptions > 0, "a crowd that does not press proves little"
    return report_of(Simulation(load, limits, COST).run()), seen


def expected(values: list[Fraction]) -> Distribution:
    """Mean and nearest ranks."""
    values = sorted(values)
    ranks = [
        max(rank for rank in range(len(values)) if rank * 100 < percent * len(values)) for percent in (50, 90, 95, 99)
    ]
    mean = sum(values, Fraction(0)) / len(values)
    return Distribution(*[round(float(value), 6) for value in (mean, *(values[rank] for rank in ranks))])


@pytest.mark.parametrize("seed", range(3))
def test_latencies_equal_a_recount_of_every_token(seed: int) -> None:
    load = crowd(seed)
    report, seen = tokens_of(load)
    arrivals = dict(enumerate(load.requests))
    ms = report.latency_ms
    assert ms is not None
    per_ms = Fraction(1, PS_PER_MS)
    assert ms.ttft == expected([(seen[index][0][1] - each.arrival) * per_ms for index, each in arrivals.items()])
    assert ms.e2e == expected([(seen[index][-1][1] - each.arrival) * per_ms for index, each in arrivals.items()])
    several = [times for times in seen.values() if len(times) > 1]
    assert ms.tpot == expected(
        [Fraction((times[-1][1] - times[0][1]) // (len(times) - 1)) * per_ms for times in several]
    )
    gaps = [after[1] - before[1] for times in several for before, after in pairwise(times)]
    by_us = expected([Fraction(gap // 1_000_000, 1000) for gap in gaps])
    assert ms.itl is not None
    assert (ms.itl.p50, ms.itl.p90, ms.itl.p95, ms.itl.p99) == (by_us.p50, by_us.p90, by_us.p95, by_us.p99)
    assert ms.itl.mean == expected([gap * per_ms for gap in gaps]).mean
    ticks = [Fraction(after[0] - before[0]) for times in several for before, after in pairwise(times)]
    assert report.latency_ticks.itl == expected(ticks)
    assert report.decode_tokens == sum(map(len, seen.values()))


def test_percentiles_are_observed_values() -> None:
    assert distribution([4, 1, 3, 2], 1) == Distribution(2.5, 2.0, 4.0, 4.0, 4.0)
    assert distribution(list(range(1, 101)), 10) == Distribution(5.05, 5.0, 9.0, 9.5, 9.9)
    assert distribution([], 1) is None


def test_fairness_is_jains_index_over_speeds() -> None:
    """Two equal requests with one place: the second takes twice as long, so (1 + 1/2)^2 / 2(1 + 1/4)."""
    pair = workload(request("a", 16, 5, tenant="a"), request("b", 16, 5, tenant="b"))
    report = report_of(Simulation(pair, config(max_num_seqs=1), CostModel()).run())
    assert (report.tenants, report.fairness) == (2, 0.9)
    equal = report_of(Simulation(pair, config(), CostModel()).run())
    assert equal.fairness == 1.0


def test_goodput_counts_requests_that_met_every_goal() -> None:
    """One request at a time with 10 ms per step: the second waits 50 ms for its first token."""
    pair = workload(request("a", 16, 5), request("b", 16, 5), unit=ArrivalUnit.PS)
    replay = Simulation(pair, config(max_num_seqs=1)).run()
    for goals, number in [
        ({"ttft": 59.9}, 1),
        ({"ttft": 60.0}, 2),
        ({"ttft": 60.0, "tpot": 9.9}, 0),
        ({"e2e": 50.0}, 1),
    ]:
        goodput = report_of(replay, goals).goodput
        assert goodput is not None
        assert (goodput.requests, goodput.goals_ms) == (number, goals)
        assert goodput.requests_per_s == number * 10.0
