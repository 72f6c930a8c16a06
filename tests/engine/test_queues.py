"""Queues between an engine's thread and others: bounded in both directions, without losses."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from lockstep.engine.generation import LiveRequest
from lockstep.engine.input_processing import prepare
from lockstep.engine.outputs import RequestOutput, Timings
from lockstep.engine.queues import MAX_COMMANDS, AbortCommand, Inbox, Results
from lockstep.engine.request import GenerationRequest
from lockstep.errors import QueueFullError, UsageError
from tests.engine.conftest import MakeEngine
from tests.waiting import HANG_S


@pytest.fixture
def lives(make_engine: MakeEngine) -> list[LiveRequest]:
    engine = make_engine()
    requests = [prepare(engine.model, engine.config, GenerationRequest("hello")) for _ in range(3)]
    for number, request in enumerate(requests):
        request.request_id = number
    return requests


def output(request_id: int) -> RequestOutput:
    return RequestOutput(request_id, (1,), (), 0, 0, Timings(0.0, None, 0.0))


def test_commands_are_taken_in_order_and_later_ones_afterwards(lives: list[LiveRequest]) -> None:
    inbox = Inbox()
    inbox.put(lives[0])
    inbox.abort(0)
    assert (len(inbox), inbox.num_requests) == (2, 1)
    taken = inbox.take()
    assert next(taken) is lives[0]
    inbox.put(lives[1])
    assert list(taken) == [AbortCommand(0)]
    assert list(inbox.take()) == [lives[1]]


def test_the_inbox_is_bounded_and_counts_refusals(lives: list[LiveRequest]) -> None:
    inbox = Inbox()
    for number in range(MAX_COMMANDS - 1):
        inbox.abort(number)
    inbox.check_room()
    inbox.put(lives[0])
    with pytest.raises(QueueFullError, match=f"{MAX_COMMANDS} commands already wait"):
        inbox.check_room()
    assert inbox.num_rejected == 1


def test_a_closed_inbox_rejects_requests_with_its_first_reason(lives: list[LiveRequest]) -> None:
    """Its items can still be taken, and aborts are accepted."""
    inbox = Inbox()
    inbox.put(lives[0])
    inbox.close("the first reason")
    inbox.close("another")
    for refused in (inbox.check_room, lambda: inbox.put(lives[1])):
        with pytest.raises(UsageError, match="the first reason"):
            refused()
    inbox.abort(0)
    assert list(inbox.take()) == [lives[0], AbortCommand(0)]


def test_an_item_may_be_taken_back_while_another_thread_takes(lives: list[LiveRequest]) -> None:
    """A thread that puts a request while the queue closes takes it back; this does not break a loop."""
    inbox = Inbox()
    inbox.put(lives[0])
    inbox.put(lives[1])
    taken = inbox.take()
    assert next(taken) is lives[0]
    inbox._commands.remove(lives[1])
    assert list(taken) == []


def test_any_command_ends_a_wait(lives: list[LiveRequest]) -> None:
    inboxes = [Inbox() for _ in range(3)]
    comings = (
        partial(inboxes[0].put, lives[0]),
        partial(inboxes[1].abort, 0),
        partial(inboxes[2].close, "it is over"),
    )
    for inbox, comes in zip(inboxes, comings, strict=True):
        waiting = threading.Thread(target=inbox.wait, args=(100 * HANG_S,), daemon=True)
        waiting.start()
        comes()
        waiting.join(HANG_S)
        assert not waiting.is_alive()


def test_results_are_read_once_and_the_oldest_are_dropped_first() -> None:
    results = Results(3)
    for number in range(5):
        results.keep(output(number))
    assert len(results) == 3
    assert [results.take(number) for number in (0, 3, 3)] == [None, output(3), None]
    assert results.take_all() == (output(2), output(4))
    assert results.take_all() == ()


def test_each_result_is_read_by_one_of_several_threads() -> None:
    num_results = 2_000
    results = Results(num_results)
    read: list[RequestOutput] = []
    is_over = threading.Event()

    def reader() -> None:
        while not is_over.is_set():
            read.extend(results.take_all())
        read.extend(results.take_all())

    readers = [threading.Thread(target=reader) for _ in range(3)]
    for each in readers:
        each.start()
    for number in range(num_results):
        results.keep(output(number))
    is_over.set()
    for each in readers:
        each.join(HANG_S)
    assert sorted(each.request_id for each in read) == list(range(num_results))
