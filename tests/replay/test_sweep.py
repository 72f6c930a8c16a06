"""Grids, fronts and prices; and equal sweeps for any number of processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.replay.configs import MAX_CONFIGS, combinations, parse_grid
from lockstep.replay.metrics import metric_named, short_name
from lockstep.replay.sweep import SweepJob, SweepOutcome, cheapest, evaluate, front, pareto_front, price, sweep
from tests.replay.workloads import config, request, workload

WORKLOAD = workload(*(request(f"r{n}", 12, 6, arrival=n // 4, contents=(n % 3, 7, 8)) for n in range(24)))
COMMON = {"block_size": "4", "num_blocks": "60", "max_model_len": "64"}
JOB = SweepJob(WORKLOAD, COMMON, None, {"ttft": 50.0, "e2e": 400.0})


def test_a_sweep_in_two_processes_equals_one_in_one_process() -> None:
    some = combinations(parse_grid(["max_num_seqs=1,2,8", "max_num_batched_tokens=4,32"]))

    assert sweep(JOB, some, 2) == sweep(JOB, some, 1)


def test_an_invalid_config_is_a_row_with_its_reason() -> None:
    outcomes = sweep(JOB, combinations(parse_grid(["max_num_seqs=8,0"])), 1)

    assert [bool(each.figures) for each in outcomes] == [True, False]
    assert "max_num_seqs is 0" in outcomes[1].refusal


def test_a_value_of_another_type_is_refused_before_anything_is_replayed() -> None:
    with pytest.raises(UsageError, match="max_num_seqs is 'x'; it must be a whole number"):
        parse_grid(["max_num_seqs=8,x"])


def test_the_last_axis_changes_fastest() -> None:
    grid = parse_grid(["max_num_seqs=1,2", "order=fcfs, fair"])

    assert [tuple(each.values()) for each in combinations(grid)] == [
        ("1", "fcfs"),
        ("1", "fair"),
        ("2", "fcfs"),
        ("2", "fair"),
    ]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["max_num_seqs"], "write field=value,value"),
        (["max_num_seqs=1,,2"], "write field=value,value"),
        (["max_num_seq=1"], "did you mean max_num_seqs"),
        (["max_num_seqs=1", "max_num_seqs=2"], "twice"),
        (["max_num_seqs=1,1"], "repeats a value"),
        ([], "no grid to sweep"),
        ([f"max_num_seqs={','.join(map(str, range(MAX_CONFIGS + 1)))}"], "1,025 combinations"),
    ],
)
def test_an_invalid_grid_is_rejected(axes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        combinations(parse_grid(axes))


@given(st.lists(st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_the_front_has_points_that_are_not_dominated(points: list[tuple[int, int] | None]) -> None:
    marks = pareto_front(points)

    for point, mark in zip(points, marks, strict=True):
        beaten = point is None or any(
            other is not None and other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
        assert mark is not beaten


def outcome(good: float, **limits: int) -> SweepOutcome:
    return SweepOutcome(
        {}, config(**limits), {"goodput.ratio": good, "latency_ms.ttft.p99": 10.0, "requests_per_s": good}
    )


def test_the_cheapest_config_has_the_least_kv_memory_then_the_fewest_sequences() -> None:
    rows = [
        outcome(1.0, num_blocks=100),
        outcome(1.0, num_blocks=50, max_num_seqs=16),
        outcome(0.99, num_blocks=50, max_num_seqs=8),
        outcome(0.98, num_blocks=20),
        SweepOutcome({}, None, {}, "cannot work"),
    ]

    assert cheapest(rows, 0.99) == 2
    assert cheapest(rows, 1.0) == 1
    assert cheapest(rows, 1.1) is None
    assert price(config(num_blocks=10, block_size=32)) > price(config(num_blocks=60, block_size=4))


def test_for_some_figures_more_is_better() -> None:
    rows = [outcome(0.5), outcome(0.9), SweepOutcome({}, None, {}, "cannot work")]

    assert front(rows, ["latency_ms.ttft.p99", "requests_per_s"]) == (False, True, False)


def test_metrics_have_the_names_of_the_report_or_short_ones() -> None:
    names = evaluate(JOB, {}).figures

    assert metric_named("latency_ticks.ttft.p99", names) == "latency_ticks.ttft.p99"
    assert metric_named("ttft_p99", names) in ("latency_ms.ttft.p99", "latency_ticks.ttft.p99")
    assert metric_named("ttft_p99", {"latency_ms.ttft.p99": 1, "latency_ticks.ttft.p99": 1}) == "latency_ms.ttft.p99"
    assert metric_named("output_tokens_per_s", names) == "output_tokens_per_s"
    assert short_name("latency_ms.tpot.mean") == "tpot_mean"
    with pytest.raises(UsageError, match=r"did you mean ttft_p99.*The metrics are requests,"):
        metric_named("tfft_p99", names)
