"""Drafts are computed in the same step as the token before them. Rejected ones leave everything as if they had not
been."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.groups import KVGroup, WindowBlocks
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import ContentNews
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from tests.core.drive import answer, commit, lengths, prompt, rows, scheduler, step
from tests.core.oracle import Job, Loop
from tests.core.test_oracle import drive, random_config, with_groups

WRONG = 99
"""A token that the oracle never gives."""
ROOMY = SchedulerConfig(block_size=4, num_blocks=60, max_model_len=60, max_num_seqs=4)
WINDOWS = (KVGroup(), KVGroup(2, window=7), KVGroup(1, window=3))


@dataclass
class Drafting(Loop):
    """A loop that proposes the same number of drafts for every sequence, of which so many first ones are right."""

    num_drafts: int = 0
    num_right: int = 0
    news: list[ContentNews] = field(default_factory=list)
    """All changes of the prefix cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduler.follow_contents()
        self._num_guessed: dict[int, int] = {}

    def propose(self) -> None:
        self._num_guessed.clear()
        if self.num_drafts:
            self.scheduler.propose(dict.fromkeys(self.served, self.num_drafts))

    def guess(self, seq_id: int, logits: bytes) -> int:
        count = self._num_guessed[seq_id] = self._num_guessed.get(seq_id, 0) + 1
        return self._sample(seq_id, logits)[0][0] if count <= self.num_right else WRONG

    def step(self) -> StepPlan:
        plan = super().step()
        self.news += self.scheduler.drain_contents()
        return plan


def seen(loop: Drafting, seq_id: int) -> tuple[object, ...] | None:
    """Everything about a sequence that a later step may depend on, apart from the numbers of its blocks."""
    view = loop.scheduler.view(seq_id)
    if view is None:
        return None
    size = loop.config.block_size
    content = [loop.model.device[view.table[at // size]][at % size] for at in range(view.num_computed)]
    windows = []
    for group, own in zip(loop.config.groups[1:], view.others, strict=True):
        assert isinstance(own, WindowBlocks)
        begin = own.first * size
        windows.append((own.first, len(own.blocks), own.num_published))
        for at in range(max(begin, view.num_computed + 1 - group.window), view.num_computed):
            column = (at // size - own.first) * group.num_parts
            content += [loop.model.device[block][at % size] for block in own.blocks[column : column + group.num_parts]]
    stats = loop.scheduler.stats()
    gauges = stats.num_held_blocks, stats.num_cached_blocks, stats.num_free_blocks
    return view.num_computed, len(view.table), tuple(windows), tuple(content), gauges, tuple(loop.news)


def by_length(loop: Drafting, prompt_ids: tuple[int, ...], num_output: int) -> dict[int, object]:
    """Serve a request alone: what is seen after its steps, by the number of its tokens; after its end, by 0."""
    seq_id = loop.add(Job(prompt_ids, num_output))
    found: dict[int, object] = {}
    while loop.scheduler.has_unfinished:
        loop.step()
        view = loop.scheduler.view(seq_id)
        if view is not None and view.num_known > view.num_prompt_tokens:
            found[view.num_known] = seen(loop, seq_id)
    stats = loop.scheduler.stats()
    found[0] = loop.served[seq_id].output, loop.served[seq_id].reason, tuple(loop.news), stats.num_cached_blocks
    return found


@pytest.mark.parametrize("groups", [(KVGroup(),), WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("admission", ["optimistic", "reserve"])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_a_rejection_at_any_draft_leaves_the_state_of_plain_decoding(
    groups: tuple[KVGroup, ...], admission: Any, num_drafts: int
) -> None:
    """Computed and published positions, blocks, windows, contents, and changes of the cache, after every step; and a
    second turn that hits what the first has left."""
    config = replace(ROOMY, groups=groups, admission=admission)
    turns = [(tuple(range(9)), 17), ((*range(9), 3, 1), 12)]
    plain = Drafting(config, can_stop=False, forces=False)
    expected = [by_length(plain, *turn) for turn in turns]
    for num_right in range(num_drafts + 1):
        loop = Drafting(config, can_stop=False, forces=False, num_drafts=num_drafts, num_right=num_right)
        for turn, known in zip(turns, expected, strict=True):
            found = by_length(loop, *turn)
            assert found.items() <= known.items(), f"{num_right} of {num_drafts} drafts are right"
            assert len(found) == len(known) or num_right
        accepted = sum(sum(events.num_accepted) for events in loop.events)
        assert (accepted > 0) == (num_right > 0)
        assert len(loop.plans) <= len(plain.plans) - accepted


def decisions(loop: Drafting) -> list[tuple[object, ...]]:
    """Each step without its drafts, and without the numbers of blocks, which are others."""
    found: list[tuple[object, ...]] = []
    for plan, events in zip(loop.plans, loop.events, strict=True):
        drafts = plan.drafts or (0,) * len(plan.lengths)
        plain = tuple(length - count for length, count in zip(plan.lengths, drafts, strict=True))
        moves = len(plan.evicted), len(plan.swap_out), len(plan.swap_in)
        changes = plan.admitted, plan.resumed, plan.preempted, plan.num_prompt_tokens
        found.append((plan.step, plan.seq_ids, plan.starts, plain, plan.samples, moves, changes))
        found.append((events.finished, events.num_tokens))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_rejected_drafts_change_no_decision_about_any_sequence(seed: int) -> None:
    """Wrong drafts for all sequences, with any config and commands: they displace no row, preempt nothing, evict
    nothing, and lose nothing."""
    print(f"seed {seed}")
    loops = []
    for num_drafts in (0, 1 + seed % 6):
        rng = random.Random(seed)
        config = random_config(rng)
        if seed % 2:
            config = with_groups(config, rng)
            config = replace(config, groups=tuple([group for group in config.groups if not group.is_state]))
        loop = Drafting(config, num_drafts=num_drafts)
        drive(loop, rng)
        loops.append(loop)
    plain, drafting = loops
    assert decisions(drafting) == decisions(plain)
    assert drafting.news == plain.news
    assert any(plan.drafts for plan in drafting.plans)
    assert not any(sum(events.num_accepted) for events in drafting.events)


def decoding(**limits: Any) -> Scheduler:
    """A scheduler with a sequence of 5 prompt tokens and one of output, which is computed next."""
    core = scheduler(**limits)
    core.add(Request(5, 20))
    step(core)
    return core


def verify(core: Scheduler, num_tokens: int, num_accepted: int) -> StepPlan:
    """Run a step of one row whose sequence gets these tokens."""
    plan = core.schedule()
    core.commit(plan, StepResult((num_tokens,), (None,), (num_accepted,)))
    core.check()
    return plan


def test_a_row_has_its_drafts_and_the_next_one_begins_after_the_accepted_ones() -> None:
    core = decoding()
    core.propose({0: 3})
    plan = verify(core, 3, 2)
    assert (rows(plan), plan.drafts, plan.samples, plan.tables) == ([(0, 5, 4)], (3,), (True,), ((1, 2, 3),))
    view = core.view(0)
    assert view is not None
    assert (view.num_computed, view.num_known, view.table) == (8, 9, (1, 2))
    plan = step(core)
    assert (rows(plan), plan.drafts) == ([(0, 8, 1)], ())


def test_forced_tokens_after_an_accepted_draft_are_the_next_segment() -> None:
    core = decoding()
    core.propose({0: 2})
    verify(core, 4, 1)
    view = core.view(0)
    assert view is not None
    assert (view.num_computed, view.num_known) == (7, 10)
    assert [segment.length for segment in view.segments] == [5, 1, 1, 3]
    core.propose({0: 2})
    plan = step(core)
    assert (rows(plan), plan.drafts) == ([(0, 7, 5)], (2,)), "drafts may follow a segment"


def test_proposals_hold_for_one_step_and_those_of_unknown_sequences_are_dropped() -> None:
    core = decoding()
    core.propose({7: 2})
    assert step(core).drafts == ()
    core.propose({0: 2})
    core.propose({})
    assert step(core).drafts == ()


def test_drafts_use_what_is_left_of_the_token_budget() -> None:
    core = scheduler(max_num_batched_tokens=24, max_num_seqs=4)
    core.add(Request(4, 20))
    core.add(Request(4, 20))
    step(core)
    core.add(Request(14, 20))
    core.propose({0: 5, 1: 5})
    plan = step(core)
    assert lengths(plan) == {0: 6, 1: 4, 2: 14}, "the prompt is whole"
    assert plan.drafts == (5, 3, 0)


def test_drafts_take_only_blocks_without_content() -> None:
    core = scheduler(num_blocks=4)
    core.add(prompt([1] * 9, 1))
    step(core)
    assert core.stats().num_cached_blocks == 2
    core.add(Request(4, 12))
    step(core)
    core.propose({1: 6})
    plan = step(core)
    assert (plan.drafts, plan.evicted) == ((3,), ()), "one free block holds the token and three drafts"
    assert core.stats().num_cached_blocks == 2


def test_the_last_token_is_never_a_draft() -> None:
    core = scheduler()
    core.add(Request(5, 4))
    step(core)
    core.propose({0: 9})
    plan = core.schedule()
    assert plan.drafts == (2,)
    events = core.commit(plan, StepResult((3,), (None,), (2,)))
    assert [finish.reason for finish in events.finished] == [FinishReason.LENGTH]


@pytest.mark.parametrize(("num_tokens", "num_accepted"), [(1, 1), (3, 0), (4, 3), (2, -1)])
def test_a_result_with_impossible_counts_is_a_defect(num_tokens: int, num_accepted: int) -> None:
    core = scheduler(max_forced_tokens=2)
    core.add(Request(5, 20))
    step(core)
    core.propose({0: 2})
    plan = core.schedule()
    with pytest.raises(AssertionError):
        core.commit(plan, StepResult((num_tokens,), (None,), (num_accepted,)))


def test_models_with_states_have_no_drafts() -> None:
    core = scheduler(groups=(KVGroup(), KVGroup(1, is_state=True, snapshot_interval=4)))
    assert not core.config.allows_drafts
    with pytest.raises(AssertionError, match="states"):
        core.propose({0: 1})


def test_a_failed_step_releases_the_blocks_of_its_drafts() -> None:
    core = decoding()
    core.propose({0: 9})
    plan = core.schedule()
    assert len(plan.tables[0]) == 4
    core.fail(plan)
    core.check()
    assert core.num_held_blocks == 2


def test_a_state_contains_the_proposals_and_the_drafts_of_the_current_step() -> None:
    core = decoding()
    core.propose({0: 3})
    between = Scheduler.from_state(core.config, core.state())
    plan = core.schedule()
    assert between.schedule() == plan
    during = Scheduler.from_state(core.config, core.state())
    result = StepResult((3,), (None,), (2,))
    events = core.commit(plan, result)
    pending = during.state().pending
    assert pending is not None
    assert during.commit(pending, result) == events
    assert during.state() == core.state()


def test_repeated_steps_go_on_after_drafts() -> None:
    """A run of repeating steps ends with a proposal, and decides as if each step were planned."""
    core, planned = decoding(), decoding()
    for number in range(18):
        plans = []
        for each, explain in ((core, None), (planned, lambda reason: None)):
            if number % 5 == 4:
                each.propose({0: 3})
            plan = each.schedule(explain)
            each.commit(plan, answer(plan))
            plans.append(plan)
        assert plans[0] == plans[1]
    assert core.stats() == planned.stats()
    assert core.num_quiet_steps() == planned.num_quiet_steps()


def test_the_record_of_a_step_with_drafts_byte_by_byte() -> None:
    core = scheduler()
    core.add(Request(5, 20))
    core.add(Request(4, 20))
    seen = Fingerprint()
    plan = core.schedule()
    seen.observe(plan, commit(core, plan))
    core.propose({1: 3})
    plan = core.schedule()
    closed = seen.observe(plan, core.commit(plan, StepResult((1, 3), (None, None), (0, 2))))
    assert closed is not None
    # tag, seven lists, gone | row 1: id, start, length and samples, kept, a block each for the token and two drafts
    record = bytes([3, *[0] * 8, 1, 1, 1, 4, 9, 1, 1, 4])
    # row 1 got 3 tokens, no end | row 1: 3 drafts, 2 accepted | repeats
    assert seen.open_record == record + bytes([1, 1, 3, 0, 1, 1, 3, 2, 0])
    plan = core.schedule()
    seen.observe(plan, commit(core, plan))
    assert seen.open_record is not None
    assert seen.open_record[0] == 1
    assert rows(plan) == [(0, 6, 1), (1, 7, 1)]
    core.propose({0: 2})
    plan = core.schedule()
    seen.observe_failure(plan)
    assert seen.open_record[0] == 4
    assert seen.open_record[-5:] == bytes([1, 0, 2, 0, 0])


def test_accepted_counts_are_part_of_the_fingerprint() -> None:
    core = decoding()
    core.propose({0: 2})
    plan = core.schedule()
    prints = set()
    for num_accepted in range(3):
        twin = Scheduler.from_state(core.config, core.state())
        pending = twin.state().pending
        assert pending is not None
        seen = Fingerprint()
        seen.observe(plan, twin.commit(pending, StepResult((3,), (None,), (num_accepted,))))
        prints.add(seen.hexdigest())
    assert len(prints) == 3
