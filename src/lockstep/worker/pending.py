"""Pending requests: requests and queries that a worker has not answered yet. Event loop only.

Requests wait in mailboxes, questions in futures. What a step brought is split among its readers here and nowhere else,
and readers are woken together, at most once per interval: a wake-up of a stream costs the server ten times what a token
in it does, and takes that time from the step which computes the next tokens. Where a stream gets hundreds of tokens a
second nobody sees each of them by itself. First tokens and endings wait for nobody.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.engine.outputs import TokenOutput
from lockstep.errors import LockstepError
from lockstep.worker.messages import Answer, Answered, Outputs, Refused
from lockstep.worker.progress import CallStation


class PendingRequests:
    """Matches events with those who wait for them.

    Args:
        interval_s: between one wake-up of all readers and the next; 0: nothing is held back.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._ids = itertools.count()
        """Never used twice, so that a message of a lost worker is never taken for one of its successor."""
        self._mailboxes: dict[int, Mailbox] = {}
        self._questions: dict[int, asyncio.Future[Answer | None]] = {}
        self._interval_s = interval_s
        self._next_wake_s = 0.0
        """Before this time, on the loop's clock, readers are not woken."""
        self._to_wake: list[Mailbox] = []
        self._is_wake_due = False

    @property
    def num_requests(self) -> int:
        """Mailboxes that may still be read."""
        return len(self._mailboxes)

    def next_id(self) -> int:
        return next(self._ids)

    def count_from(self, first_id: int) -> None:
        """Take ids from here on: those that a worker gave to a link."""
        self._ids = itertools.count(first_id)

    # -- requests -------------------------------------------------------------------------------------------------

    def open(self, replica: str) -> Mailbox:
        """A mailbox under a new id; it stays until `leave`."""
        mailbox = Mailbox(self.next_id(), replica)
        self._mailboxes[mailbox.request_id] = mailbox
        return mailbox

    def leave(self, mailbox: Mailbox) -> bool:
        """Drop a mailbox that no one reads any more; whether its request is still under way."""
        return self._mailboxes.pop(mailbox.request_id, None) is not None and not mailbox.is_ended

    def unended(self) -> Iterator[Mailbox]:
        return (mailbox for mailbox in self._mailboxes.values() if not mailbox.is_ended)

    def outputs(self, event: Outputs) -> None:
        """Split what a step brought among its readers; what no one reads any more is dropped."""
        mailboxes = self._mailboxes
        for request_id in event.accepted:
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.accept()
        for started in event.started:
            if (mailbox := mailboxes.get(started.request_id)) is not None and mailbox.station is not None:
                mailbox.station.started(started)
        for reason in event.waits:
            if (mailbox := mailboxes.get(reason.request_id)) is not None and mailbox.station is not None:
                mailbox.station.waits_for(reason)
        for output in event.outputs:
            if (mailbox := mailboxes.get(output.request_id)) is not None and mailbox.put(output):
                self._to_wake.append(mailbox)
        if self._to_wake and not self._is_wake_due:
            loop = asyncio.get_running_loop()
            wait_s = self._next_wake_s - loop.time()
            if wait_s > 0:
                self._is_wake_due = True
                loop.call_later(wait_s, self._wake, loop)
            else:
                self._wake(loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        to_wake, self._to_wake = self._to_wake, []
        self._is_wake_due = False
        self._next_wake_s = loop.time() + self._interval_s
        for mailbox in to_wake:
            mailbox.wake()

    def refused(self, event: Refused) -> None:
        if (mailbox := self._mailboxes.get(event.request_id)) is not None:
            mailbox.fail(event.error)

    # -- questions ------------------------------------------------------------------------------------------------

    async def answer(self, ask_id: int, limit_s: float) -> Answer | None:
        """Wait for the answer to a question, not longer than a time; None: there was none."""
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._questions[ask_id] = future
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._questions[ask_id]

    def answered(self, event: Answered) -> None:
        resolve(self._questions.get(event.ask_id), event.answer)

    def end(self, error: LockstepError) -> None:
        """The worker is gone: no answer will come."""
        for mailbox in self.unended():
            mailbox.fail(error)
        for question in self._questions.values():
            resolve(question, None)


class Mailbox:
    """Mailbox of one request: what came for it and was not fetched yet.

    Bounded by its request: at most one output per token of its completions.

    Args:
        request_id: of the request, unique among the worker's.
        replica: who answers it.
    """

    __slots__ = (
        "_error",
        "_has_begun",
        "_outputs",
        "_waiter",
        "is_accepted",
        "is_ended",
        "replica",
        "request_id",
        "station",
    )

    def __init__(self, request_id: int, replica: str) -> None:
        self.request_id = request_id
        self.replica = replica
        self.is_accepted = False
        """It has, or had, its place in the queue."""
        self.is_ended = False
        """Nothing more will come."""
        self.station: CallStation | None = None
        """Called with the stations of the request before its first token; None: they are not wanted."""
        self._has_begun = False
        self._outputs: list[TokenOutput] = []
        self._error: LockstepError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[TokenOutput]:
        """All outputs that have come; none right after the acceptance. Waits while there is nothing new.

        Raises:
            LockstepError: what ended the request, once everything before it was taken.
        """
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return outputs
        if self._error is not None:
            raise self._error
        return []

    def accept(self) -> None:
        self.is_accepted = True
        self.wake()

    def put(self, output: TokenOutput) -> bool:
        """Take an output over; one that brings an error ends the request with it.

        Returns:
            Whether its reader is still to be woken. The first output and the ending do it by themselves.
        """
        if self.is_ended:
            return False
        if output.error is not None:
            self.fail(output.error)
            return False
        self._outputs.append(output)
        self.is_ended = output.request is not None
        if self._has_begun and not self.is_ended:
            return True
        self._has_begun = True
        self.wake()
        return False

    def fail(self, error: LockstepError) -> None:
        """End the request with an error; one that has ended keeps its ending."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let callers that wait take what has come."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    """Resolve a future whose waiter may be gone."""
    if future is not None and not future.done():
        future.set_result(value)
