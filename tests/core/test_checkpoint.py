"""Frozen and thawed, a scheduler goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.checkpoint import freeze, thaw
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepResult
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
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "step", "step", "steps", "abort", "fail", "pin", "sweep", "reset"]))
    .map(lambda kind: kind[0])
    .flatmap(lambda kind: st.tuples(st.just(kind), st.integers(0, 1000))),
    max_size=40,
)


class Driven:
    """A scheduler with its fingerprint, driven by numbers alone."""

    def __init__(self, core: Scheduler, seen: Fingerprint) -> None:
        self.core = core
        self.seen = seen

    def do(self, what: str, number: int) -> object:
        """One operation; what it brought, for comparison."""
        core = self.core
        tokens = [*PREFIX[: number % 14], number % 5]
        match what:
            case "add":
                output = None if number % 7 == 0 else 1 + number % 9
                more: dict[str, Any] = {"priority": number % 3 - 1, "tenant": "ab"[number % 2]}
                try:
                    return core.add(prompt(tokens, output, **more))
                except RequestError as error:
                    return str(error)
            case "abort":
                return core.abort(number % 20)
            case "pin":
                core.pin(prompt(tokens).block_hashes)
                return None
            case "sweep":
                return core.sweep(prompt(tokens).block_hashes)
            case "reset":
                return core.reset_prefix_cache()
            case "steps":
                return [self._step(0) for _ in range(8)]
        return self._step(number, fails=what == "fail")

    def _step(self, number: int, fails: bool = False) -> object:
        plan = self.core.schedule()
        if not plan.has_work:
            return plan
        if fails:
            self.core.fail(plan)
            return plan, self.seen.observe_failure(plan)
        counts = [1 + (number + index) % 4 if number % 5 == 0 else 1 for index in range(plan.num_samples)]
        finishes = [FinishReason.STOP if (number + index) % 11 == 1 else None for index in range(plan.num_samples)]
        events = self.core.commit(plan, StepResult(tuple(counts), tuple(finishes)))
        self.core.check()
        return plan, events, self.seen.observe(plan, events)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    before=OPERATIONS,
    after=OPERATIONS,
    order=st.sampled_from(["fcfs", "priority", "fair"]),
    preemption=st.sampled_from(["swap", "recompute"]),
    admission=st.sampled_from(["optimistic", "reserve"]),
)
def test_what_is_thawed_decides_every_continuation_as_the_original_would(
    before: list[tuple[str, int]], after: list[tuple[str, int]], order: Any, preemption: Any, admission: Any
) -> None:
    limits = replace(CONFIG, order=order, preemption=preemption, admission=admission)
    one = Driven(Scheduler(limits), Fingerprint())
    for operation in before:
        one.do(*operation)
    frozen, seen = freeze(one.core), freeze(one.seen)
    other = Driven(thaw(frozen, limits), thaw(seen, limits))
    assert freeze(other.core) == frozen
    for operation in (*after, *[("step", number) for number in range(30)]):
        assert one.do(*operation) == other.do(*operation)
        assert one.core.stats() == other.core.stats()
    assert one.seen.hexdigest() == other.seen.hexdigest()
    assert freeze(one.core) == freeze(other.core)


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
