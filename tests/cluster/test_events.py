"""The log of a cluster's events."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from lockstep.cluster.events import EVENTS, LAGGED, MAX_KEPT_EVENTS, ClusterEvent, EventLog


def warm(log: EventLog, model: str) -> None:
    log.emit("co_activation_warmed", model=model, by="router")


async def first(log: EventLog, count: int, after_id: int | None = None) -> list[ClusterEvent]:
    events = []
    async with aclosing(log.subscribe(after_id)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    return events


async def test_subscribers_receive_events_after_their_subscription() -> None:
    log = EventLog(unix_time_s=lambda: 7.0)
    warm(log, "early")
    watchers = [asyncio.create_task(first(log, 2)) for _ in range(3)]
    await asyncio.sleep(0)
    warm(log, "a")
    warm(log, "b")
    seen = await asyncio.gather(*watchers)
    assert [[event.fields["model"] for event in events] for events in seen] == [["a", "b"]] * 3
    assert seen[0][0] == ClusterEvent(2, 7.0, "co_activation_warmed", {"model": "a", "by": "router"})


async def test_reconnected_subscriber_continues_after_its_last_event() -> None:
    log = EventLog()
    for model in "abc":
        warm(log, model)
    assert [event.fields["model"] for event in await first(log, 2, after_id=1)] == ["b", "c"]


async def test_a_slow_subscriber_receives_the_number_of_lost_events() -> None:
    log = EventLog()
    async with aclosing(log.subscribe(0)) as stream:
        warm(log, "first")
        assert (await anext(stream)).id == 1
        for number in range(MAX_KEPT_EVENTS + 5):
            warm(log, str(number))
        lagged = await anext(stream)
        assert (lagged.type, lagged.fields) == (LAGGED, {"num_lost": 5})
        assert (await anext(stream)).fields["model"] == "5"


async def test_cancelled_subscriber_leaves_no_state() -> None:
    log = EventLog()
    task = asyncio.create_task(first(log, 1))
    await asyncio.sleep(0)
    assert log.num_watchers == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (log.num_watchers, log._waiting) == (0, [])


def test_fields_that_the_table_does_not_have_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="model, by"):
        EventLog().emit("co_activation_warmed", model="a")
    assert all(text for fields in EVENTS.values() for text in fields.values())
