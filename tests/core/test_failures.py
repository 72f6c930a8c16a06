"""Commands during a step, and failing steps: nothing leaks, and no uncertain block is used."""

from __future__ import annotations

import pytest

from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState, SequenceView
from tests.core.drive import commit, prompt, rows, scheduler, step


def view(core: Scheduler, seq_id: int) -> SequenceView:
    found = core.view(seq_id)
    assert found is not None
    return found


def test_a_sequence_can_be_ended_in_any_state() -> None:
    core = scheduler(num_blocks=6, num_host_blocks=2, max_num_seqs=3)
    for _ in range(4):
        core.add(Request(8, 8))
    step(core)
    step(core)
    states = [view(core, seq_id).state.value for seq_id in range(4)]
    assert states == ["running", "running", "preempted", "waiting"]
    for seq_id in (3, 2, 1, 0):
        assert core.abort(seq_id, FinishReason.DEADLINE)
        core.check()
        assert not core.abort(seq_id)
    assert not core.has_work
    stats = core.stats()
    assert (stats.num_held_blocks, stats.num_free_host_blocks) == (0, 2)
    assert not core.abort(99)


def test_a_token_in_flight_is_committed_and_not_published() -> None:
    core = scheduler()
    core.add(prompt(9, 5))
    core.add(prompt([1] * 9, 5))
    plan = core.schedule()
    assert core.abort(0)
    assert not core.abort(0), "once"
    assert view(core, 0).state is SequenceState.RUNNING
    assert commit(core, plan).finished == ((0, FinishReason.ABORT),)
    core.check()
    core.add(prompt(9, 5))
    assert rows(step(core)) == [(1, 9, 1), (2, 8, 1)], "its prompt blocks stayed cached"
    assert core.drain_finished()[0].num_output_tokens == 1


def test_prompt_blocks_of_an_aborted_sequence_stay_cached() -> None:
    core = scheduler()
    core.add(prompt(10, 5))
    step(core)
    core.abort(0)
    core.add(prompt(10, 5))
    assert rows(step(core)) == [(1, 8, 2)]


def test_a_sequence_outside_of_the_current_step_ends_at_once() -> None:
    core = scheduler(max_num_seqs=1)
    core.add(Request(4, 5))
    core.add(Request(4, 5))
    plan = core.schedule()
    assert core.abort(1)
    assert core.view(1) is None
    assert commit(core, plan).finished == ()


def test_a_failed_step_withdraws_its_blocks_and_can_be_repeated() -> None:
    core = scheduler(num_blocks=10)
    core.add(Request(4, 9))
    core.add(Request(9, 9))
    step(core)
    held = core.stats().num_held_blocks
    plan = core.schedule()
    assert core.stats().num_held_blocks > held
    assert core.fail(plan) == (0, 1)
    core.check()
    assert core.stats().num_held_blocks == held
    assert core.stats().num_failed_steps == 1
    assert rows(step(core)) == rows(plan)


def test_after_a_failed_step_the_engine_ends_its_sequences() -> None:
    core = scheduler(num_blocks=10)
    core.add(Request(4, 9))
    core.add(Request(9, 9))
    for seq_id in core.fail(core.schedule()):
        assert core.abort(seq_id, FinishReason.ERROR)
    assert not core.has_work
    assert core.stats().num_held_blocks == 0
    core.check()


def test_an_abort_while_a_step_fails_still_counts() -> None:
    core = scheduler()
    core.add(Request(4, 9))
    plan = core.schedule()
    core.abort(0, FinishReason.DEADLINE)
    core.fail(plan)
    assert core.drain_finished()[0].reason is FinishReason.DEADLINE


def test_blocks_moved_by_a_failed_step_are_recomputed() -> None:
    core = scheduler(num_blocks=6, num_host_blocks=6)
    for _ in range(3):
        core.add(Request(8, 3))
    step(core)
    plan = core.schedule()
    assert plan.swap_out
    core.fail(plan)
    core.check()
    assert view(core, 2).num_computed == 0
    assert core.stats().num_free_host_blocks == 6
    core.abort(0)
    core.abort(1)
    plan = step(core)
    assert (plan.resumed, rows(plan)) == ((2,), [(2, 0, 9)])


def test_blocks_swapped_in_by_a_failed_step_are_recomputed() -> None:
    core = scheduler(num_blocks=6, num_host_blocks=6)
    for _ in range(3):
        core.add(Request(8, 3))
    step(core)
    step(core)
    core.abort(0)
    core.abort(1)
    plan = core.schedule()
    assert plan.swap_in
    core.fail(plan)
    core.check()
    assert view(core, 2).num_computed == 0
    assert rows(step(core)) == [(2, 0, 9)], "the answer too"


def test_a_sequence_that_is_resumed_and_aborted_in_one_step_leaks_nothing() -> None:
    core = scheduler(num_blocks=6, num_host_blocks=6)
    for _ in range(3):
        core.add(Request(8, 3))
    step(core)
    step(core)
    core.abort(0)
    core.abort(1)
    plan = core.schedule()
    core.abort(2)
    commit(core, plan)
    core.check()
    assert core.stats().num_free_host_blocks == 6


def test_results_must_follow_the_order_of_plans() -> None:
    core = scheduler()
    core.add(Request(4, 9))
    plan = core.schedule()
    with pytest.raises(AssertionError, match="neither committed nor failed"):
        core.schedule()
    commit(core, plan)
    with pytest.raises(AssertionError, match="last plan"):
        commit(core, plan)
    with pytest.raises(AssertionError, match="last plan"):
        core.fail(plan)


def test_a_sequence_that_fills_the_pool_resumes_without_a_spare_block() -> None:
    core = scheduler(num_blocks=2)
    core.add(Request(5, 4))
    step(core)
    core.fail(core.schedule())
    assert rows(step(core)) == [(0, 5, 1)]
