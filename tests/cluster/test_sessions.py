"""Sessions: how many a model holds, who gives way, who waits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import aclosing
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import PRIORITIES, SessionLimits
from lockstep.cluster.sessions import MAX_SESSIONS, MAX_WAITING_SESSIONS, ModelSessions, SessionName, Sessions
from lockstep.errors import QueueFullError, SessionNotFoundError, UsageError
from tests.cluster.clusters import clustered, model_of, say
from tests.waiting import HANG_S, eventually

ONE = "cluster: c\nmodels:\n  m: {source: 'stub://m?step_ms=2', max_active_sessions: 2}\n"


async def test_the_least_recently_used_idle_session_gives_way() -> None:
    swept: list[str] = []
    held = ModelSessions(2, swept.append)
    for session in ("a", "b", "a"):
        await held.enter(session)
        held.leave(session)
    await held.enter("c")
    assert (swept, held.num_held, held.num_active) == (["b"], 2, 1)
    await held.enter(None)
    assert (swept, held.num_held) == (["b", "a"], 2)


async def test_request_waits_while_all_sessions_are_busy() -> None:
    held = ModelSessions(1, lambda session: None)
    await held.enter("a")
    await held.enter("a")  # another request of the same session takes no more room
    turns = [asyncio.create_task(held.enter(session)) for session in ("b", None, "c")]
    await asyncio.sleep(0)
    assert held.num_waiting == 3
    turns[0].cancel()
    await asyncio.gather(turns[0], return_exceptions=True)
    held.leave("a")
    assert held.num_waiting == 2, "the session is still busy"
    held.leave("a")
    await turns[1]
    assert (held.num_waiting, held.num_active) == (1, 1)
    held.leave(None)
    await turns[2]
    held.leave("c")
    assert (held.num_active, held.num_held, held.num_waiting) == (0, 1, 0)


async def test_cancelled_waiter_admits_waiters_that_have_room() -> None:
    held = ModelSessions(1, lambda session: None)
    await held.enter("a")
    first, second = (asyncio.create_task(held.enter(session)) for session in ("b", "a"))
    await asyncio.sleep(0)
    assert held.num_waiting == 2
    first.cancel()
    async with asyncio.timeout(HANG_S):
        await second  # of the very session that runs, so that its end need not be waited for
    assert (held.num_waiting, held.num_active) == (0, 1)


async def test_slot_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    held = ModelSessions(1, lambda session: None)
    await held.enter(None)
    turns = [asyncio.create_task(held.enter(None)) for _ in range(2)]
    await asyncio.sleep(0)
    held.leave(None)
    turns[0].cancel()
    await asyncio.gather(turns[0], return_exceptions=True)
    await turns[1]
    held.leave(None)
    assert (held.num_active, held.num_waiting) == (0, 0)


async def test_cancelled_and_passed_over_waiter_is_removed_once() -> None:
    """Cancelled and passed over before it could say so; or told to give up, and cancelled too."""
    held = ModelSessions(1, lambda session: None)
    await held.enter("a")
    turns = [asyncio.create_task(held.enter(session)) for session in ("b", "c")]
    await asyncio.sleep(0)
    turns[0].cancel()
    held.leave("a")
    [gone, taken] = await asyncio.gather(*turns, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert taken is None
    waiting = asyncio.create_task(held.enter("d"))
    await asyncio.sleep(0)
    held.fail_all(QueueFullError("nobody waits any longer"))
    waiting.cancel()
    [gone] = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert (held.num_active, held.num_waiting) == (1, 0)


async def test_raised_limit_admits_waiting_requests() -> None:
    held = ModelSessions(1, lambda session: None)
    await held.enter(None)
    turn = asyncio.create_task(held.enter("a"))
    await asyncio.sleep(0)
    held.resize(2)
    await turn
    assert held.num_active == 2


async def test_without_a_limit_no_session_waits_and_idle_ones_are_bounded() -> None:
    swept: list[str] = []
    held = ModelSessions(None, swept.append)
    for number in range(MAX_SESSIONS + 2):
        await held.enter(None)
        await held.enter(f"s{number}")
        held.leave(f"s{number}")
    assert (held.num_active, held.num_waiting, swept) == (MAX_SESSIONS + 2, 0, ["s0"])
    await held.enter(None)
    assert swept == ["s0", "s1"]


async def test_the_queue_is_bounded() -> None:
    held = ModelSessions(1, lambda session: None)
    await held.enter(None)
    turns = [asyncio.create_task(held.enter(None)) for _ in range(MAX_WAITING_SESSIONS)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await held.enter(None)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)


def test_only_idle_sessions_of_some_age_are_given_up() -> None:
    sessions, limits = Sessions(), SessionLimits(idle_threshold_s=30, min_lifetime_s=0.25)
    for number, id_ in enumerate("abc"):
        assert sessions.begin(id_, "m", number)
    sessions.end("a", 5)
    sessions.end("b", 10)
    assert [session.id for session in sessions.idle(limits, 34.9)] == []
    assert [session.id for session in sessions.idle(limits, 35)] == ["a"]
    assert [session.id for session in sessions.idle(limits, 100)] == ["a", "b"]
    assert sessions.idle(SessionLimits(idle_threshold_s=None), 1e9) == []
    sessions.by_id["a"].is_held = False
    assert not sessions.begin("b", "m", 101)
    assert [session.id for session in sessions.idle(limits, 200)] == []
    assert [(s.id, s.state, s.idle_s) for s in sessions.snapshot(200)] == [
        ("a", "dropped", 195),
        ("c", "active", 0),
        ("b", "active", 0),
    ]


@given(st.tuples(st.sampled_from(("", "key-1", "key-2")), st.text(st.sampled_from("ab\0-key12"), max_size=8)))
def test_no_two_callers_have_a_session_in_common(name: tuple[str, str]) -> None:
    """Whatever they call it: a key is of one name alone."""
    assert SessionName.of(SessionName(*name).key) == name


def test_without_a_caller_a_session_is_known_by_its_id() -> None:
    assert SessionName("", "chat/7").key == "chat/7"


async def test_a_models_sessions_are_bounded_and_the_rest_wait() -> None:
    async with clustered(ONE) as cluster:
        tasks = [asyncio.create_task(say(cluster, "hello", session=f"s{number}")) for number in range(6)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, model_of(cluster, "m").num_running)
            await asyncio.sleep(0.001)
        assert {(await task).model for task in tasks} == {"m"}
        assert most == 2
        states = sorted(session.state for session in cluster.sessions())
        assert states == ["dropped"] * 4 + ["idle"] * 2


async def test_sessions_are_listed_evicted_and_ended() -> None:
    text = ONE + "sessions: {idle_threshold: 50ms, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    async with clustered(text) as cluster:
        await say(cluster, "hello", session="s")
        assert [(session.id, session.model, session.num_requests) for session in cluster.sessions()] == [("s", "m", 1)]
        await eventually(lambda: cluster.sessions()[0].state == "dropped")
        assert cluster.snapshot().sessions_live == 0
        await say(cluster, "hello again", session="s")
        await cluster.end_session("s")
        assert cluster.sessions() == ()
        with pytest.raises(SessionNotFoundError):
            await cluster.end_session("s")


async def test_idle_sessions_of_low_models_are_evicted_first_and_of_critical_ones_last() -> None:
    """Within a class, the least recently used one."""
    text = (
        "cluster: c\nmodels:\n  extra:\n"
        + "".join(f"    - {{id: {name}, source: 'stub://{name}', priority: {name}}}\n" for name in PRIORITIES)
        + "sessions: {idle_threshold: 1h, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    )
    async with clustered(text) as cluster:
        begin = cluster.events.last_id
        for number, name in enumerate((*PRIORITIES, "low")):
            await say(cluster, "hello", name, session=f"{name}-{number}")
        await cluster.replace(text.replace("1h", "1ms"))
        swept: list[str] = []
        async with asyncio.timeout(HANG_S), aclosing(cluster.events.subscribe(begin)) as events:
            while len(swept) < 5:
                event = await anext(events)
                if event.type == "session_evicted":
                    swept.append(event.fields["session"])
        assert swept == ["low-3", "low-4", "normal-2", "high-1", "critical-0"]


ROUTED = """
cluster: c
models:
  router: {source: 'stub://router?field=intent&ids=billing,legal', max_active_sessions: 2}
  specialists:
    - {id: billing, source: stub://billing}
    - {id: legal, source: stub://legal}
routing: {entry: router, dispatch_rule: 'router.output.intent -> specialists.{intent}'}
"""


async def evictions(cluster: Cluster) -> list[tuple[str, str, str]]:
    """All that were told since the start: the session, the model and why."""
    last_id, told = cluster.events.last_id, []
    async with asyncio.timeout(HANG_S), aclosing(cluster.events.subscribe(0)) as events:
        while last_id and (event := await anext(events)):
            if event.type == "session_evicted":
                told.append((event.fields["session"], event.fields["model"], event.fields["reason"]))
            if event.id == last_id:
                break
    return told


async def test_evicted_session_is_counted_once_with_one_event() -> None:
    """To others' sessions, and to requests without one; also where the engine's own bound is what sweeps."""
    async with clustered(ONE) as cluster:
        for number in range(5):
            await say(cluster, "hello", session=f"s{number}")
        assert cluster.snapshot().counters.lru_evictions == 3
        await say(cluster, "hello")
        assert cluster.snapshot().counters.lru_evictions == 4
        assert await evictions(cluster) == [(f"s{number}", "m", "room") for number in range(4)]
        await say(cluster, "hello", session="s0")
        await say(cluster, "hello")
        assert [session for session, *_ in await evictions(cluster)][4:] == ["s4"], "s0 was used since, and is held"
        assert cluster.snapshot().counters.lru_evictions == 5
    unbounded = ONE.replace(", max_active_sessions: 2", "") + "sessions: {max_active_sessions: unlimited}\n"
    async with clustered(unbounded) as cluster:
        for number in range(18):
            await say(cluster, "hello", session=f"s{number}")
        await eventually(lambda: cluster.snapshot().counters.lru_evictions == 2)
        assert await evictions(cluster) == [("s0", "m", "room"), ("s1", "m", "room")]
        assert cluster.snapshot().counters.model_evictions == 0


async def test_a_session_of_several_models_is_evicted_once_until_it_comes_back() -> None:
    """First the router needs its place, then nobody comes back to what the others keep."""
    text = ROUTED + "sessions: {idle_threshold: 1h, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    async with clustered(text) as cluster:
        for session, words in (("a", "an invoice"), ("b", "a contract"), ("c", "an invoice")):
            await say(cluster, words, session=session)
        assert await evictions(cluster) == [("a", "router", "room")]
        await cluster.replace(text.replace("1h", "1ms"))
        await eventually(lambda: all(session.state == "dropped" for session in cluster.sessions()))
        told = [("a", "router", "room"), ("b", "legal", "idle"), ("c", "billing", "idle")]
        assert await evictions(cluster) == told
        assert cluster.snapshot().counters.lru_evictions == 3
        await say(cluster, "a contract", session="a")
        await eventually(lambda: all(session.state == "dropped" for session in cluster.sessions()))
        assert await evictions(cluster) == [*told, ("a", "legal", "idle")]
        assert cluster.snapshot().counters.lru_evictions == 4


async def test_sessions_of_unloaded_models_and_ended_sessions_are_no_lru_evictions() -> None:
    """The model made room for another one, which is counted as that."""
    text = "cluster: c\nresources: {gpu_budget: 1GB}\nmodels:\n  extra:\n" + "".join(
        f"    - {{id: {name}, source: 'stub://{name}', tier: standby}}\n" for name in "ab"
    )
    async with clustered(text) as cluster:
        await say(cluster, "hello", "a", session="s")
        await say(cluster, "hello", "b", session="t")
        assert await evictions(cluster) == [("s", "a", "unloaded")]
        await cluster.end_session("t")
        assert len(await evictions(cluster)) == 1, "its client knows"
        counters = cluster.snapshot().counters
        assert (counters.model_evictions, counters.lru_evictions) == (1, 0)


async def test_kv_of_a_session_stays_cached_under_load_until_the_session_ends() -> None:
    story = "I was charged twice for my subscription last week and would like to have my money back. " * 5
    text = "cluster: c\nmodels:\n  m: {source: 'pocket://', engine: {num_blocks: 24, max_num_seqs: 4}}\n"

    async def fill(cluster: Cluster, count: int) -> None:
        for number in range(count):
            await say(cluster, f"Number {number}. {story[:200]}", max_tokens=2)

    async with clustered(text) as cluster:
        await say(cluster, story, session="s", max_tokens=4)
        await eventually(lambda: cluster.sessions()[0].num_tokens > 0)
        await fill(cluster, 16)
        assert (await say(cluster, story, session="s", max_tokens=4)).output.num_cached_tokens > 0
        await cluster.end_session("s")
        await fill(cluster, 16)
        assert (await say(cluster, story, max_tokens=4)).output.num_cached_tokens == 0


async def test_a_lost_worker_evicts_its_sessions_and_publishes_events() -> None:
    async with clustered(ONE, kind="process") as cluster:
        await say(cluster, "hello", session="s")
        begin, pid = cluster.events.last_id, cluster.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: cluster.sessions()[0].state == "dropped")
        async with aclosing(cluster.events.subscribe(begin)) as events:
            seen = [(await anext(events)).type for _ in range(2)]
        assert seen == ["worker_restarted", "session_evicted"]
        assert cluster.snapshot().counters.lru_evictions == 0
        await eventually(lambda: cluster.health().ready)
        assert (await say(cluster, "hello", session="s")).model == "m"


async def test_a_defect_over_one_sweep_does_not_end_those_that_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError("a defect")

    text = ONE + "sessions: {idle_threshold: 50ms, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    async with clustered(text) as cluster:
        monkeypatch.setattr(cluster.state.sessions, "idle", broken)
        await eventually(lambda: "internal error while evicting idle sessions" in caplog.text)
        monkeypatch.undo()
        await say(cluster, "hello", session="s")
        await eventually(lambda: cluster.sessions()[0].state == "dropped")


async def test_step_events_are_published_to_a_subscriber() -> None:
    async with clustered(ONE) as cluster, aclosing(cluster.events.subscribe()) as events:
        reading = asyncio.create_task(anext(events))
        while not reading.done() or reading.result().type != "step":
            if reading.done():
                reading = asyncio.create_task(anext(events))
            await say(cluster, "hello")
        step = reading.result().fields
        assert step["num_sequences"] == 1
        assert step["replica"] == cluster.snapshot().replicas[0].key


async def test_a_host_kv_budget_above_the_available_memory_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's shared memory is often small; KV that finds no room there is computed again."""
    budget = "resources: {host_kv_budget: 256MB}\n"
    usage = shutil.disk_usage("/")._replace(total=64 << 20, free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    async with clustered(ONE + budget) as cluster:
        [warning] = [each for each in cluster.snapshot().warnings if "of KV" in each]
        assert "has room for only 54 of 122" in warning
        assert (await say(cluster, "hello", "m", session="a")).text
    monkeypatch.undo()

    def refused(*_: object) -> NoReturn:
        raise UsageError("/dev/shm: no")

    monkeypatch.setattr("lockstep.engine.kv_tiers.claim_host_folder", refused)
    async with clustered(ONE + budget) as cluster:
        assert "KV cannot be stored in host memory: /dev/shm: no" in cluster.snapshot().warnings
        assert (await say(cluster, "hello", "m", session="a")).text
