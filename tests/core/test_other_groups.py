"""Windows and states of sequences, one rule at a time. Blocks have 4 positions, and the window has 6."""

from __future__ import annotations

from typing import Any

from lockstep.core.groups import KVGroup, StateBlocks, WindowBlocks
from lockstep.core.prefix import block_hashes
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan
from tests.core.drive import commit, prompt, rows, run, scheduler, step

WINDOW = KVGroup(window=6)
STATE = KVGroup(2, is_state=True, snapshot_interval=16)


def windowed(**limits: Any) -> Scheduler:
    return scheduler(groups=(KVGroup(), WINDOW), **{"num_blocks": 40, **limits})


def recurrent(**limits: Any) -> Scheduler:
    return scheduler(groups=(KVGroup(), STATE), **{"num_blocks": 40, **limits})


def own_of(core: Scheduler, seq_id: int) -> Any:
    """A sequence's blocks in the second group."""
    view = core.view(seq_id)
    assert view is not None
    return view.others[0]


def starts(core: Scheduler, *prompts: list[int]) -> list[int]:
    """Position at which each of these prompts begins to be computed, one after the other."""
    found = []
    for tokens in prompts:
        core.add(prompt(tokens, 1))
        found.append(step(core).starts[0])
        run(core)
    return found


def eviction_order(core: Scheduler) -> list[tuple[int, int]]:
    """Position after which each cached content ends, and its group, in the order of eviction. The contents must be of
    one chain that is published in order."""
    kv = core.state().kv
    group_of = {block: (content, group) for block, content, group in kv.published}
    found = [group_of[block] for block in kv.cached]
    return list(dict.fromkeys([(4 * (content + 1), group) for content, group in found]))


def preempt(core: Scheduler) -> StepPlan:
    """Run until a sequence is preempted."""
    plan = step(core)
    while not plan.preempted:
        plan = step(core)
    return plan


# -- windows ----------------------------------------------------------------------------------------------------------


def test_blocks_behind_a_window_are_released_and_used_again() -> None:
    """A window is seen from the last border of a block, so that another sequence may continue there."""
    core = windowed(max_chunk_tokens=4)
    core.add(Request(14, 8))
    tables = [step(core).other_tables[0][0] for _ in range(7)]
    assert tables == [(0, 5), (0, 5, 6), (0, 5, 6, 7), (1, 6, 7, 5), (1, 6, 7, 5), (1, 6, 7, 5), (2, 7, 5, 8)]
    assert own_of(core, 0) == WindowBlocks(2, (7, 5, 8), 0)
    assert core.stats().num_held_blocks == 5 + 3


def test_a_long_sequence_holds_as_many_blocks_of_a_window_as_a_short_one() -> None:
    core = windowed(max_chunk_tokens=4, num_blocks=100)
    core.add(Request(200, 100))
    most = 0
    while core.has_unfinished:
        plan = step(core)
        most = max(most, len(plan.other_tables[0][0]) - 1)
    assert most == 3


def test_columns_of_several_blocks_are_released_together() -> None:
    core = scheduler(groups=(KVGroup(), KVGroup(3, window=4)), max_chunk_tokens=4)
    core.add(Request(9, 8))
    assert [step(core).other_tables[0][0] for _ in range(3)] == [
        (0, 4, 5, 6),
        (0, 4, 5, 6, 7, 8, 9),
        (1, 7, 8, 9, 4, 5, 6),
    ]


def test_a_hit_takes_the_window_before_it() -> None:
    """The border at 12 needs positions 7 to 11."""
    core = windowed()
    core.add(prompt([1] * 13, 3))
    own = step(core).other_tables[0][0]
    assert own == (0, 5, 6, 7, 8)
    core.add(prompt([1] * 12 + [2] * 3, 1))
    plan = step(core)
    assert (rows(plan)[1], plan.tables[1]) == ((1, 12, 3), (1, 2, 3, 9))
    assert plan.other_tables[1][0] == (1, 6, 7, 10)
    core.abort(0)
    run(core)


def test_a_hit_ends_where_the_window_is_complete() -> None:
    core = windowed()
    tokens = [1] * 17
    hashes = prompt(tokens).block_hashes
    assert core.fill(hashes) == ((0, (1,)), (1, (2,)), (2, (3,)), (3, (4,)))
    assert starts(core, [*tokens[:16], 2]) == [0], "no window is cached"
    core.reset_prefix_cache()
    core.fill(hashes)
    assert len(core.fill(hashes[:3], 1, 1)) == 2
    assert starts(core, tokens) == [12], "the window of the border at 16 lacks its last column"


def test_a_preempted_window_is_published_again_after_it_came_back() -> None:
    core = windowed(num_blocks=14, num_host_blocks=14)
    core.add(prompt([1] * 12, 16))
    core.add(prompt([2] * 13, 8))
    plan = preempt(core)
    assert (plan.preempted, len(plan.swap_out)) == ((1,), 4 + 2)
    core.reset_prefix_cache()
    core.abort(0)
    plan = step(core)
    assert (plan.resumed, len(plan.swap_in)) == ((1,), 4 + 2)
    core.name_answer(1, block_hashes(b"test", [2] * 20, 4)[3:])
    run(core)
    assert starts(core, [2] * 16 + [3]) == [16]


# -- snapshots of states ----------------------------------------------------------------------------------------------


def test_the_second_prompt_with_a_beginning_makes_a_snapshot_and_the_third_one_hits_it() -> None:
    core = recurrent()
    begin = [1] * 10
    core.add(prompt([*begin, 2, 2, 2], 1))
    assert rows(step(core)) == [(0, 0, 13)]
    core.add(prompt([*begin, 3, 3, 3], 1))
    plan = step(core)
    assert (rows(plan), plan.other_tables) == ([(1, 0, 8)], (((8, 9),),))
    plan = step(core)
    assert (rows(plan), plan.other_tables) == ([(1, 8, 5)], (((8, 9, 10, 11),),)), "the snapshot stays as it is"
    core.add(prompt([*begin, 4, 4, 4], 1))
    plan = step(core)
    assert rows(plan) == [(2, 8, 5)]
    assert plan.tables[0][:2] == (1, 2)
    assert plan.other_tables[0][0][:2] == (8, 9)
    assert core.drain_finished()[-1].num_cached_tokens == 8


def test_a_state_is_updated_in_place_unless_it_is_a_snapshot() -> None:
    core = recurrent(max_chunk_tokens=5)
    core.add(prompt([1] * 15, 9, snapshots=(8,)))
    tables = [step(core).other_tables[0][0] for _ in range(8)]
    assert rows(core.schedule()) == [(0, 19, 1)]
    assert tables[:4] == [(5, 6), (5, 6), (5, 6, 7, 8), (7, 8)], "chunks of 0:5, 5:8, 8:13, 13:15"
    assert tables[4:] == [(7, 8), (7, 8, 10, 11), (10, 11), (10, 11)], "16 is a border that the answer may continue at"


def test_a_long_prompt_has_snapshots_at_intervals() -> None:
    core = recurrent()
    core.add(prompt([1] * 50, 1))
    assert [rows(step(core))[0][1:] for _ in range(4)] == [(0, 16), (16, 16), (32, 16), (48, 2)]
    assert starts(core, [1] * 40 + [2], [1] * 20 + [2], [1] * 10 + [2], [1] * 10 + [3]) == [32, 16, 0, 8]


def test_a_prompt_is_computed_in_one_step_and_has_no_snapshots_without_chunking() -> None:
    core = recurrent(chunking=False)
    core.add(prompt([1] * 50, 1, snapshots=(8,)))
    assert rows(step(core)) == [(0, 0, 50)]
    assert starts(core, [1] * 51) == [0]


def test_a_chosen_snapshot_is_hit_by_the_next_turn_although_the_answer_differs() -> None:
    """The prompt has 12 tokens of history, and 3 that begin an answer."""
    core = recurrent()
    core.add(prompt([1] * 12 + [8] * 3, 6, snapshots=(12,)))
    assert rows(step(core)) == [(0, 0, 12)]
    run(core)
    assert starts(core, [1] * 12 + [8] * 2 + [5] * 9) == [12]


def test_the_last_border_of_a_named_answer_is_hit() -> None:
    """12 tokens have KV: 7 of the prompt and 5 of the answer."""
    turn = [1] * 7 + [2] * 6
    for end in ("finish", "abort", "unnamed"):
        core = recurrent()
        core.add(prompt(turn[:7], 6))
        for _ in range(5):
            step(core)
        plan = core.schedule()
        if end != "unnamed":
            core.name_answer(0, block_hashes(b"test", turn[:-1], 4)[1:])
        if end == "abort":
            core.abort(0)
        commit(core, plan)
        core.check()
        assert starts(core, [*turn, 3]) == [{"finish": 12, "abort": 12, "unnamed": 0}[end]]


def test_an_answer_keeps_the_state_at_its_last_border_only() -> None:
    core = recurrent()
    core.add(prompt([1] * 7, 9))
    kept = []
    while core.has_unfinished:
        step(core)
        if core.has_unfinished:
            own = own_of(core, 0)
            kept.append((own.kept_position, own.kept == own.current, len(own.held)))
    assert kept == [(0, False, 2), (8, True, 2), *[(8, False, 4)] * 3, (12, True, 2), *[(12, False, 4)] * 2]
    assert core.stats().num_held_blocks == 0


def test_nothing_is_kept_of_an_answer_whose_prompt_has_no_hashes() -> None:
    core = recurrent()
    core.add(Request(7, 9))
    for _ in range(5):
        assert [len(table) for table in step(core).other_tables[0]] == [2]
    assert own_of(core, 0) == StateBlocks((3, 4))


def test_forced_tokens_may_pass_a_border_without_a_state() -> None:
    core = recurrent()
    core.add(prompt([1] * 6, 9))
    step(core, tokens={0: 4})
    step(core)
    assert own_of(core, 0).kept == ()


def test_a_snapshot_is_not_changed_while_another_sequence_holds_it_after_a_reset() -> None:
    """Two sequences take one snapshot and wait for the slot to sample, which another one has."""
    core = recurrent(max_num_decode_seqs=1)
    core.add(prompt([1] * 9, 1, snapshots=(8,)))
    run(core)
    core.add(prompt([5] * 5, 9))
    step(core)
    for _ in range(2):
        core.add(prompt([1] * 8 + [2], 1))
    plan = step(core)
    assert (plan.admitted, plan.seq_ids) == ((2, 3), (1,))
    snapshot = own_of(core, 2).current
    assert own_of(core, 3).current == snapshot
    core.reset_prefix_cache()
    tables = {plan.seq_ids[0]: plan.other_tables[0][0] for plan in run(core) if plan.starts == (8,)}
    assert tables[2][:2] == snapshot
    assert len(tables[2]) == 4
    assert tables[3] == snapshot, "no other sequence holds it any more"


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_evicted_before_the_blocks_below_it_and_after_those_above_it() -> None:
    core = recurrent()
    core.add(prompt([1] * 17, 1, snapshots=(8,)))
    run(core)
    assert eviction_order(core) == [(16, 1), (16, 0), (12, 0), (8, 1), (8, 0), (4, 0)]


def test_a_snapshot_that_was_hit_is_evicted_after_the_blocks_above_it() -> None:
    core = recurrent()
    assert starts(core, [1] * 17, [1] * 8 + [2], [1] * 8 + [2] * 9) == [0, 0, 8]
    order = eviction_order(core)
    assert order.index((8, 1)) == len(order) - 3
    assert [group for _, group in order[-3:]] == [1, 0, 0]


def test_the_state_at_the_end_of_an_answer_is_evicted_before_all_blocks_below_it() -> None:
    core = recurrent()
    core.add(prompt([1] * 8, 2))
    run(core)
    assert eviction_order(core) == [(8, 1), (8, 0), (4, 0)]


def test_a_window_is_evicted_before_the_blocks_below_it() -> None:
    core = windowed()
    core.add(prompt([1] * 16, 1))
    run(core)
    assert eviction_order(core) == [(8, 1), (4, 1), (16, 1), (12, 1), (16, 0), (12, 0), (8, 0), (4, 0)]


def test_evicting_a_part_of_a_snapshot_frees_all_of_it() -> None:
    core = recurrent(num_blocks=12)
    core.add(prompt([1] * 9, 1, snapshots=(8,)))
    run(core)
    hashes = prompt([1] * 9).block_hashes
    assert core.cached_blocks(hashes, 1) == ((), (4, 5))
    core.add(Request(27, 1))
    plan = step(core)
    assert plan.evicted == (4, 5)
    assert core.cached_blocks(hashes, 1) == ((), ())
    assert core.cached_blocks(hashes) == ((1,), (2,))


def test_pins_hold_the_states_at_their_borders() -> None:
    core = recurrent(num_blocks=15)
    session = prompt([1] * 9, 1, snapshots=(8,))
    core.add(session)
    run(core)
    core.pin(session.block_hashes, (2,))
    core.add(prompt([2] * 20, 1))
    run(core)
    assert core.cached_blocks(session.block_hashes, 1) == ((), (4, 5))
    assert core.sweep(session.block_hashes, (2,)) == (5, 4, 2, 1)
    assert core.cached_blocks(session.block_hashes, 1) == ((), ())
    core.check()


# -- preemption and failures ------------------------------------------------------------------------------------------


def test_a_preempted_sequence_moves_all_its_blocks_to_the_host_and_back() -> None:
    core = recurrent(num_blocks=13, num_host_blocks=20)
    core.add(prompt([1] * 9, 20))
    core.add(prompt([2] * 10, 8))
    plan = preempt(core)
    view = core.view(1)
    assert view is not None
    assert (plan.preempted, len(plan.swap_out)) == ((1,), len(view.host_table) + len(view.host_others[0].held))
    assert (view.table, view.others) == ((), (StateBlocks(),))
    own = view.host_others[0]
    assert isinstance(own, StateBlocks)
    assert (len(own.current), own.target, own.kept_position) == (2, (), 12)
    core.abort(0)
    plan = step(core)
    assert (plan.resumed, len(plan.swap_in)) == ((1,), len(view.host_table) + 4)
    assert rows(plan) == [(1, view.num_computed, 1)]
    assert core.drain_finished()[-1].seq_id == 0
    run(core)
    assert core.drain_finished()[-1].num_recomputed_tokens == 0


def test_a_sequence_that_does_not_fit_on_the_host_is_dropped_and_computed_again() -> None:
    """The host has room for a part of it, which would be of no use. Its snapshots were evicted before it."""
    core = recurrent(num_blocks=15, num_host_blocks=3)
    core.add(prompt([1] * 9, 24))
    core.add(prompt([2] * 10, 8, snapshots=(4, 8)))
    step(core)
    plan = preempt(core)
    assert (plan.preempted, plan.swap_out) == ((1,), ())
    view = core.view(1)
    assert view is not None
    assert (view.num_computed, view.host_table, view.table) == (0, (), ())
    core.abort(0)
    plan = step(core)
    assert plan.resumed == (1,)
    assert rows(plan) == [(1, 0, 4)]
    assert [rows(step(core)) for _ in range(2)] == [[(1, 4, 4)], [(1, 8, view.num_known - 8)]]
    run(core)


def test_a_dropped_sequence_continues_from_its_longest_snapshot() -> None:
    core = recurrent()
    core.add(prompt([1] * 15, 4, snapshots=(4, 8)))
    for _ in range(4):
        step(core)
    view = core.view(0)
    assert view is not None
    core.fail(core.schedule())
    assert rows(step(core))[0][:2] == (0, 8)
    assert core.view(0) is not None
    run(core)
    assert core.drain_finished()[-1].num_recomputed_tokens == view.num_computed - 8


def test_a_failed_step_drops_the_states_of_its_rows_and_keeps_snapshots() -> None:
    core = recurrent()
    core.add(prompt([1] * 13, 4, snapshots=(8,)))
    step(core)
    plan = core.schedule()
    assert rows(plan) == [(0, 8, 5)]
    core.fail(plan)
    core.check()
    assert core.stats().num_held_blocks == 0
    assert rows(step(core)) == [(0, 8, 5)], "the snapshot at 8 was not written by the failed step"
    plan = core.schedule()
    core.fail(plan)
    assert [rows(step(core)) for _ in range(2)] == [[(0, 8, 4)], [(0, 12, 2)]], "12 is the second use of the KV there"
    run(core)


def test_a_prompt_whose_blocks_another_prompt_took_has_no_row() -> None:
    """The first two prompts need a second state after their snapshot, and there are blocks for one. What the third one
    loses and the second does not need would suffice for a chunk from its start."""
    core = recurrent(num_blocks=20, max_chunk_tokens=4)
    core.add(prompt([1] * 22, 2, snapshots=(8,)))
    core.add(prompt([2] * 10, 2, snapshots=(8,)))
    core.add(prompt([3] * 10, 2))
    plan = preempt(core)
    assert (rows(plan), plan.preempted) == ([(0, 8, 4), (1, 8, 2)], (2,))
    run(core)


def one_slot(num_blocks: int) -> Scheduler:
    """A scheduler that gives its only slot to sample to the oldest sequence, with a prompt of a low rank that makes a
    snapshot before its last chunk."""
    core = recurrent(num_blocks=num_blocks, max_chunk_tokens=4, max_num_decode_seqs=1, decode_order="oldest")
    core.add(prompt([1] * 14, 4, snapshots=(12,), priority=1))
    step(core)
    return core


def test_a_slot_of_a_prompt_without_blocks_goes_to_the_next_sequence() -> None:
    """The prompt lacks a second state. The sequence that holds the other blocks has a higher rank."""
    core = one_slot(num_blocks=12)
    core.add(prompt([2] * 4, 9, priority=0))
    assert [rows(step(core)) for _ in range(3)] == [[(0, 4, 4), (1, 0, 4)], [(1, 4, 1), (0, 8, 4)], [(1, 5, 1)]]
    run(core)


def test_a_slot_of_a_prompt_without_blocks_goes_to_the_last_token_of_the_next_prompt() -> None:
    core = one_slot(num_blocks=6 + 5 + 7)
    core.add(prompt([2] * 9, 2, priority=0))
    step(core)
    core.add(prompt([3] * 12, 2, priority=-1, snapshots=(4,)))
    assert [rows(step(core)) for _ in range(2)] == [[(1, 4, 4), (0, 8, 4), (2, 0, 4)], [(2, 4, 4), (1, 8, 1)]]
    run(core)


def test_sequences_share_the_slots_of_a_prompt_without_blocks() -> None:
    """Blocks of 16. The third sequence lacks a state for the last token of its prompt. The first two
    share the slot that is reserved for it in each step by their weights of 1 and 2."""
    core = recurrent(block_size=16, num_blocks=13, max_chunk_tokens=16, max_num_decode_seqs=1)
    core.add(prompt([1] * 16, 15, block_size=16))
    core.add(prompt([2] * 2, 13, block_size=16, priority=-1))
    core.add(prompt([3] * 17, 1, block_size=16, snapshots=(16,), priority=1))
    num_rows = [0, 0, 0]
    for _ in range(14):
        for seq_id, _, length in rows(step(core)):
            num_rows[seq_id] += length == 1
    assert num_rows == [5, 9, 0]
    run(core)


def test_a_reserved_sequence_is_never_preempted() -> None:
    """At most three states, windows and tables of this length fit, whatever they share."""
    groups = (KVGroup(), WINDOW, STATE)
    core = scheduler(groups=groups, num_blocks=40, admission="reserve", max_chunk_tokens=8)
    for _ in range(5):
        core.add(prompt([1] * 9, 11, snapshots=(8,)))
    most = 0
    while core.has_unfinished:
        assert step(core).preempted == ()
        most = max(most, core.stats().num_running)
    assert most == 40 // (5 + 5 + 4)
