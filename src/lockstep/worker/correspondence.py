"""What a worker was asked and has not answered yet: requests by their mailboxes, questions by their futures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.errors import LockstepError
from lockstep.worker.mailbox import Mailbox
from lockstep.worker.messages import (
    Checked,
    MetricsReport,
    Outputs,
    PrefixCacheReset,
    Refused,
    SessionsReport,
    SessionsSwept,
)
from lockstep.worker.pace import Pace

Answer = MetricsReport | Checked | PrefixCacheReset | SessionsReport | SessionsSwept


class Correspondence:
    """Matches events with those who wait for them. Event loop only.

    Args:
        interval_s: readers are woken together, and so often at most; see `lockstep.worker.pace`.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._pace = Pace(interval_s)
        self._ids = itertools.count()
        """Never used twice, so that what a lost worker's successor says is never taken for the lost one's."""
        self._mailboxes: dict[int, Mailbox] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

    @property
    def num_requests(self) -> int:
        """Mailboxes that somebody may still read."""
        return len(self._mailboxes)

    def next_id(self) -> int:
        return next(self._ids)

    # -- requests -------------------------------------------------------------------------------------------------

    def open(self, replica: str) -> Mailbox:
        """A mailbox under a new id; it stays until `leave`."""
        mailbox = Mailbox(self.next_id(), replica)
        self._mailboxes[mailbox.request_id] = mailbox
        return mailbox

    def leave(self, mailbox: Mailbox) -> bool:
        """Nobody reads it any more; whether its request is still under way."""
        return self._mailboxes.pop(mailbox.request_id, None) is not None and not mailbox.is_ended

    def unended(self) -> Iterator[Mailbox]:
        return (mailbox for mailbox in self._mailboxes.values() if not mailbox.is_ended)

    def outputs(self, event: Outputs) -> None:
        """What a step brought; what nobody reads any more is dropped."""
        mailboxes = self._mailboxes
        for request_id in event.accepted:
            if (mailbox := mailboxes.get(request_id)) is not None:
                mailbox.accept()
        waiting = [
            mailbox
            for output in event.outputs
            if (mailbox := mailboxes.get(output.request_id)) is not None and mailbox.put(output)
        ]
        self._pace.wake(waiting)

    def refused(self, event: Refused) -> None:
        if (mailbox := self._mailboxes.get(event.request_id)) is not None:
            mailbox.fail(event.error)

    # -- questions ------------------------------------------------------------------------------------------------

    async def answer(self, ask_id: int, limit_s: float) -> Any:
        """Wait for the answer to a question, not longer than a time; None: there was none."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[ask_id] = future
        try:
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            return None
        finally:
            del self._questions[ask_id]

    def answered(self, event: Answer) -> None:
        resolve(self._questions.get(event.ask_id), event)

    def end(self, error: LockstepError) -> None:
        """The worker is gone: no answer will come."""
        for mailbox in self.unended():
            mailbox.fail(error)
        for question in self._questions.values():
            resolve(question, None)


def resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    """Answer somebody who may have left."""
    if future is not None and not future.done():
        future.set_result(value)
