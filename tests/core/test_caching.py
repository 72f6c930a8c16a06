"""Prefix cache from the view of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.core.prefix import block_hashes
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from tests.core.drive import commit, prompt, rows, run, scheduler, step


def free_order(core: Scheduler) -> tuple[int, ...]:
    """Every available block in the order in which it would be handed out."""
    kv = core.state().kv
    return (*reversed(kv.free), *kv.cached, *kv.pinned)


def test_a_second_request_shares_the_full_blocks() -> None:
    """55 tokens in blocks of 16: three full blocks are shared while both run, and each has one partial block."""
    core = scheduler(block_size=16)
    tokens = list(range(55))
    core.add(prompt(tokens, block_size=16))
    assert step(core).tables == ((1, 2, 3, 4),)
    core.add(prompt([*tokens[:48], *range(100, 107)], block_size=16))
    plan = step(core)
    assert plan.tables == ((1, 2, 3, 4), (1, 2, 3, 5))
    assert rows(plan) == [(0, 55, 1), (1, 48, 7)]
    assert core.stats().num_held_blocks == 5


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (6, 4), (8, 4), (9, 8), (10, 8), (1, 0), (3, 0)])
def test_a_hit_leaves_at_least_one_token_to_compute(length: int, cached: int) -> None:
    core = scheduler()
    core.add(prompt(length, 1))
    run(core)
    core.add(prompt(length, 1))
    assert rows(step(core)) == [(1, cached, length - cached)]
    assert core.drain_finished()[-1].num_cached_tokens == cached


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (6, 4), (8, 4), (9, 8), (1, 0)])
def test_a_hit_leaves_one_token_if_kernels_are_equal(length: int, cached: int) -> None:
    core = scheduler()
    for _ in range(2):
        core.add(prompt(length, 1))
        run(core)
    assert core.drain_finished()[-1].num_cached_tokens == cached


def test_a_one_token_remainder_is_shared_if_kernels_are_equal() -> None:
    core = scheduler(block_size=1, max_chunk_tokens=3)
    core.add(prompt(1, 1, block_size=1))
    run(core)
    core.add(prompt(5, 1, block_size=1))
    assert rows(step(core)) == [(1, 1, 3)]
    assert rows(step(core)) == [(1, 4, 1)], "a remainder of one token"


def test_a_prompt_of_one_token_is_shared() -> None:
    core = scheduler(block_size=1)
    core.add(prompt(1, 1, block_size=1))
    run(core)
    core.add(prompt(5, 1, block_size=1))
    assert rows(step(core)) == [(1, 1, 4)]
    core.add(prompt(5, 1, block_size=1))
    assert rows(step(core)) == [(2, 4, 1)]


def test_blocks_are_published_after_they_are_computed() -> None:
    core = scheduler(max_chunk_tokens=4)
    core.add(prompt(12))
    core.add(prompt(12))
    assert rows(step(core)) == [(0, 0, 4), (1, 0, 4)]
    core.add(prompt(12))
    assert rows(step(core)) == [(0, 4, 4), (1, 4, 4), (2, 4, 4)]


def test_a_step_that_fails_publishes_nothing() -> None:
    core = scheduler()
    core.add(prompt(12))
    core.fail(core.schedule())
    core.abort(0)
    core.add(prompt(12))
    assert rows(step(core)) == [(1, 0, 12)]


def test_generated_tokens_and_partial_blocks_are_not_cached() -> None:
    """In a chat, the previous prompt is a hit; the reply is computed as a prompt once, and is a hit afterwards."""
    core = scheduler()
    core.add(prompt([1] * 10, 14))
    run(core)
    assert core.stats().num_cached_blocks == 2
    turn = [1] * 10 + [2] * 14
    core.add(prompt([*turn, 3], 1))
    assert rows(step(core)) == [(1, 8, 17)]
    core.add(prompt([*turn, 3], 1))
    assert rows(step(core)) == [(2, 24, 1)]


def named(tokens: list[int], num_prompt: int, block_size: int = 4) -> tuple[bytes, ...]:
    """Hashes of the full blocks after a prompt's, as `drive.prompt` computes them."""
    return block_hashes(b"test", tokens, block_size)[num_prompt // block_size :]


def test_a_named_answer_is_hit_by_the_next_turn() -> None:
    """A prompt of 10 and an answer of 14 tokens, the last without KV: five full blocks."""
    core = scheduler()
    turn = [1] * 10 + [2] * 14
    core.add(prompt(turn[:10], 14))
    for _ in range(13):
        step(core)
    plan = core.schedule()
    core.name_answer(0, named(turn[:-1], 10))
    commit(core, plan)
    core.check()
    assert core.stats().num_cached_blocks == 5
    core.add(prompt([*turn, 3], 1))
    assert rows(step(core)) == [(1, 20, 5)]


def test_an_answer_is_named_up_to_the_blocks_that_are_computed_when_it_ends() -> None:
    """When the client disconnects, 5 tokens are known and 4 computed; further hashes are ignored."""
    core = scheduler()
    turn = [1] * 4 + [2] * 12
    core.add(prompt(turn[:4], 12))
    for _ in range(5):
        step(core)
    core.name_answer(0, named(turn, 4)[:2])
    assert core.stats().num_cached_blocks == 0
    core.abort(0)
    core.check()
    assert core.cached_blocks(block_hashes(b"test", turn, 4)) == ((1,), (2,), (), ())


def test_the_device_blocks_of_an_ended_preempted_sequence_stay_cached() -> None:
    core = scheduler(num_blocks=6)
    core.add(prompt([1] * 8, 12))
    core.add(prompt([2] * 8, 12))
    while not core.stats().num_preempted:
        step(core)
    core.name_answer(1, named([2] * 20, 8))
    core.abort(1)
    core.check()
    held = core.cached_blocks(block_hashes(b"test", [2] * 20, 4))
    assert held[0]
    assert not held[-1]
    run(core)


@pytest.mark.parametrize(
    ("limits", "has_hashes"), [({"enable_prefix_caching": False}, True), ({}, False)], ids=["nothing", "no hashes"]
)
def test_naming_an_answer_without_hashes_or_caching_has_no_effect(limits: dict[str, bool], has_hashes: bool) -> None:
    """Nothing is published; a prompt without hashes would leave a gap in the chain."""
    core = scheduler(**limits)
    core.add(replace(prompt(8, 9), block_hashes=prompt(8).block_hashes if has_hashes else ()))
    for _ in range(9):
        plan = core.schedule()
        core.name_answer(0, named([7] * 16, 8))
        commit(core, plan)
    core.name_answer(0, named([7] * 16, 8))
    core.name_answer(1, named([7] * 16, 8))
    assert core.stats().num_cached_blocks == 0


def test_ten_turns_compute_only_new_tokens() -> None:
    core = scheduler()
    tokens: list[int] = []
    for turn in range(10):
        tokens += [turn] * 8
        core.add(prompt(tokens, 1))
        assert rows(step(core)) == [(turn, 0 if turn == 0 else 8 * turn, 8)]


def test_concurrent_equal_prompts_share_nothing_and_lose_nothing() -> None:
    core = scheduler()
    core.add(prompt(10, 3))
    core.add(prompt(10, 5))
    assert step(core).tables == ((1, 2, 3), (4, 5, 6))
    run(core)
    stats = core.stats()
    assert (stats.num_cached_blocks, stats.num_free_blocks) == (2, 998)
    core.add(prompt(10, 1))
    assert step(core).tables[0][:2] == (1, 2)


def test_hits_on_idle_blocks_need_capacity_and_hits_on_held_ones_do_not() -> None:
    core = scheduler(num_blocks=6, admission="reserve")
    core.add(prompt(10, 10))
    step(core)
    core.add(prompt(10, 6))
    assert step(core).admitted == (), "it needs two fresh blocks and one is left"
    core.abort(1)
    core.add(prompt(10, 2))
    assert step(core).admitted == (2,)
    assert core.stats().num_held_blocks == 6
    core.abort(0)
    core.abort(2)
    core.add(prompt([5] * 20, 4))
    assert step(core).admitted == (3,)


def test_a_request_that_does_not_fit_touches_no_cached_block() -> None:
    core = scheduler(num_blocks=6)
    core.add(prompt(10, 1))
    run(core)
    core.add(Request(11, 9))
    step(core)
    order = free_order(core)
    core.add(prompt([*[7] * 10, *[8] * 6], 2))
    plan = step(core)
    assert plan.admitted == ()
    assert free_order(core) == order
    assert core.stats().prefix_queries_tokens == 10, "a lookup counts once, when the request is admitted"


def test_lookups_count_once_per_request_in_tokens() -> None:
    core = scheduler(num_blocks=8)
    core.add(prompt(10, 6))
    step(core)
    core.add(prompt([*[7] * 10, *[8] * 14], 2))
    while core.stats().num_queued:
        step(core)
    stats = core.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (34, 8)


def test_blocks_are_evicted_deepest_first_and_only_when_no_other_is_free() -> None:
    core = scheduler(num_blocks=5)
    core.add(prompt(12, 1))
    run(core)
    assert free_order(core) == (4, 5, 3, 2, 1)
    core.add(prompt([1] * 8, 1))
    assert step(core).evicted == ()
    core.add(prompt([2] * 8, 1))
    plan = step(core)
    assert plan.evicted == (3, 2)
    assert core.stats().num_evicted_blocks == 2


def test_salted_prompts_share_only_with_their_salt() -> None:
    core = scheduler()
    core.add(prompt(10, 1, salt=b"a"))
    run(core)
    core.add(prompt(10, 1, salt=b"b"))
    core.add(prompt(10, 1, salt=b"a"))
    assert rows(step(core)) == [(1, 0, 10), (2, 8, 2)]


def test_a_request_may_fill_the_cache_without_reading_it() -> None:
    core = scheduler()
    core.add(prompt(10, 1))
    run(core)
    core.add(prompt(10, 1, reads_cache=False))
    assert rows(step(core)) == [(1, 0, 10)]
    assert core.stats().prefix_queries_tokens == 10


def test_caching_can_be_off() -> None:
    core = scheduler(enable_prefix_caching=False)
    core.add(prompt(10, 1))
    run(core)
    core.add(prompt(10, 1))
    assert rows(step(core)) == [(1, 0, 10)]
    assert core.stats().num_cached_blocks == 0


def test_reset_clears_the_cache_and_not_the_blocks_of_running_sequences() -> None:
    core = scheduler()
    core.add(prompt([1] * 10, 1))
    core.add(prompt([2] * 10, 9))
    step(core)
    assert core.stats().num_cached_blocks == 2
    assert core.reset_prefix_cache() == 4
    core.check()
    assert core.stats().num_cached_blocks == 0
    assert core.stats().num_held_blocks == 3
    core.add(prompt([2] * 10, 9))
    assert rows(step(core)) == [(1, 10, 1), (2, 0, 10)]
    run(core)


def test_pinned_prompts_are_evicted_last_and_sweeping_frees_them() -> None:
    core = scheduler(num_blocks=6)
    session = prompt([1] * 9, 1)
    core.add(session)
    run(core)
    core.pin(session.block_hashes)
    core.add(prompt([2] * 9, 1))
    run(core)
    assert core.cached_blocks(session.block_hashes) == ((1,), (2,))
    core.add(Request(12, 1))
    plan = step(core)
    assert len(plan.evicted) == 1
    core.add(session)
    assert rows(step(core)) == [(3, 8, 1)]
    core.check()
    assert core.sweep(session.block_hashes) == (2, 1)
    assert core.cached_blocks(session.block_hashes) == ((), ())
    core.check()
    assert core.sweep(block_hashes(b"never seen", [0] * 4, 4)) == ()


def test_sweeping_keeps_blocks_that_are_held_or_pinned() -> None:
    core = scheduler(num_blocks=6)
    session = prompt([1] * 9, 5)
    core.add(session)
    step(core)
    core.pin(session.block_hashes)
    core.pin(session.block_hashes)
    assert core.sweep(session.block_hashes) == ()
    run(core)
    core.check()
    assert core.sweep(session.block_hashes) == (2, 1)


def test_a_restored_chain_is_hit_like_a_computed_one() -> None:
    core = scheduler(num_blocks=6)
    request = prompt([1] * 17, 1)
    assert core.fill(request.block_hashes[:3]) == ((0, (1,)), (1, (2,)), (2, (3,)))
    core.check()
    core.add(request)
    assert rows(step(core)) == [(0, 12, 5)]
    assert core.drain_finished()[-1].num_cached_tokens == 12


def test_a_restored_chain_evicts_others_first_and_never_itself() -> None:
    """Six blocks: two of the chain, two each of a pinned and an unpinned prompt."""
    core = scheduler(num_blocks=6)
    chain = prompt([1] * 24, 1).block_hashes
    core.add(prompt([1] * 8, 1))
    core.add(prompt([2] * 5, 1))
    core.add(prompt([3] * 5, 1))
    run(core)
    core.pin(prompt([2] * 5).block_hashes)
    cached = core.cached_blocks(chain)
    assert [bool(blocks) for blocks in cached] == [True, True, False, False, False, False]
    assert [place for place, _ in core.fill(chain)] == [2, 3, 4, 5]
    assert core.cached_blocks(chain)[:2] == cached[:2]
    assert core.cached_blocks(prompt([2] * 5).block_hashes) == ((),)
    assert core.cached_blocks(prompt([3] * 5).block_hashes) == ((),)
    core.check()
    core.add(prompt([1] * 8, 1))
    plan = step(core)
    assert len(plan.evicted) == 2 + 1, "the contents of both others, told with the next step, and a block for this one"


def test_fill_uses_only_blocks_without_a_holder() -> None:
    core = scheduler(num_blocks=4)
    core.add(prompt([9] * 9, 4))
    step(core)
    chain = prompt([1] * 17).block_hashes
    assert core.fill(chain) == ((0, (4,)),)
    assert core.fill(chain) == ()
    core.reset_prefix_cache()
    assert core.fill(chain, 1) == ((1, (4,)),), "the first content is not at hand any more"
    core.reset_prefix_cache()
    assert core.fill(chain) == ((0, (4,)),)
    assert core.cached_blocks(chain) == ((4,), (), (), ())
    run(core)
    core.check()


def test_a_run_of_repeated_steps_continues_when_a_chain_is_restored() -> None:
    """The next plan is the same as without it, except for the eviction."""
    plans = []
    for is_filled in (False, True):
        core = scheduler(num_blocks=4)
        core.add(prompt([2] * 8, 1))
        run(core)
        core.add(prompt([9] * 5, 6))
        while core.num_quiet_steps() == 0:
            step(core)
        if is_filled:
            core.fill(prompt([1] * 13).block_hashes)
            assert core.num_quiet_steps() == 0
        plans.append(step(core))
    assert plans[0] == replace(plans[1], evicted=())
    assert len(plans[1].evicted) == 2
