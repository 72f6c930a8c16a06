"""Bulk prompts, which become vectors, give way to prompts of generations, and always get a share of each step."""

from __future__ import annotations

import pytest

from lockstep.core.request import FinishReason, Priority, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan
from tests.core.drive import rows, run, scheduler, step

LIMITS = {"max_num_batched_tokens": 512, "max_chunk_tokens": 256, "max_model_len": 4096, "num_blocks": 4096}


def core(**limits: object) -> Scheduler:
    return scheduler(**(LIMITS | limits))


def bulk(num_tokens: int, priority: int = Priority.NORMAL) -> Request:
    return Request(num_tokens, 1, priority=priority, reads_cache=False, is_bulk=True)


def prompt_tokens(plan: StepPlan, seq_ids: range) -> int:
    return sum(length for seq_id, _, length in rows(plan) if seq_id in seq_ids)


@pytest.mark.parametrize("num_tokens", [5, 500, 4000])
def test_a_request_after_a_thousand_bulk_ones_is_in_the_next_step(num_tokens: int) -> None:
    scheduling = core(max_num_queued_reqs=2000)
    for _ in range(1000):
        scheduling.add(bulk(num_tokens))
    step(scheduling)
    chat = scheduling.add(Request(200, 5))
    assert (chat, 0, 200) in rows(step(scheduling))


def test_bulk_prompts_get_a_quarter_of_each_step_under_constant_load() -> None:
    scheduling = core()
    bulks = range(8)
    for _ in bulks:
        scheduling.add(bulk(500))
    for _ in range(40):
        scheduling.add(Request(1000, 1))
    for _ in range(31):
        plan = step(scheduling)
        assert plan.num_prompt_tokens == 512
        assert 126 <= prompt_tokens(plan, bulks) <= 128


def test_bulk_prompts_get_the_remaining_budget() -> None:
    scheduling = core()
    for _ in range(3):
        scheduling.add(bulk(500))
    scheduling.add(Request(20, 5))
    assert rows(step(scheduling)) == [(3, 0, 20), (0, 0, 256), (1, 0, 236)]


def test_a_step_of_one_prompt_token_is_not_divided() -> None:
    scheduling = core(max_num_prefill_tokens=1)
    scheduling.add(bulk(5))
    scheduling.add(Request(2, 1))
    assert [rows(step(scheduling)) for _ in range(3)] == [[(1, 0, 1)], [(1, 1, 1)], [(0, 0, 1)]]


def test_bulk_requests_alone_are_planned_like_others() -> None:
    columns = []
    for is_bulk in (False, True):
        scheduling = core()
        for num_tokens in (500, 3, 900, 64, 64, 1):
            scheduling.add(Request(num_tokens, 1, is_bulk=is_bulk))
        columns.append([(rows(plan), plan.admitted) for plan in run(scheduling)])
    assert columns[0] == columns[1]


def test_without_chunking_bulk_requests_are_served_in_order_of_arrival() -> None:
    """A quarter of a step may be too small for a whole prompt, which would then wait as long as others arrive."""
    scheduling = core(chunking=False)
    scheduling.add(bulk(500))
    scheduling.add(Request(500, 1))
    assert rows(step(scheduling)) == [(0, 0, 500)]


def test_a_bulk_request_gets_its_blocks_under_constant_load() -> None:
    """It needs half of the pool; each concurrent request takes a quarter."""
    scheduling = core(num_blocks=16, block_size=16, max_model_len=256, max_skips=4)
    others = [scheduling.add(Request(60, 60)) for _ in range(4)]
    waits = scheduling.add(bulk(128))
    for _ in range(400):
        scheduling.add(Request(60, 4))
        step(scheduling)
        if (view := scheduling.view(waits)) is None:
            break
    else:
        pytest.fail(f"it still waits: {view}")
    assert others


def test_an_aborted_bulk_request_leaves_nothing_behind() -> None:
    scheduling = core()
    first, second = scheduling.add(bulk(2000)), scheduling.add(bulk(2000))
    step(scheduling)
    assert scheduling.abort(first, FinishReason.ABORT)
    assert scheduling.abort(second, FinishReason.ABORT)
    scheduling.check()
    assert not scheduling.has_unfinished


def test_a_bulk_request_of_a_higher_priority_does_not_wait_for_the_ends_of_long_ones() -> None:
    """Two long prompts take whole steps; another one of their priority waits until one of them ends."""
    scheduling = core(order="priority")
    for _ in range(2):
        scheduling.add(bulk(4000))
    step(scheduling)
    equal, critical = scheduling.add(bulk(300)), scheduling.add(bulk(300, Priority.CRITICAL))
    assert rows(step(scheduling)) == [(critical, 0, 256), (0, 256, 256)]
    assert rows(step(scheduling)) == [(critical, 256, 44), (0, 512, 256), (1, 256, 212)]
    assert rows(step(scheduling)) == [(0, 768, 256), (1, 468, 256)]
    plans = list(run(scheduling))
    assert next(plan for plan in plans if equal in plan.admitted).step == 15
    scheduling.check()


def test_in_order_of_arrival_a_priority_does_not_overtake_bulk_requests() -> None:
    scheduling = core()
    for _ in range(2):
        scheduling.add(bulk(4000))
    step(scheduling)
    scheduling.add(bulk(300, Priority.CRITICAL))
    assert rows(step(scheduling)) == [(0, 256, 256), (1, 256, 256)]
