"""Pending requests: passes a worker's outputs and answers to the callers that wait for them. Event loop only.

Requests wait in mailboxes, queries in futures. The outputs of a step are split among their readers only here. Readers
are woken together, at most once per interval: waking a stream costs the server ten times as much as a token in it, and
takes that time from the step that computes the next tokens. With hundreds of tokens per second, users do not see single
tokens anyway. First tokens and ends are not delayed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.engine.outputs import TokenOutput
from lockstep.errors import LockstepError
from lockstep.worker.messages import Answer, Answered, Outputs, Refused
from lockstep.worker.progress import CallObserver


class PendingRequests:
    """Matches events with the callers that wait for them.

    Args:
        interval_s: minimum interval between two wake-ups of all readers; 0: no output is delayed.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._ids = itertools.count()
        """Ids are never reused, so that a message of a lost worker is never taken for one of its successor."""
        self._mailboxes: dict[int, Mailbox] = {}
        self._queries: dict[int, asyncio.Future[Answer | None]] = {}
        self._interval_s = interval_s
        self._next_wake_s = 0.0
        """Readers are not woken before this time of the loop's clock."""
        self._to_wake: list[Mailbox] = []
        self._is_wake_due = False

    @property
    def num_requests(self) -> int:
        """Number of mailboxes that may still be read."""
        return len(self._mailboxes)

    def next_id(self) -> int:
        return next(self._ids)

    def start_ids_at(self, first_id: int) -> None:
        """Start the ids at the first one that the worker assigned to this link."""
        self._ids = itertools.count(first_id)

    # -- requests -------------------------------------------------------------------------------------------------

    def open(self, replica: str) -> Mailbox:
        """Open a mailbox with a new id. It stays until `leave`."""
        mailbox = Mailbox(self.next_id(), replica)
        self._mailboxes[mailbox.request_id] = mailbox
        return mailbox

    def leave(self, mailbox: Mailbox) -> bool:
        """Drop a mailbox that is not read any more; True: its request has not ended."""
        return self._mailboxes.pop(mailbox.request_id, None) is not None and not mailbox.is_ended

    def open_mailboxes(self) -> Iterator[Mailbox]:
        return (mailbox for mailbox in self._mailboxes.values() if not mailbox.is_ended)

    def outputs(self, event: Outputs) -> None:
        """Split the outputs of a step among their readers. Outputs without a reader are dropped."""
        mailboxes = self._mailboxes
        for request_id in event.accepted:
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.accept()
        for started in event.started:
            if (mailbox := mailboxes.get(started.request_id)) is not None and mailbox.observer is not None:
                mailbox.observer.started(started)
        for reason in event.waits:
            if (mailbox := mailboxes.get(reason.request_id)) is not None and mailbox.observer is not None:
                mailbox.observer.waits_for(reason)
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

    # -- queries --------------------------------------------------------------------------------------------------

    async def answer(self, ask_id: int, limit_s: float) -> Answer | None:
        """Wait for the answer to a query, within a time limit; None: there was none."""
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._queries[ask_id] = future
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._queries[ask_id]

    def answered(self, event: Answered) -> None:
        resolve(self._queries.get(event.ask_id), event.answer)

    def end(self, error: LockstepError) -> None:
        """End all requests and queries after the worker was lost."""
        for mailbox in self.open_mailboxes():
            mailbox.fail(error)
        for query in self._queries.values():
            resolve(query, None)


class Mailbox:
    """Outputs of one request that were not read yet.

    Its size is limited by the request: at most one output per token of its completions.

    Args:
        request_id: id of the request, unique among the worker's.
        replica: key of the replica that answers it.
    """

    __slots__ = (
        "_error",
        "_has_begun",
        "_outputs",
        "_waiter",
        "is_accepted",
        "is_ended",
        "observer",
        "replica",
        "request_id",
    )

    def __init__(self, request_id: int, replica: str) -> None:
        self.request_id = request_id
        self.replica = replica
        self.is_accepted = False
        """True if the request has entered the queue, even if it has left it since."""
        self.is_ended = False
        """True if no more outputs come."""
        self.observer: CallObserver | None = None
        """Called with the events of the request before its first token; None: there is no observer."""
        self._has_begun = False
        self._outputs: list[TokenOutput] = []
        self._error: LockstepError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[TokenOutput]:
        """Take all outputs that have come; an empty list right after the acceptance. Waits for new outputs.

        Raises:
            LockstepError: the error that ended the request, once everything before it was taken.
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
        """Add an output. If it has an error, the request ends with that error.

        Returns:
            True if the reader is still to be woken. The first and the last output wake it at once.
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
        """End the request with an error. A request that has ended is left unchanged."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Wake the caller that waits in `take`."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    """Resolve a future, unless its waiter has cancelled it."""
    if future is not None and not future.done():
        future.set_result(value)
