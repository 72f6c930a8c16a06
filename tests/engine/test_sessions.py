"""Sessions: retained blocks, limits, eviction, and independence of the answers' bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.request import FinishReason
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.llm import LLM
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionChange, SweepResult
from lockstep.errors import InvalidParameterError, QueueDeadlineError, QueueFullError, RequestFailedError
from lockstep.executors.sampling_params import SamplingParams

BLOCK = 16
Make = Callable[..., Engine]


@pytest.fixture
def changes() -> list[SessionChange]:
    return []


@pytest.fixture
def make(clock: ManualClock, changes: list[SessionChange]) -> Make:
    def make(num_blocks: int = 64, **scheduler: Any) -> Engine:
        model, config = load_model("stub://s", LoadOptions(EngineOptions(num_blocks=num_blocks, **scheduler)))
        return Engine(model, config, clock=clock, on_session=changes.append)

    return make


def ask(text: str, session: str | None = None, **fields: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return GenerationRequest(tuple(text.encode()), params, session_id=session, **fields)  # type: ignore[arg-type]  # by name


def answer(engine: Engine, request: GenerationRequest) -> RequestOutput:
    request_id = engine.submit(request)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    return output


def told(changes: list[SessionChange]) -> list[tuple[object, ...]]:
    said: list[tuple[object, ...]] = [
        (change.session_id, change.what, change.num_blocks, change.reason) for change in changes
    ]
    changes.clear()
    return said


def test_a_sessions_prompt_is_cached_after_others_used_the_pool(make: Make) -> None:
    for session, found in (("s", 4 * BLOCK), (None, 0)):
        engine = make(num_blocks=24)
        answer(engine, ask("a" * 70, session))
        for letter in "bcdefghij":
            answer(engine, ask(letter * 70))
        assert answer(engine, ask("a" * 70 + "more", session)).num_cached_tokens == found
        engine.scheduler.check()


def test_the_full_blocks_of_the_last_prompt_are_retained(
    make: Make, clock: ManualClock, changes: list[SessionChange]
) -> None:
    engine = make()
    answer(engine, ask("a" * 40, "s"))
    assert told(changes) == [("s", "admitted", 0, None), ("s", "kept", 2, None)]
    clock.advance(2.0)
    answer(engine, ask("a" * 64, "s"))
    assert told(changes) == [("s", "kept", 4, None)]
    clock.advance(3.0)
    (report,) = engine.sessions.reports(clock.now_s())
    assert (report.num_blocks, report.num_tokens, report.num_busy) == (4, 64, 0)
    assert (report.idle_s, report.age_s) == (3.0, 5.0)


def test_a_diverging_prompt_releases_the_blocks_of_the_old_one(make: Make) -> None:
    engine = make()
    answer(engine, ask("a" * 32 + "b" * 32, "s"))
    answer(engine, ask("a" * 32 + "c" * 32, "s"))
    assert engine.scheduler.stats().num_cached_blocks == 4
    assert answer(engine, ask("a" * 32 + "b" * 32)).num_cached_tokens == 32


def test_the_least_recently_used_idle_session_is_evicted(make: Make, changes: list[SessionChange]) -> None:
    engine = make()
    for session in ("one", "two", "one", "three"):
        answer(engine, ask(session[0] * 32, session, max_active_sessions=2))
    swept = [change for change in changes if change.what == "swept"]
    assert [(change.session_id, change.reason, change.num_tokens) for change in swept] == [("two", "room", 32)]
    assert {report.session_id for report in engine.sessions.reports(0.0)} == {"one", "three"}


def test_owners_have_separate_counts(make: Make) -> None:
    engine = make()
    answer(engine, ask("a" * 32, "s", session_owner="billing", max_active_sessions=1))
    answer(engine, ask("b" * 32, "s", session_owner="legal", max_active_sessions=1))
    assert [report.owner for report in engine.sessions.reports(0.0)] == ["billing", "legal"]
    assert engine.sessions.sweep("s", "billing") == SweepResult(1, 2)
    assert [report.owner for report in engine.sessions.reports(0.0)] == ["legal"]


def test_while_all_sessions_are_busy_a_new_one_waits_its_turn(make: Make) -> None:
    engine = make()
    only_one = {"max_active_sessions": 1}
    ids = [engine.submit(ask("x" * 20, session, **only_one)) for session in ("a", "b", "a", "c")]
    engine.step()
    assert (engine.scheduler.num_running, engine.sessions.num_waiting) == (2, 2)
    assert engine.metrics().gauges["num_requests_waiting"] == 2
    ended = []
    while engine.has_work:
        engine.step()
        ended += [request_id for request_id in ids if engine.is_complete(request_id) and request_id not in ended]
    assert ended == [ids[0], ids[2], ids[1], ids[3]]
    assert [report.session_id for report in engine.sessions.reports(0.0)] == ["c"]


def test_waiting_for_a_session_ends_with_a_deadline_an_abort_or_a_full_queue(make: Make, clock: ManualClock) -> None:
    engine = make(max_num_queued_reqs=2)
    fields = {"max_active_sessions": 1}
    runs = engine.submit(ask("x" * 20, "a", **fields))
    late = engine.submit(ask("x" * 20, "b", queue_deadline_s=1.0, **fields))
    left = engine.submit(ask("x" * 20, "c", **fields))
    refused = engine.submit(ask("x" * 20, "d", **fields))
    engine.step()
    engine.abort(left)
    clock.advance(1.0)
    engine.run_until_idle()
    outcomes = [engine.result(request_id) for request_id in (runs, late, left, refused)]
    errors = [None if output is None else type(output.error) for output in outcomes]
    assert errors == [type(None), QueueDeadlineError, RequestFailedError, QueueFullError]
    finished = engine.metrics().finished
    assert (finished[FinishReason.DEADLINE.value], finished[FinishReason.ABORT.value]) == (1, 1)
    assert engine.num_open == 0
    assert not any(engine.metrics().gauges.values())


def test_no_request_waits_for_room_that_only_idle_sessions_take(make: Make, clock: ManualClock) -> None:
    engine = make(num_blocks=16)
    for session in "abc":
        answer(engine, ask(session * 64, session))
    large = engine.submit(ask("x" * 200))
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.run_until_idle()
    assert engine.is_complete(large)
    kept = {report.session_id: report.num_blocks for report in engine.sessions.reports(clock.now_s())}
    assert sum(kept.values()) < 12
    assert list(kept) == ["a", "b", "c"]
    engine.scheduler.check()


def test_a_sweep_removes_idle_sessions_and_an_end_also_busy_ones(make: Make, changes: list[SessionChange]) -> None:
    engine = make()
    answer(engine, ask("a" * 32, "idle"))
    answer(engine, ask("b" * 48, "busy"))
    engine.submit(ask("b" * 64, "busy"))
    engine.step()
    changes.clear()
    assert engine.sessions.sweep() == SweepResult(1, 2)
    assert told(changes) == [("idle", "swept", 2, "idle")]
    engine.sessions.end("busy")
    engine.run_until_idle()
    assert told(changes) == [("busy", "swept", 0, "ended")]
    assert engine.sessions.reports(0.0) == ()
    assert engine.sessions.sweep("nobody") == SweepResult(0, 0)


def test_an_ended_session_is_recreated_by_its_next_request(make: Make) -> None:
    engine = make()
    engine.submit(ask("a" * 32, "s"))
    engine.step()
    engine.sessions.end("s")
    engine.submit(ask("a" * 64, "s"))
    engine.run_until_idle()
    assert [report.num_blocks for report in engine.sessions.reports(0.0)] == [4]


def test_a_request_that_never_began_does_not_change_its_session(make: Make, changes: list[SessionChange]) -> None:
    engine = make(max_num_seqs=1)
    answer(engine, ask("a" * 64, "s"))
    engine.submit(ask("x" * 20))
    other = engine.submit(ask("b" * 64, "s"))
    engine.step()
    changes.clear()
    engine.abort(other)
    engine.run_until_idle()
    assert changes == []
    assert answer(engine, ask("a" * 64 + "more", "s")).num_cached_tokens == 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 513}, "session_id"),
        ({"session_id": "s", "session_owner": "x" * 4097}, "session_owner"),
        ({"session_id": "a\ud83d"}, "session_id"),
        ({"session_id": "s", "session_owner": "\udc00"}, "session_owner"),
        ({"session_id": "s", "max_active_sessions": 0}, "max_active_sessions"),
        ({"session_id": "s", "pooling": "mean"}, "session_id"),
    ],
)
def test_an_invalid_session_is_refused(make: Make, fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameterError) as refused:
        make().submit(GenerationRequest("hello", **fields))  # type: ignore[arg-type]  # fields by name
    assert refused.value.param == param


def test_a_session_changes_no_byte() -> None:
    """A conversation of three turns with other load: tokens and log-probabilities with and without a session."""
    options = LoadOptions(EngineOptions(num_blocks=64, max_num_seqs=4))
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True, logprobs=2)
    noise = random.Random(3)

    def play(session: str | None) -> list[object]:
        llm = LLM("pocket://", options)
        said: list[object] = []
        prompt = tuple(range(10, 110))
        for _ in range(3):
            request = GenerationRequest(prompt, params, session_id=session)
            other = GenerationRequest(tuple(noise.randrange(5, 3000) for _ in range(noise.randrange(20, 300))), params)
            ids = [llm.engine.submit(other), llm.engine.submit(request), llm.engine.submit(other)]
            llm.engine.run_until_idle()
            output = llm.engine.result(ids[1])
            assert output is not None
            completion = output.completions[0]
            said.append((completion.token_ids, completion.logprobs))
            prompt += (*completion.token_ids, *range(200, 240))
        llm.close()
        return said

    assert play("s") == play(None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "step", "step", "abort", "sweep", "end")),
        st.integers(0, 4),
        st.integers(1, 90),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=60)
def test_random_histories_lose_nothing_and_leave_nothing_pinned(steps: list[tuple[str, int, int]]) -> None:
    model, config = load_model("stub://s", LoadOptions(EngineOptions(num_blocks=20)))
    engine = Engine(model, config, clock=ManualClock())
    for what, number, size in steps:
        owner, session = str(number % 2), str(number)
        if what == "ask":
            text = "ab"[size % 2] * size
            engine.submit(ask(text, session, session_owner=owner, max_active_sessions=2))
        elif what == "step":
            engine.step()
        elif what == "abort":
            engine.abort(size)
        elif what == "sweep":
            engine.sessions.sweep(session, owner)
        else:
            engine.sessions.end(session)
        reports = engine.sessions.reports(0.0)
        assert max([sum(report.owner == owner for report in reports) for owner in "01"]) <= 2
        engine.scheduler.check()
    engine.run_until_idle()
    assert engine.num_open == 0
    assert not any(report.num_busy for report in engine.sessions.reports(0.0))
    engine.sessions.sweep()
    assert engine.sessions.reports(0.0) == ()
    assert not engine.scheduler.state().kv.pins
    engine.scheduler.check()
