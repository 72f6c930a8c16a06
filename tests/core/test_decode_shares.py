"""Shares of decoding: bounded waits, proportional tokens, and no change if all running sequences fit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.decode_shares import MAX_STRIDE
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request, weight_of
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import SequenceState
from lockstep.core.step import StepPlan
from tests.core.drive import commit, config, scheduler, step


def sampled(plan: StepPlan) -> list[int]:
    return [seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]


def tokens_of(core: Scheduler, num_steps: int) -> list[int]:
    """Tokens that each sequence got within a number of steps."""
    counts = [0] * core.num_unfinished
    for _ in range(num_steps):
        for seq_id in sampled(step(core)):
            counts[seq_id] += 1
    return counts


def running(priorities: list[int], width: int, **limits: Any) -> Scheduler:
    """Endless requests that are all admitted in the first step."""
    core = scheduler(
        block_size=64,
        num_blocks=32 * len(priorities),
        max_num_seqs=len(priorities),
        max_num_decode_seqs=width,
        **limits,
    )
    for priority in priorities:
        core.add(Request(4, 1900, priority=priority))
    return core


@pytest.mark.parametrize("decode_order", ["weighted", "priority"])
@pytest.mark.parametrize(("count", "width"), [(3, 2), (64, 32), (5, 3), (7, 6), (9, 1)])
def test_equal_requests_get_equal_numbers_of_tokens(decode_order: str, count: int, width: int) -> None:
    counts = tokens_of(running([0] * count, width, decode_order=decode_order), 250)
    assert sum(counts) == 250 * width
    assert max(counts) - min(counts) <= 2, "one for the first step, in which some had no place, and one for the last"


@pytest.mark.parametrize(("high", "low", "ratio"), [(-2, 1, 8), (-1, 1, 4), (0, 1, 2), (-2, 0, 4), (-9, 5, 8)])
def test_tokens_are_shared_by_the_weights_of_priorities(high: int, low: int, ratio: int) -> None:
    counts = tokens_of(running([high] * 4 + [low] * 4, 4), 900)
    assert sum(counts[:4]) == pytest.approx(ratio * sum(counts[4:]), rel=0.02)
    for group in (counts[:4], counts[4:]):
        assert max(group) - min(group) <= 1


def test_a_sequence_with_a_share_above_one_token_samples_in_every_step() -> None:
    """One critical and seven low requests: the critical one has 8 of 15 shares of two places."""
    counts = tokens_of(running([-2] + [1] * 7, 2), 701)
    assert counts[0] >= 695
    assert max(counts[1:]) - min(counts[1:]) <= 1


def test_higher_priorities_first_leaves_lower_ones_waiting_unless_they_age() -> None:
    assert tokens_of(running([-2, -2, 1], 2, decode_order="priority"), 60) == [60, 60, 0]
    assert tokens_of(running([-2, -2, 1], 2, decode_order="priority", priority_aging_steps=5), 60)[2] == 4
    assert tokens_of(running([-2, -2, 1], 2), 60)[2] == 7


def test_oldest_first_leaves_the_youngest_waiting_whatever_its_priority() -> None:
    core = running([0, 0, -2], 2, decode_order="oldest", priority_aging_steps=5)
    assert tokens_of(core, 60) == [60, 60, 0]


def test_steps_in_which_all_fit_do_not_change_shares() -> None:
    """After 100 common steps, critical and low share the single place as if both were new."""
    core = scheduler(max_num_seqs=3, max_num_decode_seqs=2)
    core.add(Request(4, 900, priority=-2))
    core.add(Request(4, 900, priority=1))
    for _ in range(100):
        assert sampled(step(core)) == [0, 1]
    core.add(Request(4, 900, priority=-2))
    low = [1 in sampled(step(core)) for _ in range(20)]
    assert any(low[:9])
    assert any(low[10:19])


def test_a_claim_is_limited_to_one_token_of_the_lowest_weight() -> None:
    """A critical request that was limited to a token per step for 500 steps shares evenly with a second one."""
    core = scheduler(block_size=64, max_num_seqs=4, max_num_decode_seqs=2)
    for priority in (-2, 1, 1):
        core.add(Request(4, 1900, priority=priority))
    for _ in range(500):
        step(core)
    core.add(Request(4, 1900, priority=-2))
    counts = [0] * 4
    for _ in range(100):
        for seq_id in sampled(step(core)):
            counts[seq_id] += 1
    assert abs(counts[0] - counts[3]) <= MAX_STRIDE + 1


@pytest.mark.parametrize("seed", range(8))
def test_no_decoding_sequence_is_far_from_the_clock(seed: int) -> None:
    """Also if a long jump-forward segment lacks budget and shorter ones behind it do not."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    core = scheduler(max_num_seqs=6, max_num_decode_seqs=4, max_num_batched_tokens=12, max_forced_tokens=8)
    num_waits = 0
    for _ in range(250):
        if rng.random() < 0.2:
            core.add(Request(rng.randint(1, 20), rng.randint(1, 60), priority=rng.randint(-3, 2)))
        plan = core.schedule()
        if not plan.has_work:
            continue
        commit(core, plan, tokens={seq_id: rng.choice([1, 1, 8]) for seq_id in plan.seq_ids})
        state = core.state()
        clock = state.decode_clock
        for seq in state.sequences:
            if seq.state is not SequenceState.RUNNING or seq.num_computed < seq.num_prefill:
                continue
            num_waits += seq.last_sampled_step < plan.step
            assert clock - MAX_STRIDE <= seq.virtual_time <= clock + MAX_STRIDE // weight_of(seq.request.priority)
    assert num_waits > 20


# -- bounded waits ----------------------------------------------------------------------------------------------------


class Waits:
    """Steps that each running sequence has waited for a token since its first one."""

    def __init__(self, core: Scheduler) -> None:
        self.core = core
        self.since: dict[int, int] = {}
        self.longest = 0

    def step(self) -> None:
        plan = self.core.schedule()
        if not plan.has_work:
            return
        got = sampled(plan)
        ended = {finish.seq_id for finish in commit(self.core, plan).finished}
        self.longest = max([self.longest, *(plan.step - since for since in self.since.values())])
        self.since |= dict.fromkeys(got, plan.step)
        for seq_id in ended:
            del self.since[seq_id]

    def bound(self, rounds: int) -> int:
        """Documented bound: one place of a step is reserved for a prompt."""
        limits = self.core.config
        return -(-rounds * limits.max_num_seqs // min(limits.decode_limit, max(1, limits.step_limit - 1)))


@st.composite
def loads(draw: st.DrawFn) -> tuple[SchedulerConfig, list[list[Request]]]:
    """Few places, and requests of any priority, length and number that arrive while others run."""
    num_seqs = draw(st.integers(2, 9))
    limits = config(
        num_blocks=5000,
        max_num_seqs=num_seqs,
        max_num_decode_seqs=draw(st.integers(1, num_seqs)),
        max_num_step_seqs=draw(st.integers(1, num_seqs)),
        max_chunk_tokens=draw(st.sampled_from([3, 8, 256])),
        order=draw(st.sampled_from(["fcfs", "priority", "fair"])),
    )
    priorities = draw(st.sampled_from([[0], [-2, 1], [-2, -1, 0, 1], [-7, 5], [1, 1, 1, -2]]))
    seed = draw(st.integers(0, 1 << 20))
    rng = random.Random(seed)
    newcomers, most_output = draw(st.sampled_from([0.2, 0.6, 0.95])), draw(st.sampled_from([1, 3, 60]))

    def request() -> Request:
        output = rng.choice([1, most_output, 200 if rng.random() < 0.1 else 1])
        return Request(rng.randint(1, 30), output, priority=rng.choice(priorities))

    first = [Request(4, 150, priority=rng.choice(priorities)) for _ in range(rng.randint(1, num_seqs))]
    return limits, [first, *([request() for _ in range(3) if rng.random() < newcomers] for _ in range(150))]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(loads())
def test_no_running_sequence_waits_longer_than_the_documented_bound(load: tuple[Any, list[list[Request]]]) -> None:
    limits, arrivals = load
    waits = Waits(Scheduler(limits))
    for requests in arrivals:
        for request in requests:
            waits.core.add(request)
        waits.step()
    is_equal = len({request.priority for requests in arrivals for request in requests}) == 1
    assert waits.longest <= waits.bound(1 if is_equal else 2 * MAX_STRIDE + 1)


def stream(core: Scheduler, num_steps: int, **more: Any) -> Iterator[StepPlan]:
    """Step after which two short requests arrive."""
    for _ in range(num_steps):
        core.add(Request(4, 1, **more))
        core.add(Request(4, 1, **more))
        yield step(core)


@pytest.mark.parametrize("max_chunk_tokens", [3, 256])
def test_new_sequences_of_a_higher_priority_do_not_starve_a_running_one(max_chunk_tokens: int) -> None:
    core = scheduler(
        max_num_seqs=8, max_num_decode_seqs=2, order="priority", max_chunk_tokens=max_chunk_tokens, num_blocks=4000
    )
    core.add(Request(4, 200, priority=5))
    step(core)
    got = [plan.step for plan in stream(core, 300, priority=-2) if 0 in sampled(plan)]
    assert len(core.drain_finished()) > 300
    assert max(after - before for before, after in zip([0, *got], [*got, 300], strict=True)) <= 17 * 8 // 2


def test_a_new_sequence_samples_within_one_round() -> None:
    """After sequences that already wait, before those that sampled at its arrival."""
    core = scheduler(max_num_seqs=7, max_num_decode_seqs=3)
    for _ in range(6):
        core.add(Request(4, 500))
    for _ in range(21):
        step(core)
    core.add(Request(4, 500))
    admitted = step(core)
    assert 6 in admitted.admitted
    plans = [sampled(step(core)) for _ in range(2)]
    assert any(6 in plan for plan in plans)


def test_a_resumed_sequence_has_its_share_again() -> None:
    """Neither its missed tokens nor those of others in the meantime count."""
    core = scheduler(num_blocks=24, max_num_seqs=4, max_num_decode_seqs=2, num_host_blocks=24)
    for _ in range(3):
        core.add(Request(8, 60))
    waits = Waits(core)
    while core.has_work:
        if core.stats().num_preempted:
            waits.since.clear()
        waits.step()
    assert core.stats().num_preemptions > 0
    assert waits.longest <= 2


@pytest.mark.parametrize("seed", range(6))
def test_all_orders_decide_equally_if_all_sequences_fit(seed: int) -> None:
    print(f"seed {seed}")
    prints = set()
    for decode_order in ("weighted", "priority", "oldest"):
        rng, seen = random.Random(seed), Fingerprint()
        core = scheduler(num_blocks=60, max_num_seqs=6, num_host_blocks=9, decode_order=decode_order)
        for _ in range(200):
            if rng.random() < 0.2:
                core.add(Request(rng.randint(1, 20), rng.randint(1, 50), priority=rng.randint(-2, 2)))
            plan = core.schedule()
            if plan.has_work:
                seen.observe(plan, commit(core, plan))
        prints.add(seen.hexdigest())
    assert len(prints) == 1
