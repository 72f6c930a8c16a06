"""Wait reasons are requested periodically if requests wait, and change no decision."""

from __future__ import annotations

import random

import pytest

from lockstep.core.step import Limit
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.outputs import WaitReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.wait_reasons import MIN_INTERVAL_S, PRIORITY, RETURNING, SESSION
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine, OpenStore, Pocket
from tests.engine.kv_sessions import answer, leave, prompt
from tests.engine.kv_sessions import ask as kv_ask

POLICIES = (
    {"order": "priority", "preemption": "recompute"},
    {"order": "fcfs", "max_skips": 1},
    {"order": "fair", "admission": "reserve"},
    {"order": "priority", "max_num_seqs": 3, "max_num_batched_tokens": 24},
)


def ask(num_prompt: int, num_output: int = 24, **more: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    return GenerationRequest([65] * num_prompt, params, **more)  # type: ignore[arg-type]  # fields by name


def test_no_wait_reason_is_reported_without_waiting_requests(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine()
    engine.submit(ask(20))
    while engine.has_work:
        clock.advance(1.0)
        engine.step()
        assert engine.take().waits == []


def test_wait_reasons_are_reported_at_the_minimum_interval(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_seqs=1, order="priority")
    engine.submit(ask(8))
    engine.step()
    behind = engine.submit(ask(8, priority=3))
    told = []
    for _ in range(4):
        engine.step()
        told.append({reason.limit: reason for reason in engine.take().waits})
        clock.advance(MIN_INTERVAL_S * 0.6)
    arrival, first, second, third = told
    assert arrival == {}, "it is not known yet whether it will wait"
    assert first[Limit.SEQS.name] == WaitReason(behind, Limit.SEQS.name, used=1, most=1)
    assert first[PRIORITY] == WaitReason(behind, PRIORITY, num_others=1)
    assert second == {}
    assert third == first


@pytest.mark.parametrize("decode_order", ["weighted", "priority"])
def test_a_running_request_is_behind_higher_priorities_only_under_strict_priority(
    make_engine: MakeEngine, clock: ManualClock, decode_order: str
) -> None:
    """In the queue it is behind them under either order."""
    engine = make_engine(max_num_seqs=2, max_num_decode_seqs=1, order="priority", decode_order=decode_order)
    low = engine.submit(ask(8, priority=1))
    for _ in range(3):
        engine.step()
    engine.submit(ask(8, priority=-2))
    queued = engine.submit(ask(8, priority=1))
    found: dict[int, set[str]] = {low: set(), queued: set()}
    for _ in range(12):
        clock.advance(1.0)
        engine.step()
        for reason in engine.take().waits:
            found.setdefault(reason.request_id, set()).add(reason.limit)
    assert Limit.WIDTH.name in found[low]
    assert (PRIORITY in found[low]) == (decode_order == "priority")
    assert PRIORITY in found[queued]


def test_a_request_starts_once_and_reports_its_queue_time(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    request_id = engine.submit(ask(50))
    clock.advance(0.25)
    started = []
    while engine.has_work:
        engine.step()
        started += engine.take().started
    [begin] = started
    assert (begin.request_id, begin.seq_id, begin.step, begin.queue_s) == (request_id, 0, 0, 0.25)


def test_a_second_session_waits_for_a_place_and_then_for_its_blocks(pocket: Pocket, open_store: OpenStore) -> None:
    """The scheduler does not take part in either wait."""
    engine = Engine(*pocket, store=open_store())
    answer(engine, kv_ask(prompt(2), "b", max_active_sessions=1))
    leave(engine)
    engine.take()
    engine.submit(kv_ask(prompt(1), "a", max_active_sessions=1))
    second = engine.submit(kv_ask(prompt(2), "b", max_active_sessions=1))
    engine.step()
    assert engine.take().waits == [WaitReason(second, SESSION)]
    told = []
    while engine.has_work or engine.num_waiting:
        engine.step()
        told += engine.take().waits
    assert told == [WaitReason(second, RETURNING)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_explained_steps_decide_like_others(make_engine: MakeEngine, policy: dict[str, object]) -> None:
    """One engine's clock stands still, so it explains one step; the other's explains every step with a queue."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    prints, counts = [], []
    for stride_s in (0.0, 10.0):
        draw, clock = random.Random(seed), ManualClock()
        engine = make_engine(num_blocks=12, clock=clock, **policy)
        num_told = 0
        for _ in range(60):
            for _ in range(draw.choice((0, 0, 1, 3))):
                engine.submit(ask(draw.randint(1, 90), draw.randint(1, 40), priority=draw.randint(-1, 2)))
            clock.advance(stride_s)
            if engine.has_work:
                engine.step()
                num_told += len(engine.take().waits)
        while engine.has_work:
            clock.advance(stride_s)
            engine.step()
            num_told += len(engine.take().waits)
        engine.scheduler.check()
        prints.append(engine.fingerprint)
        counts.append(num_told)
    assert prints[0] == prints[1]
    assert counts[1] > counts[0], "the second was asked"
