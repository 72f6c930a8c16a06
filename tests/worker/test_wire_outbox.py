"""Events leave a worker in order, and nobody waits for a slow reader."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from lockstep.worker.messages import Event, Loading, Unloaded
from lockstep.worker.wire import FrameReader, Outbox, event_decoder
from tests.waiting import HANG_S


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(HANG_S)
    with ours, theirs:
        yield ours, theirs


def read(sock: socket.socket, count: int) -> list[Event]:
    reader, decoder, events = FrameReader(), event_decoder(), list[Event]()
    while len(events) < count:
        events += map(decoder.decode, reader.feed(sock.recv(1 << 16)))
    return events


def test_a_reader_that_sleeps_gets_everything_in_order_when_it_wakes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    outbox = Outbox(theirs)
    events: list[Event] = [Loading("x" * 1000, "read", float(number)) for number in range(5000)]
    posting = threading.Thread(target=lambda: deque(map(outbox.post, events)))
    posting.start()
    posting.join(HANG_S)  # five megabytes, of which a socket takes a fraction: this ends only if nobody waits
    assert not posting.is_alive()
    assert read(ours, len(events)) == events
    outbox.flush(HANG_S)
    outbox.post(Unloaded("last"))
    assert read(ours, 1) == [Unloaded("last")]


def test_events_of_many_threads_are_never_mixed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    outbox = Outbox(theirs)

    def post(who: int) -> None:
        for number in range(200):
            outbox.post(Loading(str(who) * 500, "read", float(number)))

    threads = [threading.Thread(target=post, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    events = [event for event in read(ours, 800) if isinstance(event, Loading)]
    for who in range(4):
        assert [event.fraction for event in events if event.replica[0] == str(who)] == list(range(200))


def test_a_reader_that_is_gone_is_no_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    outbox = Outbox(theirs)
    ours.close()
    for _ in range(3):
        outbox.post(Unloaded("x"))
