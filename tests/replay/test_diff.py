"""First difference of two configs: each kind of decision and each limit, on cases with a hand-derived difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.diff import Diff, diff_configs, diff_workloads
from lockstep.replay.divergence import Change
from lockstep.replay.explain import names_of, sentences
from lockstep.replay.workload import ArrivalUnit
from tests.replay.diff_cases import CASES, SHARED, THREE, Case
from tests.replay.workloads import config, request, workload


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


def test_the_deciding_field_of_several_is_found() -> None:
    a = config(max_num_seqs=8, max_num_batched_tokens=512, order="fcfs")
    b = config(max_num_seqs=2, max_num_batched_tokens=256, order="fair")

    found = diff_configs(THREE, a, b)

    assert found.fields == ("max_num_seqs", "max_num_batched_tokens", "order")
    assert found.cause is not None
    assert found.cause.alone == ("max_num_seqs",)


def test_two_fields_that_decide_only_together_are_found_together() -> None:
    """Either limit alone keeps a request out, so it is admitted only if both are raised."""
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


def test_the_reproducer_has_only_needed_requests() -> None:
    """Twenty requests that ended early, then three at once with places for two."""
    early = [request(f"e{n}", 8, 2, arrival=10 * n) for n in range(20)]
    late = [request(f"l{n}", 8, 6, arrival=500) for n in range(3)]

    found = diff_configs(workload(*early, *late), config(max_num_seqs=8), config(max_num_seqs=2))

    assert found.reproducer is not None
    assert [each.name for each in found.reproducer.workload.requests] == ["l0", "l1", "l2"]
    assert [each.arrival for each in found.reproducer.workload.requests] == [0, 0, 0]


def test_the_reproducer_has_ended_requests_whose_cached_blocks_matter() -> None:
    """The cache still holds blocks of a request that ended long before the one that hits them."""
    others = [request(f"o{n}", 8, 2, arrival=10 * n) for n in range(20)]
    first = request("first", 16, arrival=300, contents=SHARED)
    last = request("last", 16, arrival=400, contents=SHARED)

    found = diff_configs(workload(*others, first, last), config(), config(enable_prefix_caching=False))

    assert found.reproducer is not None
    assert [each.name for each in found.reproducer.workload.requests] == ["first", "last"]


def test_two_workloads_diverge_at_their_first_differing_request() -> None:
    other = workload(request("r1", 10), request("r2", 10), request("r3", 14))

    found = diff_workloads(THREE, config(), other, config())

    assert found.divergence is not None
    assert (found.divergence.change, found.num_equal_steps) == (Change.CHUNK, 0)
    assert diff_workloads(THREE, config(), THREE, config()).divergence is None


def test_a_shorter_workload_diverges_at_its_end() -> None:
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


@settings(max_examples=60)
@given(requests_of, limits, limits, st.sampled_from(list(ArrivalUnit)))
def test_every_difference_is_described_and_shown_by_its_reproducer(
    rows: list[tuple[int, int, int, str]], limits_a: dict[str, Any], limits_b: dict[str, Any], unit: ArrivalUnit
) -> None:
    """Random workloads and configs: every situation has a description, and the reproducer shows the same kind."""
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
