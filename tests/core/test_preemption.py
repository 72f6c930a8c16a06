"""Preemption: victims, the number of lost blocks, and resumption."""

from __future__ import annotations

import pytest

from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState, SequenceView
from tests.core.drive import prompt, rows, run, scheduler, step


def view(core: Scheduler, seq_id: int) -> SequenceView:
    found = core.view(seq_id)
    assert found is not None
    return found


def test_the_last_of_three_prompts_is_preempted_when_the_pool_is_full() -> None:
    """6 blocks, three 8-token prompts: 0 and 1 decode, 2 is preempted; 1 then waits for 0, and 2 resumes last."""
    core = scheduler(num_blocks=6, num_host_blocks=6)
    for _ in range(3):
        core.add(Request(8, 3))
    assert step(core).tables == ((1, 2), (3, 4), (5, 6))
    plan = step(core)
    assert rows(plan) == [(0, 8, 1), (1, 8, 1)]
    assert plan.tables == ((1, 2, 6), (3, 4, 5))
    assert plan.preempted == (2,)
    assert plan.swap_out == ((6, 0), (5, 1))
    assert view(core, 2).state is SequenceState.PREEMPTED
    assert (core.num_running, core.num_waiting) == (2, 1)
    step(core)
    plan = step(core)
    assert plan.resumed == (2,)
    assert len(plan.swap_in) == 2
    assert rows(plan) == [(2, 8, 1)], "nothing is computed twice"
    run(core)
    assert [done.num_preemptions for done in core.drain_finished()] == [0, 0, 1]


def test_a_victim_recomputes_only_its_lost_blocks() -> None:
    core = scheduler(num_blocks=6, preemption="recompute")
    core.add(Request(11, 3))
    core.add(Request(11, 9))
    assert step(core).tables == ((1, 2, 3), (4, 5, 6))
    assert rows(step(core)) == [(0, 11, 1), (1, 11, 1)]
    plan = step(core)
    assert rows(plan) == [(0, 12, 1)]
    assert (plan.preempted, plan.swap_out) == ((1,), ())
    kept = view(core, 1)
    assert kept.table == (4, 5)
    assert kept.num_computed == 8
    assert (kept.num_known, kept.num_recomputed_tokens) == (13, 4)
    plans = run(core)
    resumed = next(plan for plan in plans if plan.resumed)
    index = plans.index(resumed)
    assert [rows(plan) for plan in plans[index : index + 2]] == [[(1, 8, 5)], [(1, 13, 1)]], "at once, like a prompt"
    assert [plan.samples for plan in plans[index : index + 2]] == [(True,), (True,)]
    assert [done.first_token_step for done in core.drain_finished()] == [0, 0], "a prompt computed again is not news"


def test_lost_blocks_of_answers_are_recomputed_in_chunks_if_kernels_are_equal() -> None:
    core = scheduler(num_blocks=6, preemption="recompute", max_chunk_tokens=4)
    core.add(Request(11, 3))
    core.add(Request(11, 9))
    plans = run(core)
    index = next(number for number, plan in enumerate(plans) if plan.resumed)
    assert [rows(plan) for plan in plans[index : index + 3]] == [[(1, 8, 4)], [(1, 12, 1)], [(1, 13, 1)]]
    assert [plan.samples for plan in plans[index : index + 2]] == [(False,), (True,)]
    assert [plan.num_prompt_tokens for plan in plans[index : index + 3]] == [4, 1, 0]
    assert [done.first_token_step for done in core.drain_finished()] == [2, 2], "computed again, it is not news"


def test_a_long_answer_is_not_replayed_token_by_token() -> None:
    """Two sequences of 104 tokens in a pool for 120: one loses more than 40 until the other has ended."""
    num_steps = {}
    for chunking in (False, True):
        core = scheduler(num_blocks=30, preemption="recompute", chunking=chunking)
        core.add(Request(4, 100))
        core.add(Request(4, 100))
        num_steps[chunking] = len(run(core))
        assert core.stats().num_preemptions == 1
    assert num_steps[False] - num_steps[True] >= 40


def test_jump_forward_segments_are_recomputed_whole_and_do_not_sample() -> None:
    core = scheduler(num_blocks=7, preemption="recompute", max_forced_tokens=4, chunking=False)
    core.add(Request(10, 18))
    core.add(Request(6, 14))
    step(core, tokens={1: 3})
    step(core, tokens={1: 2})
    before = view(core, 1)
    assert [tuple(segment) for segment in before.segments] == [(0, 6), (6, 3), (9, 2)]
    while view(core, 1).state is SequenceState.RUNNING:
        step(core, tokens={0: 4})
    segments = view(core, 1).segments
    assert view(core, 1).num_computed == 8, "a border of blocks, inside the segment at 6"
    replayed = [(start, length) for plan in run(core) for seq_id, start, length in rows(plan) if seq_id == 1]
    outputs = [chunk for chunk in replayed if chunk[0] >= 6]
    assert outputs[: len(segments) - 1] == [tuple(segment) for segment in segments[1:]]


def test_a_preemption_may_leave_one_prompt_token() -> None:
    """A prompt of 9 tokens in blocks of 4 loses its third block."""
    core = scheduler(num_blocks=7, preemption="recompute")
    core.add(Request(15, 9))
    core.add(Request(9, 9))
    step(core)
    while view(core, 1).state is SequenceState.RUNNING:
        step(core)
    assert (view(core, 1).table, view(core, 1).num_computed) == ((5, 6), 8)
    core.check()


def test_blocks_without_host_space_are_dropped_and_recomputed() -> None:
    core = scheduler(num_blocks=7, num_host_blocks=1, max_forced_tokens=8)
    core.add(Request(8, 20))
    core.add(Request(20, 2))
    step(core, tokens={0: 8})
    plan = step(core, tokens={0: 8})
    assert rows(plan) == [(0, 8, 8)]
    assert len(plan.swap_out) == 1
    held = view(core, 1)
    assert (len(held.table), len(held.host_table), held.num_computed) == (3, 1, 16)
    run(core)


def test_a_second_preemption_drops_the_end_from_the_host() -> None:
    """Blocks nearer to the head take the only free space of the host; the sequence stays contiguous."""
    core = scheduler(num_blocks=6, num_host_blocks=1)
    core.add(Request(8, 14))
    core.add(Request(15, 2))
    step(core)
    step(core)
    first = view(core, 1)
    assert first.state is SequenceState.PREEMPTED
    for _ in range(8):
        step(core)
    second = view(core, 1)
    assert len(second.table) < len(first.table)
    assert len(second.host_table) == 1
    assert second.num_computed == (len(second.table) + 1) * 4
    run(core)


def test_the_lowest_priority_is_preempted_first_then_the_newest() -> None:
    core = scheduler(num_blocks=6)
    core.add(Request(8, 5, priority=1))
    core.add(Request(8, 5, priority=0))
    core.add(Request(8, 5, priority=0))
    step(core)
    plan = step(core)
    assert plan.preempted == (0,)
    assert plan.seq_ids == (1, 2)


def test_a_growing_sequence_of_the_lowest_priority_waits_and_keeps_its_blocks() -> None:
    core = scheduler(num_blocks=5)
    core.add(Request(10, 2))
    core.add(Request(8, 2))
    step(core)
    plan = step(core)
    assert rows(plan) == [(0, 10, 1)]
    assert plan.preempted == ()
    waiting = view(core, 1)
    assert (waiting.state, len(waiting.table)) == (SequenceState.RUNNING, 2)
    assert rows(step(core)) == [(1, 8, 1)]


def test_no_new_sequence_is_admitted_while_a_running_one_lacks_blocks() -> None:
    core = scheduler(num_blocks=8, max_forced_tokens=16)
    core.add(Request(12, 4))
    core.add(Request(8, 20))
    step(core, tokens={1: 16})
    core.add(Request(4, 2))
    plan = step(core)
    assert rows(plan) == [(0, 12, 1)]
    assert core.num_waiting == 1


def test_no_preempted_sequence_resumes_while_a_running_one_lacks_blocks() -> None:
    """1 needs four blocks for its segment, and two are free: the number that 3 lost, which would keep 1 waiting
    forever."""
    core = scheduler(num_blocks=6)
    for length, output in ((4, 20), (4, 21), (8, 9), (4, 2)):
        core.add(Request(length, output))
    step(core)
    assert step(core, tokens={1: 16}).preempted == (3,)
    core.abort(2)
    assert core.stats().num_free_blocks == 2
    plan = step(core)
    assert (rows(plan), plan.resumed) == ([(0, 5, 1)], ())


def test_the_place_of_a_sequence_without_blocks_goes_to_the_next_in_turn() -> None:
    """Width 1 with a full pool, in the turn of the newest sequence: without this rule there would be no progress."""
    core = scheduler(num_blocks=4, max_num_seqs=2, max_num_decode_seqs=1)
    core.add(Request(8, 5))
    core.add(Request(8, 5))
    assert rows(step(core)) == [(0, 0, 8), (1, 0, 7)]
    assert rows(step(core)) == [(1, 7, 1)]
    plan = step(core)
    assert (rows(plan), plan.preempted) == ([(0, 8, 1)], (1,))
    run(core)


def test_a_planned_victim_is_removed_and_returns_its_budget() -> None:
    """2 has taken a block from 3 and has its row; then 0, in the former place of 3, needs four blocks for its segment,
    and 1 gets the place that 2 loses."""
    core = scheduler(num_blocks=7, max_num_seqs=4, max_num_decode_seqs=2)
    for length in (4, 2, 8, 8):
        core.add(Request(length, 20 if length == 4 else 6))
    assert [plan.seq_ids for plan in (step(core), step(core))] == [(0, 1, 2, 3), (2, 3)]
    assert step(core, tokens={0: 16}).seq_ids == (0, 1)
    plan = step(core)
    assert rows(plan) == [(0, 5, 16), (1, 3, 1)]
    assert plan.preempted == (3, 2)
    run(core)


def test_an_unfinished_prompt_can_be_a_victim() -> None:
    core = scheduler(num_blocks=6, max_chunk_tokens=4)
    core.add(Request(3, 9))
    core.add(Request(20, 1))
    step(core)
    step(core)
    plan = step(core)
    assert plan.preempted == (1,)
    assert view(core, 1).num_computed == 8
    assert len(view(core, 1).table) == 2, "what holds nothing yet is not kept"
    run(core)


def test_a_preempted_sequence_blocks_its_priority_and_lower_ones() -> None:
    core = scheduler(num_blocks=8, preemption="recompute", order="priority")
    core.add(Request(15, 9))
    core.add(Request(9, 9))
    short = core.add(Request(1, 3, priority=-1))
    while core.stats().num_preempted == 0:
        step(core)
    core.abort(short)
    assert core.stats().num_free_blocks == 1
    core.add(Request(2, 2, priority=0))
    core.add(Request(2, 2, priority=1))
    assert step(core).admitted == ()
    critical = core.add(Request(2, 2, priority=-2))
    assert step(core).admitted == (critical,)
    assert core.num_waiting == 3, "a block is free, but the preempted one comes first"


def test_resuming_takes_blocks_from_later_preempted_sequences() -> None:
    """All are preempted but still have blocks: the best resumes at the cost of worse ones."""
    core = scheduler(num_blocks=6)
    for _ in range(3):
        core.add(Request(7, 9))
    step(core)
    core.fail(core.schedule())
    assert core.num_running == 0
    plans = run(core)
    assert plans[0].resumed[0] == 0
    assert len(core.drain_finished()) == 3


def test_reserve_admission_never_preempts() -> None:
    core = scheduler(num_blocks=7, admission="reserve")
    for _ in range(6):
        core.add(Request(5, 7))
    plans = run(core)
    assert not any(plan.preempted or plan.swap_out for plan in plans)
    assert max(plan.num_sequences for plan in plans) == 2


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_shared_blocks_are_released_and_never_moved(preemption: str) -> None:
    shared = list(range(8))
    core = scheduler(num_blocks=6, num_host_blocks=6, preemption=preemption)
    core.add(prompt([9, 9, 9, 9, 9, 9], 18))
    core.add(prompt([*shared, 1, 1], 2))
    step(core)
    core.add(prompt([*shared, 2, 2], 2))
    moved = {device for plan in run(core) for device, _ in plan.swap_out}
    assert not moved & {3, 4}
    assert len(core.drain_finished()) == 3


def test_a_victim_whose_blocks_are_all_shared_releases_all() -> None:
    """Two sequences share all their device blocks: only both together free any."""
    core = scheduler(num_blocks=8, num_host_blocks=1)
    old = core.add(prompt([9] * 8, 24))
    core.add(prompt([*range(8), 1, 1], 20))
    step(core)
    core.add(prompt([*range(8), 2, 2], 20))
    seen = []
    while core.view(old) is not None:
        seen.append(step(core))
    assert {seq_id for plan in seen for seq_id in plan.preempted} == {1, 2}
    run(core)
    assert core.stats().num_preempted == 0


def test_recomputed_tokens_are_not_hits() -> None:
    core = scheduler(num_blocks=6, preemption="recompute")
    core.add(prompt([1] * 8, 9))
    core.add(prompt([2] * 9, 5))
    run(core)
    stats = core.stats()
    assert stats.num_preemptions == 1
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (17, 0)
    first, second = sorted(core.drain_finished())
    assert (first.num_preemptions, second.num_preemptions, second.num_cached_tokens) == (0, 1, 0)


def test_resuming_needs_one_spare_free_block() -> None:
    """Otherwise it would be a victim again at its next block border."""
    core = scheduler(num_blocks=5, num_host_blocks=5)
    for length in (4, 8, 8):
        core.add(Request(length, 8))
    step(core)
    assert step(core).preempted == (2,)
    core.abort(1)
    assert core.stats().num_free_blocks == 3, "as many as it needs"
    assert step(core).resumed == ()
    core.abort(0)
    assert step(core).resumed == (2,)
