"""Admission from the queue: skips, priorities, aging, tenants, bounds, siblings."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from lockstep.core.request import Request
from lockstep.errors import PromptTooLongError, QueueFullError
from tests.core.drive import needs_interpreted, prompt, rows, run, scheduler, step
from tests.core.oracle import Loop
from tests.core.test_oracle import drive, random_config


def test_a_request_that_does_not_fit_blocks_the_queue_after_max_skips() -> None:
    core = scheduler(num_blocks=10, max_skips=2)
    core.add(Request(20, 20))
    step(core)
    big = core.add(Request(30, 2))
    small = [core.add(Request(2, 2)) for _ in range(5)]
    plan = step(core)
    assert plan.admitted == tuple(small[:2])
    while core.view(0) is not None:
        assert not step(core).admitted
    assert step(core).admitted[0] == big


def test_a_blocked_priority_blocks_lower_ones_and_not_higher_ones() -> None:
    core = scheduler(num_blocks=10, max_skips=1, order="priority")
    core.add(Request(20, 15))
    step(core)
    core.add(Request(30, 2, priority=0))
    core.add(Request(2, 2, priority=0))
    assert step(core).admitted == (2,)
    core.add(Request(2, 2, priority=1))
    assert step(core).admitted == ()
    critical = core.add(Request(2, 2, priority=-2))
    assert step(core).admitted == (critical,)


def test_the_number_of_skipped_requests_per_step_is_limited() -> None:
    core = scheduler(num_blocks=10, max_skips=2)
    core.add(Request(20, 15))
    step(core)
    for _ in range(3):
        core.add(Request(30, 2))
    core.add(Request(2, 2))
    assert step(core).admitted == ()


def test_priority_order_admits_the_highest_priority_first() -> None:
    core = scheduler(max_num_seqs=1, order="priority")
    for priority in (1, 0, -2, -1):
        core.add(Request(3, 1, priority=priority))
    assert [plan.seq_ids for plan in run(core)] == [(2,), (3,), (1,), (0,)]


def test_a_waiting_request_ages_to_higher_priorities() -> None:
    core = scheduler(max_num_seqs=1, order="priority", priority_aging_steps=3)
    core.add(Request(3, 1))
    low = core.add(Request(3, 1, priority=1))
    served: list[int] = []
    for _ in range(12):
        core.add(Request(3, 1, priority=0))
        served += step(core).seq_ids
    assert low in served[:8], "a stream of better ones cannot starve it"
    never = scheduler(max_num_seqs=1, order="priority")
    never.add(Request(3, 1))
    low = never.add(Request(3, 1, priority=1))
    for _ in range(12):
        never.add(Request(3, 1, priority=0))
        assert low not in step(never).seq_ids


def test_fair_order_gives_tenants_equal_tokens() -> None:
    core = scheduler(max_num_seqs=1, order="fair")
    for tenant in "aaaabb":
        core.add(Request(10, 5, tenant=tenant))
    order = [plan.admitted[0] for plan in run(core) if plan.admitted]
    assert order == [0, 4, 1, 5, 2, 3]


def test_fair_order_counts_every_token_of_a_long_quiet_stretch() -> None:
    core = scheduler(max_num_seqs=1, order="fair")
    core.add(Request(20, 3, tenant="b"))
    core.add(Request(4, 60, tenant="a"))
    core.add(Request(4, 2, tenant="b"))
    core.add(Request(4, 2, tenant="a"))
    assert [plan.admitted[0] for plan in run(core) if plan.admitted] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(40))
def test_skipping_requests_that_cannot_fit_changes_no_decision(seed: int) -> None:
    """A step that explains tries each request again, even if nothing was freed."""
    plans = []
    for explain in (None, lambda reason: None):
        rng = random.Random(seed)
        loop = Loop(random_config(rng), explain=explain)
        drive(loop, rng)
        plans.append(loop.plans)
    assert plans[0] == plans[1]


class CountedReads(tuple[bytes, ...]):
    """Hashes of a prompt that count how often a lookup in the cache begins."""

    num_lookups = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_lookups += index == 0
        return super().__getitem__(index)


@needs_interpreted
def test_waiting_requests_are_considered_again_only_after_a_change() -> None:
    core = scheduler(num_blocks=10)
    first, second, third = (prompt([token] * length, 2) for token, length in ((1, 20), (2, 30), (3, 30)))
    hashes = [CountedReads(each.block_hashes) for each in (second, third)]
    core.add(replace(first, max_output_tokens=9))
    core.add(replace(second, block_hashes=hashes[0]))
    step(core)
    before = hashes[0].num_lookups
    for _ in range(5):
        step(core)
    assert hashes[0].num_lookups - before == 1, "once after the first prompt was published"
    core.add(replace(third, block_hashes=hashes[1]))
    step(core)
    assert [each.num_lookups for each in hashes] == [before + 2, 1]
    core.abort(0)
    assert step(core).admitted == (1,)


def test_a_request_that_lacked_budget_is_considered_in_the_next_step() -> None:
    core = scheduler(max_num_prefill_tokens=6, max_chunk_tokens=6)
    core.add(Request(12, 30))
    step(core)
    core.add(Request(5, 2))
    assert [step(core).admitted for _ in range(2)] == [(), (1,)]


def test_a_sibling_is_considered_again_without_freed_blocks() -> None:
    core = scheduler(max_chunk_tokens=6)
    first = core.add(Request(12, 30))
    core.add(Request(12, 30, sibling_of=first))
    assert [step(core).admitted for _ in range(3)] == [(0,), (), (1,)]


def test_a_new_head_of_the_queue_is_considered_without_freed_blocks() -> None:
    core = scheduler(num_blocks=20, max_skips=0, order="fair")
    core.add(Request(20, 20, tenant="a"))
    core.add(Request(4, 40, tenant="b"))
    step(core)
    core.add(Request(60, 2, tenant="b"))
    core.add(Request(2, 2, tenant="a"))
    assert [step(core, tokens={1: 16}).admitted for _ in range(2)] == [(), ()]
    assert step(core).admitted == (3,), "b has been served more by now"


def test_the_bounded_queue_refuses_and_changes_nothing() -> None:
    core = scheduler(max_num_queued_reqs=1)
    core.add(Request(3, 1))
    with pytest.raises(QueueFullError):
        core.add(Request(3, 1))
    with pytest.raises(PromptTooLongError):
        core.add(Request(3000, 1))
    assert core.num_waiting == 1
    step(core)
    assert core.add(Request(3, 1)) == 1


def test_finished_results_are_bounded() -> None:
    core = scheduler(max_finished=2)
    for _ in range(3):
        core.add(Request(3, 1))
    step(core)
    assert [done.seq_id for done in core.drain_finished()] == [1, 2]


# -- siblings --------------------------------------------------------------------------------------------------------


def test_siblings_wait_for_the_first_prompt_and_hit_its_full_blocks() -> None:
    core = scheduler(max_chunk_tokens=6)
    first = core.add(prompt(10))
    others = [core.add(prompt(10, sibling_of=first)) for _ in range(2)]
    assert rows(step(core)) == [(0, 0, 6)]
    assert rows(step(core)) == [(0, 6, 4)]
    plan = step(core)
    assert plan.admitted == tuple(others)
    assert rows(plan) == [(0, 10, 1), (1, 8, 2), (2, 8, 2)]


def test_siblings_are_admissible_when_the_first_has_ended() -> None:
    core = scheduler()
    first = core.add(prompt(10))
    core.add(prompt(10, sibling_of=first))
    core.abort(first)
    assert step(core).seq_ids == (1,)


def test_waiting_siblings_do_not_count_as_skipped() -> None:
    core = scheduler(max_skips=0, max_chunk_tokens=4)
    first = core.add(prompt(10))
    core.add(prompt(10, sibling_of=first))
    core.add(Request(3, 2))
    assert step(core).admitted == (0, 2)
