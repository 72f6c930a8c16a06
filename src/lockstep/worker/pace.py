"""When readers are woken: at once where tokens come slowly, else all together, once per interval.

A wake-up of a stream costs the server ten times what a token in it does, and it takes that time from the step which
computes the next tokens. Where a stream gets hundreds of tokens a second nobody sees each of them by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lockstep.worker.mailbox import Mailbox


class Pace:
    """Holds wake-ups back, each for less than an interval. Event loop only.

    Args:
        interval_s: between one wake-up of all and the next; 0: nothing is held back.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = 0.0
        """Before this time, on the loop's clock, nobody is woken."""
        self._held: list[Mailbox] = []
        self._is_due = False

    def wake(self, mailboxes: Sequence[Mailbox]) -> None:
        """Wake their readers, now or when the interval is over."""
        if not mailboxes:
            return
        self._held += mailboxes
        if self._is_due:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._next_s - loop.time()
        if wait_s > 0:
            self._is_due = True
            loop.call_later(wait_s, self._wake_all, loop)
        else:
            self._wake_all(loop)

    def _wake_all(self, loop: asyncio.AbstractEventLoop) -> None:
        held, self._held = self._held, []
        self._is_due = False
        self._next_s = loop.time() + self._interval_s
        for mailbox in held:
            mailbox.wake()
