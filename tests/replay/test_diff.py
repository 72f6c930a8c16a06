"""Where two configs part: each kind of decision and each limit, on cases whose first difference is known by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Priority
from lockstep.replay.diff import Diff, diff_configs, diff_workloads
from lockstep.replay.divergence import Change
from lockstep.replay.reasons import names_of, sentences
from lockstep.replay.workload import ArrivalUnit, Workload
from tests.replay.workloads import config, request, workload


class Case(NamedTuple):
    """Two configs that differ in ``fields``, and what is to be found."""

    workload: Workload
    common: dict[str, Any]
    a: dict[str, Any]
    b: dict[str, Any]
    step: int
    change: Change
    about: list[str]
    reasons: list[str]
    """Parts of sentences."""


THREE = workload(request("r1", 10), request("r2", 10), request("r3", 10))
SHARED = (1, 2, 3, 4)
CASES = {
    "max_num_seqs": Case(
        THREE,
        {},
        {"max_num_seqs": 3},
        {"max_num_seqs": 2},
        0,
        Change.ADMISSION,
        ["r3"],
        ["A admits r3, and B lets r3 wait", "in B, r3 waits: 2 of 2 sequences run"],
    ),
    "max_num_step_seqs": Case(
        THREE,
        {"max_num_seqs": 3},
        {},
        {"max_num_step_seqs": 2},
        0,
        Change.ADMISSION,
        ["r3"],
        ["2 of 2 places of the step are taken"],
    ),
    "max_num_batched_tokens": Case(
        workload(request("r1", 11), request("r2", 11), request("r3", 11)),
        {},
        {},
        {"max_num_batched_tokens": 23},
        0,
        Change.ADMISSION,
        ["r3"],
        ["22 tokens of the budget of 23 are used, and 1 are too little to go on with"],
    ),
    "max_num_batched_tokens, used up": Case(
        workload(request("r1", 30), request("r2", 30)),
        {},
        {},
        {"max_num_batched_tokens": 30},
        0,
        Change.ADMISSION,
        ["r2"],
        ["the budget of 30 tokens is used up"],
    ),
    "max_num_prefill_tokens": Case(
        workload(request("r1", 30), request("r2", 30)),
        {},
        {},
        {"max_num_prefill_tokens": 30},
        0,
        Change.ADMISSION,
        ["r2"],
        ["the prefill budget of 30 tokens is used up"],
    ),
    "max_chunk_tokens": Case(
        workload(request("r1", 30)),
        {},
        {"max_chunk_tokens": 20},
        {"max_chunk_tokens": 8},
        0,
        Change.CHUNK,
        ["r1"],
        ["r1 computes 20 tokens from position 0 on in A, and 8 in B", "in B, a chunk has at most 8 tokens"],
    ),
    "chunking": Case(
        workload(request("r1", 20), request("r2", 20)),
        {"max_num_batched_tokens": 30},
        {},
        {"chunking": False},
        0,
        Change.ADMISSION,
        ["r2"],
        ["20 tokens of the budget of 30 are used, and 10 are too little for its prompt of 20 in one go"],
    ),
    "num_blocks": Case(
        workload(request("r1", 20), request("r2", 20)),
        {"max_model_len": 32},
        {"num_blocks": 12},
        {"num_blocks": 8},
        0,
        Change.ADMISSION,
        ["r2"],
        ["in B, r2 waits: it needs 5 blocks, 3 of 8 are free"],
    ),
    "admission": Case(
        workload(request("r1", 20, 12), request("r2", 8, 12)),
        {"num_blocks": 12, "max_model_len": 32},
        {},
        {"admission": "reserve"},
        0,
        Change.ADMISSION,
        ["r2"],
        ["in B, r2 waits: prompt and output need 5 blocks, 4 of 12 are free"],
    ),
    "order": Case(
        workload(request("r1", 8), request("r2", 8, priority=Priority.HIGH)),
        {"max_num_seqs": 1},
        {},
        {"order": "priority"},
        0,
        Change.ADMISSION,
        ["r1", "r2"],
        ["A admits r1, and B lets r1 wait", "B admits r2, and A lets r2 wait"],
    ),
    "order, fair": Case(
        workload(request("r1", 8, tenant="x"), request("r2", 8, tenant="x"), request("r3", 8, tenant="y")),
        {"max_num_seqs": 2},
        {},
        {"order": "fair"},
        0,
        Change.ADMISSION,
        ["r2", "r3"],
        ["B admits r3, and A lets r3 wait"],
    ),
    "max_num_decode_seqs": Case(
        workload(request("r1", 8), request("r2", 8)),
        {},
        {"max_num_decode_seqs": 2},
        {"max_num_decode_seqs": 1},
        0,
        Change.CHUNK,
        ["r2"],
        ["in B, 1 of 1 places to sample are taken, so that the prompt stops short of its end"],
    ),
    "max_num_decode_seqs, a turn": Case(
        workload(request("r1", 1), request("r2", 1)),
        {},
        {"max_num_decode_seqs": 2},
        {"max_num_decode_seqs": 1},
        0,
        Change.TURN,
        ["r2"],
        ["A lets r2 take part in the step, and B lets r2 wait", "1 of 1 places to sample are taken"],
    ),
    "preemption": Case(
        workload(request("r1", 16, 16), request("r2", 16, 16)),
        {"num_blocks": 10, "max_model_len": 32, "num_host_blocks": 8},
        {"preemption": "swap"},
        {"preemption": "recompute"},
        5,
        Change.MOVE,
        ["r2"],
        ["blocks are saved to the host (preemption swap; 8 host blocks are free)", "its tail is dropped"],
    ),
    "num_blocks, a victim": Case(
        workload(request("r1", 16, 16), request("r2", 16, 16)),
        {"max_model_len": 32},
        {"num_blocks": 1000},
        {"num_blocks": 10},
        5,
        Change.VICTIM,
        ["r2"],
        ["B preempts r2, and A leaves r2 running", "in B, 10 of 10 blocks are held"],
    ),
    "enable_prefix_caching": Case(
        workload(request("r1", 16, contents=SHARED), request("r2", 16, arrival=1, contents=SHARED)),
        {},
        {},
        {"enable_prefix_caching": False},
        1,
        Change.CACHE,
        ["r2"],
        ["of the 16 prompt tokens of r2, 12 come from the cache in A, and 0 in B"],
    ),
    "num_blocks, other blocks": Case(
        workload(request("r1", 16, 1, contents=SHARED), request("r2", 16, 1, arrival=1)),
        {"max_model_len": 20},
        {"num_blocks": 8},
        {"num_blocks": 6},
        1,
        Change.BLOCK,
        ["r2"],
        ["another block at place 2 of its table: 7 in A, and 4 (giving up its cached content) in B"],
    ),
    "max_num_queued_reqs": Case(
        THREE,
        {},
        {},
        {"max_num_queued_reqs": 2},
        0,
        Change.REFUSAL,
        ["r3"],
        ["B refuses r3, and A takes it"],
    ),
    "max_model_len": Case(
        workload(request("r1", 8), request("r2", 28, 8, arrival=2)),
        {"num_blocks": 12},
        {"max_model_len": 40},
        {"max_model_len": 32},
        2,
        Change.REFUSAL,
        ["r2"],
        ["B refuses r2, and A takes it"],
    ),
    "num_blocks, the worst waits": Case(
        workload(request("r1", 16, 24), request("r2", 16, 24), request("r3", 4, 14)),
        {"max_model_len": 40},
        {"num_blocks": 12},
        {"num_blocks": 11},
        1,
        Change.TURN,
        ["r3"],
        ["A lets r3 take part in the step", "in B, r3 waits: none of 11 blocks is free for it"],
    ),
}


def diff_of(case: Case) -> tuple[Diff, SchedulerConfig, SchedulerConfig]:
    a, b = config(**case.common, **case.a), config(**case.common, **case.b)
    return diff_configs(case.workload, a, b), a, b


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_difference_and_its_reason(case: Case) -> None:
    found, _, _ = diff_of(case)

    assert found.divergence is not None
    assert found.a is not None
    assert found.b is not None
    told = sentences(found.divergence.difference, found.a, found.b)
    assert found.divergence.change is case.change, told
    assert found.num_equal_steps == case.step, told
    assert sorted(names_of(found.divergence.difference, found.a, found.b)) == case.about
    for part in case.reasons:
        assert any(part in sentence for sentence in told), told


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reproducer_shows_the_same_kind_and_needs_each_of_its_requests(case: Case) -> None:
    found, a, b = diff_of(case)

    assert found.reproducer is not None
    assert found.divergence is not None
    again = diff_configs(found.reproducer.workload, a, b, reproduces=False)
    assert again.divergence is not None
    assert again.divergence.change is found.divergence.change
    assert again.num_equal_steps == found.reproducer.divergence.num_equal_steps
    requests = tuple(found.reproducer.workload.requests)
    assert found.reproducer.is_minimal
    for left_out in requests:
        rest = replace(case.workload, requests=tuple(each for each in requests if each is not left_out))
        less = diff_configs(rest, a, b, reproduces=False)
        assert less.divergence is None or less.divergence.change is not found.divergence.change or len(requests) == 1


def test_of_several_fields_the_one_that_decides_is_found() -> None:
    a = config(max_num_seqs=8, max_num_batched_tokens=512, order="fcfs")
    b = config(max_num_seqs=2, max_num_batched_tokens=256, order="fair")

    found = diff_configs(THREE, a, b)

    assert found.fields == ("max_num_seqs", "max_num_batched_tokens", "order")
    assert found.cause is not None
    assert found.cause.alone == ("max_num_seqs",)


def test_two_fields_that_decide_only_together_are_found_together() -> None:
    """A request that either limit alone would already keep out comes in only when both are lifted."""
    a = config(max_num_seqs=2, max_num_batched_tokens=23)
    b = config(max_num_seqs=8, max_num_batched_tokens=512, order="fair")

    found = diff_configs(THREE, a, b)

    assert found.cause is not None
    assert found.cause.alone == ()
    assert found.cause.together == ("max_num_seqs", "max_num_batched_tokens")


def test_configs_that_decide_the_same_have_no_difference() -> None:
    found = diff_configs(THREE, config(max_num_seqs=8), config(max_num_seqs=7))

    assert found.divergence is None
    assert found.num_equal_steps == 4


def test_only_requests_that_matter_remain_of_many() -> None:
    """Twenty that are long gone, then three at once where only two may run."""
    early = [request(f"e{n}", 8, 2, arrival=10 * n) for n in range(20)]
    late = [request(f"l{n}", 8, 6, arrival=500) for n in range(3)]

    found = diff_configs(workload(*early, *late), config(max_num_seqs=8), config(max_num_seqs=2))

    assert found.reproducer is not None
    assert [each.name for each in found.reproducer.workload.requests] == ["l0", "l1", "l2"]
    assert [each.arrival for each in found.reproducer.workload.requests] == [0, 0, 0]


def test_requests_that_ended_remain_where_what_they_left_matters() -> None:
    """The cache remembers one that came long before the one that hits it."""
    others = [request(f"o{n}", 8, 2, arrival=10 * n) for n in range(20)]
    first = request("first", 16, arrival=300, contents=SHARED)
    last = request("last", 16, arrival=400, contents=SHARED)

    found = diff_configs(workload(*others, first, last), config(), config(enable_prefix_caching=False))

    assert found.reproducer is not None
    assert [each.name for each in found.reproducer.workload.requests] == ["first", "last"]


def test_two_workloads_part_where_their_requests_differ() -> None:
    other = workload(request("r1", 10), request("r2", 10), request("r3", 14))

    found = diff_workloads(THREE, config(), other, config())

    assert found.divergence is not None
    assert (found.divergence.change, found.num_equal_steps) == (Change.CHUNK, 0)
    assert diff_workloads(THREE, config(), THREE, config()).divergence is None


def test_a_workload_that_ends_before_the_other_parts_from_it_there() -> None:
    shorter = workload(*list(THREE.requests)[:1])
    longer = workload(request("r1", 10), request("r2", 10, arrival=50))

    found = diff_workloads(shorter, config(), longer, config())

    assert found.divergence is not None
    assert found.divergence.change is Change.IDLE
    assert found.divergence.b.tick == 50


requests_of = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 6), st.sampled_from(["", "x"])),
    min_size=1,
    max_size=12,
)
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(20, 60),
        "num_blocks": st.integers(14, 30),
        "order": st.sampled_from(["fcfs", "fair"]),
        "admission": st.sampled_from(["optimistic", "reserve"]),
        "chunking": st.booleans(),
        "max_num_decode_seqs": st.sampled_from([None, 1, 2]),
    }
)


@settings(max_examples=60, deadline=None)
@given(requests_of, limits, limits, st.sampled_from(list(ArrivalUnit)))
def test_whatever_differs_is_told_and_shown_by_its_reproducer(
    rows: list[tuple[int, int, int, str]], limits_a: dict[str, Any], limits_b: dict[str, Any], unit: ArrivalUnit
) -> None:
    """Random workloads and configs: the words hold for every situation, and the reproducer shows the same kind."""
    arrival, made = 0, []
    for number, (prompt, output, gap, tenant) in enumerate(rows):
        arrival += gap * (1 if unit is ArrivalUnit.TICKS else 7_000_000_000)
        made.append(request(f"r{number}", prompt, output, arrival, tenant=tenant))
    a, b = (config(max_model_len=42, max_chunk_tokens=12, **each) for each in (limits_a, limits_b))

    found = diff_configs(workload(*made, unit=unit), a, b)

    if found.divergence is None:
        return
    assert found.a is not None
    assert found.b is not None
    assert sentences(found.divergence.difference, found.a, found.b)
    assert names_of(found.divergence.difference, found.a, found.b)
    assert found.reproducer is not None
    again = diff_configs(found.reproducer.workload, a, b, reproduces=False)
    assert again.divergence is not None
    assert again.divergence.change is found.divergence.change
