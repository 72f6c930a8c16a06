"""A scheduler that continues from a state decides as if it had not been interrupted."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lockstep.core.blocks import BlockPool, HostPool
from lockstep.core.decode_shares import DecodeShares
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.groups import ONE_GROUP, KVGroup
from lockstep.core.kv import KVCache
from lockstep.core.other_groups import OtherGroups
from lockstep.core.planner import StepPlanner
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import PrefixCache
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import RunningLists, Sequence, SequenceState
from lockstep.core.state import STATE_VERSION, FingerprintState, KVState, SavedSequence, SchedulerState
from lockstep.core.stats import Counters
from lockstep.core.step import StepPlan, StepResult
from lockstep.errors import RequestError
from tests.core.drive import needs_interpreted, prompt, scheduler, step

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
GROUPS = (
    ONE_GROUP,
    (KVGroup(), KVGroup(2, window=6)),
    (KVGroup(), KVGroup(window=9), KVGroup(2, is_state=True, snapshot_interval=8)),
)
PREFIX = tuple(range(16))
KEPT: dict[type[Any], set[str]] = {
    Scheduler: {"_sequences", "_counters", "_next_id", "_step", "_pending", "_proposed", "_aborting"},
    Fingerprint: {"_digest", "_body", "_repeats", "_before", "_before_ended", "_before_plain", "_shift"},
    KVCache: {"_moved_out", "_moved_in"},
    BlockPool: {"_free", "_cached", "_pinned", "num_allocated"},
    HostPool: {"_free", "_leaving"},
    PrefixCache: {"_hash_of", "_pins"},
    TenantLedger: {"_served"},
    Counters: {field.name for field in fields(Counters)},
    DecodeShares: {"clock"},
    Sequence: {*getattr(Sequence, "__slots__", ())} - {"rank", "num_prompt", "stride", "listed_others", "other_tables"},
}
"""Attributes that are part of a state, in its form."""
FOLLOWS: dict[type[Any], set[str]] = {
    Scheduler: {"config", "_kv", "_ledger", "_queue", "_running"},
    Fingerprint: {"_ids", "_ends", "_tables", "_samples", "_num_sampled", "_before_tables"},
    KVCache: {"_config", "_block_size", "pool", "host", "prefix", "others"},
    OtherGroups: {"_config", "_block_size", "_groups", "_pool", "_prefix", "nothing", "_interval", "_keeps_answers"},
    BlockPool: {"num_blocks", "_refs"},
    HostPool: {"num_blocks"},
    PrefixCache: {"_block_of", "_further", "_pinned"},
    TenantLedger: {"_max_tenants", "_unfinished"},
    WaitingQueue: {"_config", "_ledger", "_lines", "num_tokens", "num_bulk", "_size"},
    RunningLists: {"prefilling", "decoding", "preempted"},
    DecodeShares: {"_config", "_order", "_is_weighted"},
    StepPlanner: {
        *("_config", "_kv", "_queue", "_ledger", "_running", "shares", "_sequences"),
        *("_reserves", "_order_is_fixed"),
    },
    Sequence: {"rank", "num_prompt", "stride"},
}
"""Attributes that follow from the state and the config."""
SCRATCH: dict[type[Any], set[str]] = {
    Scheduler: {"_listener", "_planner", "_pending_seqs", "_run", "_is_settled", "_finished"},
    KVCache: {"_evicted", "_swap_out", "_swap_in"},
    BlockPool: {"num_released"},
    PrefixCache: {"num_published", "news"},
    WaitingQueue: {"num_changes"},
    StepPlanner: {"_nobody_fits_at", "_explain"},
    Sequence: {"listed_others", "other_tables"},
}
"""Attributes that only save work, are empty outside of planning, or are not yet requested."""
VALUES: set[type[Any]] = {SchedulerConfig, Request, SequenceState}
"""Classes whose objects do not change."""


class Side:
    """A scheduler with its fingerprint, and the current step."""

    def __init__(self, core: Scheduler, seen: Fingerprint, plan: StepPlan | None = None) -> None:
        self.core = core
        self.seen = seen
        self.plan = plan

    def state(self) -> tuple[SchedulerState, FingerprintState]:
        return self.core.state(), self.seen.state()

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
    """A live scheduler whose state is read at any time, and one that continues from a state and gets recorded commands.

    Both have equal states whenever a file could begin, between two steps or during one, and they decide equally on any
    input.
    """

    @initialize(
        order=st.sampled_from(["fcfs", "priority", "fair"]),
        preemption=st.sampled_from(["swap", "recompute"]),
        admission=st.sampled_from(["optimistic", "reserve"]),
        skips=st.sampled_from([1, 64]),
        width=st.sampled_from([None, 1, 2]),
        decode_order=st.sampled_from(["weighted", "priority", "oldest"]),
        aging=st.sampled_from([0, 2]),
        groups=st.sampled_from(GROUPS),
    )
    def start(self, skips: int, width: int | None, aging: int, groups: tuple[KVGroup, ...], **policy: Any) -> None:
        limits = replace(CONFIG, max_skips=skips, max_num_decode_seqs=width, priority_aging_steps=aging, **policy)
        if len(groups) > 1:
            limits = replace(limits, groups=groups, num_blocks=34, num_host_blocks=16)
        self.live = Side(Scheduler(limits), Fingerprint())
        self.restored = Side(Scheduler(limits), Fingerprint())

    @rule()
    def rotate(self) -> None:
        core, seen = self.live.state()
        other = Scheduler.from_state(self.live.core.config, core)
        self.restored = Side(other, Fingerprint.from_state(seen), core.pending)

    @rule(shared=st.integers(0, 13), number=st.integers(0, 1000))
    def add(self, shared: int, number: int) -> None:
        if self.live.plan is not None:
            return
        more: dict[str, Any] = {"priority": number % 3 - 1, "tenant": "ab"[number % 2]}
        if number % 4 == 0:
            more["snapshots"] = (8,)
        request = prompt([*PREFIX[:shared], number % 5], None if number % 7 == 0 else 1 + number % 9, **more)
        try:
            seq_id = self.live.core.add(request)
        except RequestError:
            return
        assert self.restored.core.add(request) == seq_id

    @rule(number=st.integers(0, 1000))
    def add_and_abort(self, number: int) -> None:
        """Abort before the first step."""
        if self.live.plan is None:
            seq_id = self.live.core.state().next_id
            self.add(number % 14, number)
            self.abort(seq_id)

    @rule(seq_id=st.integers(0, 20))
    def abort(self, seq_id: int) -> None:
        if self.live.core.abort(seq_id):
            assert self.restored.core.abort(seq_id)

    @rule(length=st.integers(0, 14), what=st.sampled_from(["pin", "sweep", "reset"]))
    def cache(self, length: int, what: str) -> None:
        if self.live.plan is None:
            hashes = prompt([*PREFIX[:length], 0]).block_hashes
            for side in (self.live, self.restored):
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
            self.live.plan, self.restored.plan = plan, self.restored.core.schedule()
            assert self.restored.plan == plan

    @rule(number=st.integers(0, 1000))
    def commit(self, number: int) -> None:
        if self.live.plan is not None:
            assert self.live.commit(number) == self.restored.commit(number)

    @rule()
    def fail(self) -> None:
        if self.live.plan is not None:
            assert self.live.fail() == self.restored.fail()

    @rule(count=st.integers(1, 12), number=st.integers(0, 1000), rotation=st.integers(0, 15))
    def steps(self, count: int, number: int, rotation: int) -> None:
        """Run several steps, some of which repeat, with a rotation among them."""
        for index in range(count):
            if index == rotation:
                self.rotate()
            self.schedule()
            self.commit(number)

    @rule(seq_id=st.integers(0, 20))
    def look(self, seq_id: int) -> None:
        """Read views, as metrics, health and sessions do at any time."""
        core = self.live.core
        core.view(seq_id)
        core.drain_finished()
        if self.live.plan is None:
            core.num_quiet_steps()
            core.check()

    @invariant()
    def both_are_in_one_state(self) -> None:
        if hasattr(self, "live"):
            assert self.live.state() == self.restored.state()
            assert self.live.core.stats() == self.restored.core.stats()
            assert self.live.seen.hexdigest() == self.restored.seen.hexdigest()

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


def attributes(value: object) -> dict[str, object]:
    slots = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name) for name in slots} if slots else vars(value)


def parts_of(core: Scheduler) -> dict[type[Any], dict[str, object]]:
    """The classes of all mutable objects of the core that a scheduler refers to, with the attributes of one object."""
    found: dict[type[Any], dict[str, object]] = {}
    left: list[object] = [core]
    while left:
        value = left.pop()
        if isinstance(value, dict | list | tuple):
            left += value.values() if isinstance(value, dict) else value
        elif type(value).__module__.startswith("lockstep.core.") and type(value) not in VALUES | found.keys():
            found[type(value)] = attributes(value)
            left += found[type(value)].values()
    return found


@needs_interpreted
def test_every_attribute_of_the_core_is_in_the_state_or_listed_as_omitted() -> None:
    """So that no deciding attribute is omitted."""
    core = scheduler(order="fair", num_host_blocks=4)
    core.add(prompt(9))
    attributes_of = {Fingerprint: attributes(Fingerprint())} | parts_of(core)
    assert {*attributes_of} == {*KEPT, *FOLLOWS, *SCRATCH}
    for kind, own in attributes_of.items():
        listed = [name for table in (KEPT, FOLLOWS, SCRATCH) for name in table.get(kind, ())]
        assert sorted(listed) == sorted(own), kind.__name__


def test_the_declared_state_has_the_declared_version() -> None:
    """A change of the state's contents requires a change of its version, and of this test."""
    made_of = [
        [*kind.__dataclass_fields__] if is_dataclass(kind) else [*kind._fields]
        for kind in (SchedulerState, KVState, SavedSequence, FingerprintState, Counters, StepPlan, Request)
    ]
    digest = blake2b(repr(made_of).encode(), digest_size=8).hexdigest()
    assert (STATE_VERSION, digest) == (6, "f62e94475bde3ed6")


@needs_interpreted
def test_scheduling_without_unfinished_sequences_changes_nothing() -> None:
    core = scheduler()
    core.add(prompt(9, 2))
    step(core)
    core.abort(0)
    before = {name: id(value) for name, value in vars(core).items()}
    state = core.state()
    for _ in range(3):
        assert core.schedule() == StepPlan(1, (), (), (), (), (), (), (), (), ())
    assert {name: id(value) for name, value in vars(core).items()} == before
    assert core.state() == state


def test_a_state_may_be_taken_during_a_step() -> None:
    core = scheduler()
    core.add(prompt(9))
    plan = core.schedule()
    core.abort(0)
    other = Scheduler.from_state(core.config, core.state())
    core.fail(plan)
    assert not core.has_unfinished
    with pytest.raises(AssertionError, match="neither committed nor failed"):
        other.schedule()


def test_later_steps_do_not_change_a_state() -> None:
    core = scheduler(order="fair", num_host_blocks=4)
    core.add(prompt(9, tenant="one"))
    step(core)
    state, seen = core.state(), repr(core.state())
    for _ in range(3):
        step(core)
    core.abort(0)
    assert repr(state) == seen
    assert repr(Scheduler.from_state(core.config, state).state()) == seen


def test_contents_and_tenants_may_be_renamed_in_a_state() -> None:
    """A state has hashes and tenants in no other place, and decisions do not depend on their names."""
    core = scheduler(order="fair")
    for number, tenant in enumerate(("key one", "key two", "key one")):
        core.add(prompt([*PREFIX, number], tenant=tenant))
    for _ in range(3):
        step(core)
    core.pin(prompt([*PREFIX, 1]).block_hashes)
    state = core.state()
    bare = state._replace(contents=(), tenants=())
    assert "key" not in str(bare)
    assert "b'" not in str(bare)
    contents = tuple(number.to_bytes(16, "little") for number in range(len(state.contents)))
    tenants = tuple(map(str, range(len(state.tenants))))
    other = Scheduler.from_state(core.config, state._replace(contents=contents, tenants=tenants))
    for _ in range(8):
        assert step(core) == step(other)
