"""Repeating steps are counted, which changes only the time that they take."""

from __future__ import annotations

import random

import pytest

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import Explain, Reason, StepEvents, StepPlan
from tests.core.drive import answer, commit, config, needs_interpreted, prompt, scheduler, step


def row_by_row(reason: Reason) -> None:
    """Request reasons and ignore them, so that steps are planned row by row."""


def drive(core: Scheduler, seed: int, explain: Explain | None = None) -> list[tuple[StepPlan, StepEvents]]:
    """Run with random arrivals, aborts, stops, jump-forward tokens and failures, and with long quiet stretches."""
    rng = random.Random(seed)
    seen = []
    ids: list[int] = []
    for index in range(200):
        if index < 6 or rng.random() < 0.05:
            ids.append(core.add(Request(rng.randrange(1, 20), rng.randrange(1, 60), tenant=rng.choice("ab"))))
        if rng.random() < 0.02:
            core.abort(rng.choice(ids))
        if rng.random() < 0.03:
            core.view(rng.choice(ids))
        plan = core.schedule(explain)
        if not plan.has_work:
            continue
        if rng.random() < 0.02:
            core.fail(plan)
            continue
        some = rng.choice(plan.seq_ids)
        kind = rng.random()
        result = answer(plan, {some: 3} if kind < 0.02 else None, (some,) if kind > 0.98 else ())
        if rng.random() < 0.01:
            core.abort(some, FinishReason.DEADLINE)
        seen.append((plan, core.commit(plan, result)))
        if rng.random() < 0.1:
            core.check()
    return seen


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("order", ["fcfs", "fair"])
def test_counted_steps_equal_planned_ones(seed: int, order: str) -> None:
    rng = random.Random(seed)
    width = rng.choice([None, 3, 5])
    limits = config(
        num_blocks=rng.choice([25, 60]), max_num_seqs=8, num_host_blocks=9, order=order, max_num_decode_seqs=width
    )
    counted, planned = Scheduler(limits), Scheduler(limits)
    assert drive(counted, seed) == drive(planned, seed, row_by_row)
    assert counted.stats() == planned.stats()
    assert counted.drain_finished() == planned.drain_finished()


def test_quiet_steps_can_be_skipped_at_once() -> None:
    """Ten lengths of skips give the same plan, views and fingerprint as single steps."""
    for most in range(1, 11):
        one, other = scheduler(block_size=16), scheduler(block_size=16)
        prints = Fingerprint(), Fingerprint()
        for core in (one, other):
            for length in (5, 7, 9):
                core.add(Request(length, 90))
        while one.stats().num_steps < 120 and one.has_work:
            plan = one.schedule()
            prints[0].observe(plan, commit(one, plan))
        skipped = 0
        while other.stats().num_steps < one.stats().num_steps:
            quiet = min(other.num_quiet_steps(), most, one.stats().num_steps - other.stats().num_steps)
            if quiet:
                other.skip(quiet)
                prints[1].repeat(quiet)
                skipped += quiet
            else:
                plan = other.schedule()
                prints[1].observe(plan, commit(other, plan))
        assert skipped > 60
        assert one.stats() == other.stats()
        assert one.drain_finished() == other.drain_finished()
        assert prints[0].hexdigest() == prints[1].hexdigest()


def test_no_step_is_quiet_if_a_decision_is_possible() -> None:
    core = scheduler(block_size=16, max_num_seqs=2)
    assert core.num_quiet_steps() == 0
    core.add(Request(5, 40))
    step(core)
    assert core.num_quiet_steps() == 0, "a prompt has just ended"
    step(core)
    step(core)
    assert core.num_quiet_steps() > 0
    plan = core.schedule()
    assert core.num_quiet_steps() == 0, "a step is under way"
    commit(core, plan)
    with pytest.raises(AssertionError, match="not certain"):
        core.skip(100)
    core.add(Request(5, 40))
    assert core.num_quiet_steps() == 0, "somebody may be admitted"
    for _ in range(3):
        step(core)
    core.add(Request(5, 40))
    for _ in range(3):
        step(core)
    assert core.num_quiet_steps() > 0, "somebody waits, but every slot is taken"
    quiet = core.num_quiet_steps()
    core.abort(1)
    assert core.num_quiet_steps() == 0
    assert quiet < 16


def test_turns_continue_after_a_run() -> None:
    core = scheduler(max_num_seqs=3, max_num_decode_seqs=2)
    core.add(Request(2, 40))
    core.add(Request(2, 40))
    for _ in range(9):
        step(core)
    core.add(Request(2, 40))
    assert step(core).seq_ids == (0, 1, 2), "the newcomer has no place to sample, and leaves the last token"
    assert step(core).seq_ids == (0, 2), "its turn is before those who sampled when it came"


def test_stats_are_current_during_a_run() -> None:
    core = scheduler()
    core.add(Request(5, 40))
    for expected in range(1, 12):
        commit(core, core.schedule())
        assert core.stats().num_generation_tokens == expected
    view = core.view(0)
    assert view is not None
    assert (view.num_known, view.num_computed) == (16, 15)


def test_a_run_ends_when_the_pool_is_full() -> None:
    """Growth that no free block can serve is a decision, so it is planned."""
    core = scheduler(num_blocks=8, block_size=8)
    core.add(Request(20, 40))
    core.add(Request(20, 40))
    while core.has_work:
        step(core)
    assert core.stats().num_preemptions > 0


@needs_interpreted
def test_a_run_begins_after_the_step_that_ended_a_sequence() -> None:
    """The remaining sequences repeat at once, and again after the next one ends at or before its limit; nothing is
    planned."""
    core, planned = scheduler(block_size=16), scheduler(block_size=16)
    planner = core._planner
    num_planned = 0
    plan_row_by_row = planner.plan

    def counting(step_number: int, *rest: object) -> object:
        nonlocal num_planned
        num_planned += 1
        return plan_row_by_row(step_number)

    planner.plan = counting  # type: ignore[method-assign,assignment]  # counts how often it is asked
    for each in (core, planned):
        for length in (9, 5, 20, 30):
            each.add(Request(4, length))
    for number in range(30):
        stops = (3,) if number == 12 else ()
        plans = core.schedule(), planned.schedule(row_by_row)
        assert plans[0] == plans[1]
        if plans[0].has_work:
            assert core.num_held_blocks == core.stats().num_held_blocks > 0
            assert commit(core, plans[0], *stops) == commit(planned, plans[1], *stops)
    assert core.stats() == planned.stats()
    assert not core.has_work
    assert core.num_held_blocks == 0
    assert num_planned == 1, "the first step"


def test_a_step_that_evicts_is_not_repeated() -> None:
    """A step that evicts cached content has a separate record; the next step does not repeat it."""
    core, seen = scheduler(block_size=16, num_blocks=6), Fingerprint()
    core.add(prompt(40, 1, block_size=16))
    plan = core.schedule()
    seen.observe(plan, commit(core, plan))
    core.add(Request(10, 80))
    num_evicting = 0
    while core.has_work:
        plan = core.schedule()
        seen.observe(plan, commit(core, plan))
        if plan.evicted:
            num_evicting += 1
            assert core.num_quiet_steps() == 0
        elif quiet := core.num_quiet_steps():
            core.skip(quiet)
            seen.repeat(quiet)
    assert num_evicting > 0
