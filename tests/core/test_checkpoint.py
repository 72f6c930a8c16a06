"""Frozen and thawed, a scheduler goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lockstep.core.checkpoint import STATE, freeze, is_of_this_version, thaw
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from lockstep.errors import RequestError, TraceError
from tests.core.drive import config, prompt, scheduler, step

CONFIG = SchedulerConfig(
    block_size=4,
    num_blocks=12,
    max_model_len=40,
    num_host_blocks=6,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_forced_tokens=4,
    max_num_queued_reqs=6,
)
PREFIX = tuple(range(16))
SCRATCH = {Scheduler: {"_planner", "_pending_seqs", "_run", "_is_settled", "_finished"}}
"""What a checkpoint leaves out, with the reason in `Scheduler.begin_scratch`."""


class Side:
    """A scheduler with its fingerprint, and the step that is under way."""

    def __init__(self, core: Scheduler, seen: Fingerprint, plan: StepPlan | None = None) -> None:
        self.core = core
        self.seen = seen
        self.plan = plan

    def frozen(self) -> tuple[object, object]:
        return freeze(self.core), freeze(self.seen)

    def commit(self, number: int) -> object:
        plan, self.plan = self.plan, None
        assert plan is not None
        counts = [1 + (number + index) % 4 if number % 5 == 0 else 1 for index in range(plan.num_samples)]
        finishes = [FinishReason.STOP if (number + index) % 11 == 1 else None for index in range(plan.num_samples)]
        events = self.core.commit(plan, StepResult(tuple(counts), tuple(finishes)))
        return events, self.seen.observe(plan, events)

    def fail(self) -> object:
        plan, self.plan = self.plan, None
        assert plan is not None
        return self.core.fail(plan), self.seen.observe_failure(plan)


class Rotations(RuleBasedStateMachine):
    """A live scheduler, asked and looked at by everyone, and one that was thawed and hears only what a recording tells.

    Whenever a file could begin, between two steps or in one, both hold the same state; and whatever comes, they decide
    the same.
    """

    @initialize(
        order=st.sampled_from(["fcfs", "priority", "fair"]),
        preemption=st.sampled_from(["swap", "recompute"]),
        admission=st.sampled_from(["optimistic", "reserve"]),
        skips=st.sampled_from([1, 64]),
    )
    def start(self, order: Any, preemption: Any, admission: Any, skips: int) -> None:
        limits = replace(CONFIG, order=order, preemption=preemption, admission=admission, max_skips=skips)
        self.live = Side(Scheduler(limits), Fingerprint())
        self.thawed = Side(Scheduler(limits), Fingerprint())

    @rule()
    def rotate(self) -> None:
        core, seen = self.live.frozen()
        limits = self.live.core.config
        other = thaw(core, limits)
        self.thawed = Side(other, thaw(seen, limits), other._pending)

    @rule(shared=st.integers(0, 13), number=st.integers(0, 1000))
    def add(self, shared: int, number: int) -> None:
        if self.live.plan is not None:
            return
        more: dict[str, Any] = {"priority": number % 3 - 1, "tenant": "ab"[number % 2]}
        request = prompt([*PREFIX[:shared], number % 5], None if number % 7 == 0 else 1 + number % 9, **more)
        try:
            seq_id = self.live.core.add(request)
        except RequestError:
            return
        assert self.thawed.core.add(request) == seq_id

    @rule(number=st.integers(0, 1000))
    def add_and_abort(self, number: int) -> None:
        """Before it ran."""
        if self.live.plan is None:
            seq_id = self.live.core._next_id
            self.add(number % 14, number)
            self.abort(seq_id)

    @rule(seq_id=st.integers(0, 20))
    def abort(self, seq_id: int) -> None:
        if self.live.core.abort(seq_id):
            assert self.thawed.core.abort(seq_id)

    @rule(length=st.integers(0, 14), what=st.sampled_from(["pin", "sweep", "reset"]))
    def cache(self, length: int, what: str) -> None:
        if self.live.plan is None:
            hashes = prompt([*PREFIX[:length], 0]).block_hashes
            for side in (self.live, self.thawed):
                if what == "reset":
                    side.core.reset_prefix_cache()
                else:
                    getattr(side.core, what)(hashes)

    @rule()
    def schedule(self) -> None:
        if self.live.plan is not None:
            return
        plan = self.live.core.schedule()
        if plan.has_work:  # no recording tells of any other
            self.live.plan, self.thawed.plan = plan, self.thawed.core.schedule()
            assert self.thawed.plan == plan

    @rule(number=st.integers(0, 1000))
    def commit(self, number: int) -> None:
        if self.live.plan is not None:
            assert self.live.commit(number) == self.thawed.commit(number)

    @rule()
    def fail(self) -> None:
        if self.live.plan is not None:
            assert self.live.fail() == self.thawed.fail()

    @rule(count=st.integers(1, 12), number=st.integers(0, 1000), rotation=st.integers(0, 15))
    def steps(self, count: int, number: int, rotation: int) -> None:
        """Enough of them that some repeat, with a rotation among them."""
        for index in range(count):
            if index == rotation:
                self.rotate()
            self.schedule()
            self.commit(number)

    @rule(seq_id=st.integers(0, 20))
    def look(self, seq_id: int) -> None:
        """As metrics, health and sessions do, at any time."""
        core = self.live.core
        core.view(seq_id)
        core.drain_finished()
        if self.live.plan is None:
            core.num_quiet_steps()
            core.check()

    @invariant()
    def both_are_in_one_state(self) -> None:
        if hasattr(self, "live"):
            assert self.live.frozen() == self.thawed.frozen()
            assert self.live.core.stats() == self.thawed.core.stats()
            assert self.live.seen.hexdigest() == self.thawed.seen.hexdigest()

    def teardown(self) -> None:
        if hasattr(self, "live"):
            if self.live.plan is not None:
                self.commit(2)
            for rotation in (2, 5, 7):  # among steps that repeat
                self.add(4, 8)
                self.add(9, 17)
                self.steps(9, 2, rotation)
            self.steps(300, 2, 300)
            assert not self.live.core.has_unfinished
            self.both_are_in_one_state()


TestRotations = Rotations.TestCase
TestRotations.settings = settings(max_examples=50, stateful_step_count=30, derandomize=True)


def test_every_attribute_of_the_core_is_state_or_said_to_be_none() -> None:
    """So that nothing becomes part of recordings unseen, and nothing that decides is forgotten."""
    core = scheduler(order="fair", num_host_blocks=4)
    core.add(prompt(9))
    plan = core.schedule()
    seen = Fingerprint()
    values: list[Any] = [core, seen, core._kv, core._kv.pool, core._kv.host, core._kv.prefix, core._ledger]
    values += [core._queue, core._roster, core._counters, core._sequences[0], core._sequences[0].request, plan]
    assert {type(value) for value in values} == {kind for kind in STATE if not issubclass(kind, Enum)}
    for value in values:
        kind = type(value)
        own = set(getattr(kind, "__slots__", ())) or set(vars(value))
        assert own == {*STATE[kind], *SCRATCH.get(kind, ())}, kind.__name__


def test_asking_for_a_step_where_nobody_is_unfinished_changes_nothing() -> None:
    core = scheduler()
    core.add(prompt(9, 2))
    step(core)
    core.abort(0)
    before = {name: id(value) for name, value in vars(core).items()}
    frozen = freeze(core)
    for _ in range(3):
        assert core.schedule() == StepPlan(1, (), (), (), (), (), (), (), (), ())
    assert {name: id(value) for name, value in vars(core).items()} == before
    assert freeze(core) == frozen


def test_a_step_may_be_under_way() -> None:
    core = scheduler()
    core.add(prompt(9))
    plan = core.schedule()
    core.abort(0)
    other = thaw(freeze(core), core.config)
    core.fail(plan)
    assert not core.has_unfinished
    with pytest.raises(AssertionError, match="neither committed nor failed"):
        other.schedule()


def test_contents_and_tenants_show_as_numbers_and_thaw_as_any_other_names() -> None:
    """No hash and no tenant is in what is frozen, and the decisions are the same by other names."""
    core = scheduler(order="fair")
    ids: dict[bytes | str, int] = {}
    for tenant in ("key one", "key two", "key one"):
        core.add(prompt([*PREFIX, len(ids)], tenant=tenant))
    for _ in range(3):
        step(core)
    number = lambda value: ids.setdefault(value, len(ids))  # noqa: E731  # a dictionary in the form of a function
    frozen = freeze(core, number, number)
    assert "key" not in str(frozen)
    assert "b'" not in str(frozen)
    other = thaw(frozen, core.config, lambda number: number.to_bytes(16, "little"), str)
    for _ in range(8):
        assert step(core) == step(other)


def test_a_subclass_is_frozen_as_a_scheduler() -> None:
    class Watched(Scheduler):
        def __init__(self, limits: SchedulerConfig) -> None:
            super().__init__(limits)
            self.told: list[float] = [0.5]

    core = Watched(config())
    core.add(Request(3))
    assert type(thaw(freeze(core), core.config)) is Scheduler


def test_whose_it_is_can_be_asked_before_it_is_thawed() -> None:
    layout, state = freeze(scheduler())
    assert is_of_this_version([layout, state])
    [number, *names], *others = layout
    assert not is_of_this_version([[[number, *names, "_pending_seqs"], *others], state])
    with pytest.raises(TraceError, match="another version"):
        thaw([[[number, *names[1:]], *others], state], config())
    for damaged in (None, [], [[[99]]], [[7]]):
        with pytest.raises(TraceError, match="checkpoint"):
            is_of_this_version(damaged)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        [[], [99]],
        [[], [0, 3]],
        [[], "scheduler"],
        [[[0, "config", "_kv"]], [1, 0, [11], None]],
        [[[99]], [2]],
        [[], [2, 1, 2]],
        [[[12, "seq_id"]], [1, 12, 3]],
    ],
)
def test_what_is_no_checkpoint_is_refused(damaged: object) -> None:
    with pytest.raises(TraceError, match="checkpoint"):
        thaw(damaged, config())
