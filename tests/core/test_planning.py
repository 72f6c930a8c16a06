"""Contents of a step: exact chunks, turns, limits, admission."""

from __future__ import annotations

import pytest

from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState
from lockstep.core.step import StepPlan
from tests.core.drive import commit, config, lengths, prompt, rows, run, scheduler, step


def test_exact_chunk_arithmetic() -> None:
    core = scheduler(max_num_batched_tokens=1024, max_chunk_tokens=400)
    for _ in range(3):
        core.add(Request(800, 10))
    assert [list(step(core).lengths) for _ in range(3)] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_ten_tokens_in_chunks_of_four() -> None:
    core = scheduler(max_chunk_tokens=4)
    core.add(Request(10, 1))
    core.add(Request(9, 1))
    plans = run(core)
    assert [[length for seq_id, _, length in rows(plan) if seq_id == 0] for plan in plans] == [[4], [4], [2]]
    assert [[length for seq_id, _, length in rows(plan) if seq_id == 1] for plan in plans] == [[4], [4], [1]]


def test_nine_tokens_in_chunks_of_four() -> None:
    core = scheduler(max_chunk_tokens=4)
    core.add(prompt(9, 1))
    assert [plan.lengths for plan in run(core)] == [(4,), (4,), (1,)]


def test_without_a_place_to_sample_a_prompt_stops_one_token_short_if_kernels_are_equal() -> None:
    core = scheduler(max_num_seqs=2, max_num_decode_seqs=1)
    core.add(prompt([1] * 9, 4))
    core.add(prompt([2] * 9, 4))
    assert rows(step(core)) == [(0, 0, 9), (1, 0, 8)]
    run(core)


def test_the_first_step_admits_all_fitting_prompts_in_order() -> None:
    core = scheduler()
    ids = [core.add(Request(n, 3)) for n in (5, 1, 9)]
    assert core.num_waiting == core.num_unfinished == 3
    plan = step(core)
    assert rows(plan) == [(0, 0, 5), (1, 0, 1), (2, 0, 9)]
    assert plan.admitted == tuple(ids)
    assert plan.samples == (True, True, True)
    assert (core.num_waiting, core.num_running, core.num_unfinished) == (0, 3, 3)
    assert (plan.num_tokens, plan.num_sequences, plan.num_samples) == (15, 3, 3)


def test_prompts_and_decodes_share_a_step() -> None:
    core = scheduler()
    core.add(Request(5, 5))
    step(core)
    core.add(Request(6, 5))
    plan = step(core)
    assert rows(plan) == [(0, 5, 1), (1, 0, 6)]
    assert (plan.num_prompt_tokens, plan.has_prefill, plan.has_decode) == (6, True, True)
    plan = step(core)
    assert (plan.num_prompt_tokens, plan.has_prefill, plan.has_decode) == (0, False, True)


def test_reserve_and_extend_admission() -> None:
    """Blocks are allocated with the tokens in one admission mode, all at once in the other."""
    optimistic, reserve = scheduler(), scheduler(admission="reserve")
    for core in (optimistic, reserve):
        core.add(Request(4, 9))
    assert [len(plan.tables[0]) for plan in run(optimistic)] == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert [len(plan.tables[0]) for plan in run(reserve)] == [4] * 9


def test_a_sequence_at_its_limit_ends_with_length() -> None:
    core = scheduler(max_model_len=8)
    core.add(Request(5))
    core.add(Request(5, 1))
    first = core.schedule()
    assert commit(core, first).finished == ((1, FinishReason.LENGTH),)
    assert step(core).seq_ids == (0,)
    plan = core.schedule()
    assert plan.starts == (6,), "the last token, at position 7, needs no KV"
    assert commit(core, plan).finished == ((0, FinishReason.LENGTH),)
    assert not core.has_work
    assert [done.num_output_tokens for done in core.drain_finished()] == [1, 3]
    assert core.drain_finished() == ()


def test_an_idle_scheduler_plans_nothing_and_counts_no_step() -> None:
    core = scheduler()
    assert not core.schedule().has_work
    core.add(Request(2, 1))
    assert step(core).step == 0
    assert core.schedule() == StepPlan(1, (), (), (), (), (), (), (), (), ())


def test_the_token_budget_limits_first_chunks() -> None:
    core = scheduler(max_num_seqs=4, max_num_batched_tokens=20, max_chunk_tokens=12)
    for _ in range(4):
        core.add(Request(12, 2))
    assert lengths(step(core)) == {0: 12, 1: 8}


def test_the_prefill_budget_limits_prompts_and_not_decodes() -> None:
    core = scheduler(max_num_seqs=4, max_num_batched_tokens=100, max_num_prefill_tokens=5)
    for _ in range(3):
        core.add(Request(4, 9))
    assert [lengths(step(core)) for _ in range(4)] == [
        {0: 4, 1: 1},
        {0: 1, 1: 3, 2: 2},
        {0: 1, 1: 1, 2: 2},
        {0: 1, 1: 1, 2: 1},
    ]


def test_adaptive_share_limits_prompts_while_others_decode() -> None:
    core = scheduler(max_num_seqs=4, max_num_batched_tokens=40, prefill_share="adaptive")
    for _ in range(3):
        core.add(Request(3, 20))
    step(core)
    core.add(Request(100, 2))
    assert lengths(step(core))[3] == 10, "one prompt waits beside three decodes: a quarter of the budget"
    assert lengths(step(core))[3] == 10, "an admitted prompt still waits for computing"


def test_slots_limit_running_sequences() -> None:
    core = scheduler(max_num_seqs=2)
    for _ in range(3):
        core.add(Request(3, 2))
    assert step(core).seq_ids == (0, 1)
    assert step(core).seq_ids == (0, 1)
    assert step(core).seq_ids == (2,)


def test_decode_width_rotates_and_starves_no_sequence() -> None:
    core = scheduler(max_num_seqs=5, max_num_decode_seqs=2)
    for _ in range(5):
        core.add(Request(4, 4))
    sampled = []
    while core.has_work:
        plan = step(core)
        sampled.append(tuple(seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples))
    assert sampled == [(0, 1), (2, 3), (0, 4), (1, 2), (0, 3), (1, 4), (0, 2), (1, 3), (2, 4), (3, 4)]


def test_constant_arrivals_do_not_starve_decoding_sequences() -> None:
    core = scheduler(max_num_seqs=4, max_num_decode_seqs=1)
    core.add(Request(4, 5))
    for _ in range(20):
        core.add(Request(4, 1))
        step(core)
    assert core.view(0) is None


def test_a_higher_priority_samples_first_in_the_priority_order() -> None:
    core = scheduler(max_num_seqs=3, max_num_decode_seqs=1, decode_order="priority")
    for priority in (0, 0, -1):
        core.add(Request(2, 2, priority=priority))
    assert [plan.seq_ids for plan in run(core)] == [(0, 1, 2), (2,), (2,), (1,), (0,), (1,)]


def test_without_a_place_to_sample_a_prompt_stops_one_token_short() -> None:
    core = scheduler(max_num_seqs=3, max_num_decode_seqs=1)
    core.add(Request(6, 4))
    core.add(Request(6, 4))
    core.add(Request(3, 4))
    first = step(core)
    assert rows(first) == [(0, 0, 6), (1, 0, 5), (2, 0, 2)]
    assert first.samples == (True, False, False)
    assert [rows(step(core)) for _ in range(4)] == [[(1, 5, 1)], [(2, 2, 1)], [(0, 6, 1)], [(1, 6, 1)]]


def test_one_place_of_a_step_is_reserved_for_a_prompt() -> None:
    core = scheduler(max_num_seqs=6, max_num_step_seqs=2)
    core.add(Request(2, 30))
    core.add(Request(2, 30))
    step(core)
    core.add(Request(40, 3))
    seen = [step(core) for _ in range(3)]
    assert seen[0].admitted == (2,)
    assert all(plan.num_sequences <= 2 for plan in seen)
    assert {seq_id for plan in seen for seq_id in plan.seq_ids} == {0, 1, 2}
    run(core)


def test_a_prompt_that_ends_uses_the_reserved_place() -> None:
    core = scheduler(max_num_seqs=4, max_num_step_seqs=3, max_chunk_tokens=4)
    for _ in range(3):
        core.add(Request(2, 30))
    step(core)
    core.add(Request(6, 3))
    assert rows(step(core)) == [(0, 2, 1), (1, 2, 1), (3, 0, 4)]
    assert rows(step(core)) == [(0, 3, 1), (2, 2, 1), (3, 4, 2)]


def test_all_requests_finish_with_one_place_per_step() -> None:
    core = scheduler(max_num_seqs=3, max_num_step_seqs=1)
    for _ in range(4):
        core.add(Request(300, 3))
    run(core)
    assert len(core.drain_finished()) == 4


def test_jump_forward_segments_are_one_chunk_and_wait_for_budget_in_turn() -> None:
    core = scheduler(max_num_seqs=2, max_num_batched_tokens=6, max_forced_tokens=5)
    core.add(Request(3, 20))
    core.add(Request(3, 20))
    step(core, tokens={0: 5, 1: 5})
    assert rows(step(core)) == [(0, 3, 5)]
    assert rows(step(core)) == [(0, 8, 1), (1, 3, 5)]


def test_a_segment_is_cut_at_the_output_limit() -> None:
    core = scheduler()
    core.add(Request(3, 4))
    plan = core.schedule()
    assert commit(core, plan, tokens={0: 3}).num_tokens == (3,)
    plan = core.schedule()
    events = commit(core, plan, tokens={0: 9})
    assert events.num_tokens == (1,)
    assert events.finished == ((0, FinishReason.LENGTH),)


def test_a_stop_within_the_limit_keeps_its_reason() -> None:
    core = scheduler()
    core.add(Request(3, 1))
    assert commit(core, core.schedule(), 0).finished == ((0, FinishReason.STOP),)


@pytest.mark.parametrize(("allowed", "got"), [(True, 17), (True, 0), (False, 2)])
def test_too_many_tokens_in_a_segment_are_a_programming_error(allowed: bool, got: int) -> None:
    core = scheduler()
    core.add(Request(3, 40, allows_forced=allowed))
    with pytest.raises(AssertionError, match=f"got {got} tokens"):
        commit(core, core.schedule(), tokens={0: got})


# -- chunking off ----------------------------------------------------------------------------------------------------


def test_without_chunking_a_prompt_is_computed_whole_or_waits() -> None:
    core = scheduler(chunking=False, max_num_seqs=4, max_num_batched_tokens=30, max_chunk_tokens=4, max_skips=0)
    core.add(Request(20, 2))
    core.add(Request(20, 2))
    core.add(Request(3, 2))
    assert rows(step(core)) == [(0, 0, 20)], "nobody passes a head that does not fit"
    assert rows(step(core)) == [(0, 20, 1), (1, 0, 20), (2, 0, 3)]


def test_without_chunking_shorter_prompts_may_overtake_up_to_max_skips() -> None:
    core = scheduler(chunking=False, max_num_seqs=4, max_num_batched_tokens=30)
    core.add(Request(20, 2))
    core.add(Request(20, 2))
    core.add(Request(3, 2))
    assert rows(step(core)) == [(0, 0, 20), (2, 0, 3)]


def test_without_chunking_a_prompt_is_admitted_and_waits_for_its_turn_to_sample() -> None:
    core = scheduler(chunking=False, max_num_seqs=2, max_num_decode_seqs=1)
    core.add(Request(5, 2))
    core.add(Request(5, 2))
    assert [rows(plan) for plan in run(core)] == [[(0, 0, 5)], [(1, 0, 5)], [(0, 5, 1)], [(1, 5, 1)]]


def test_a_sequence_that_waits_for_its_turn_blocks_no_admission() -> None:
    core = scheduler(chunking=False, max_num_seqs=4, max_num_decode_seqs=1)
    for _ in range(3):
        core.add(Request(5, 9))
    assert step(core).admitted == (0, 1, 2)
    core.add(Request(5, 9))
    assert step(core).admitted == (3,)


def test_an_admitted_sequence_that_waits_for_its_turn_uses_prefill_budget() -> None:
    core = scheduler(chunking=False, max_num_seqs=4, max_num_decode_seqs=1, max_num_prefill_tokens=10)
    for _ in range(3):
        core.add(Request(5, 2))
    plan = step(core)
    assert (rows(plan), plan.admitted) == ([(0, 0, 5)], (0, 1))


# -- what others may know --------------------------------------------------------------------------------------------


def test_views_are_copies() -> None:
    core = scheduler()
    core.add(prompt(9))
    view = core.view(0)
    assert view is not None
    assert (view.state, view.num_computed, view.num_known, view.table) == (SequenceState.WAITING, 0, 9, ())
    step(core)
    view = core.view(0)
    assert view is not None
    assert (view.state, view.num_computed, view.num_known, view.table) == (SequenceState.RUNNING, 9, 10, (1, 2, 3))
    assert (view.arrival_step, view.admitted_step, view.first_token_step) == (0, 0, 0)
    assert core.view(1) is None


def test_stats_add_up() -> None:
    core = scheduler(num_blocks=10, num_host_blocks=2)
    core.add(prompt(9, 30))
    core.add(prompt([5] * 40, 1))
    step(core)
    stats = core.stats()
    assert (stats.num_running, stats.num_queued, stats.num_preempted, stats.num_queued_tokens) == (1, 1, 0, 40)
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_held_blocks) == (7, 0, 3)
    assert stats.kv_usage == 0.3
    for _ in range(8):
        commit(core, core.schedule())
    stats = core.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generation_tokens) == (9, 9, 9)
    core.abort(0, FinishReason.DEADLINE)
    core.abort(1)
    stats = core.stats()
    assert dict(stats.num_finished)[FinishReason.DEADLINE] == 1
    assert dict(stats.num_finished)[FinishReason.ABORT] == 1
    assert (stats.num_generation_tokens, stats.kv_usage, stats.num_running, stats.num_queued) == (9, 0.0, 0, 0)
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (9, 0)
    assert (stats.num_host_blocks, stats.num_free_host_blocks) == (2, 2)


def test_the_config_is_returned_unchanged() -> None:
    ours = config(max_num_seqs=3)
    assert Scheduler(ours).config is ours
