"""Who runs an engine's steps: one thread, which waits where there is nothing to do, until it is told to stop.

Steps have one thread at a time: while one is in `Runner.run`, all others are refused. Whatever ends the loop, nobody is
left waiting for an answer that cannot come.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from lockstep.engine.exchange import Inbox
from lockstep.engine.outputs import StepOutputs
from lockstep.errors import LockstepError, RequestFailedError, UsageError

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""It is looked for work at least as often, though nobody rang."""


class Stepper(Protocol):
    """The part of an engine that running it needs."""

    def step(self) -> StepOutputs: ...

    def wait(self, timeout_s: float) -> None: ...

    def abort_all(self) -> None: ...

    def abandon(self, error: LockstepError) -> None: ...


class Runner:
    """The thread of one engine's steps.

    Args:
        inbox: the engine's; where it is closed, the loop ends.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._thread_id = 0
        """Of who is in ``run``; 0: nobody."""

    def check_thread(self) -> None:
        """UsageError where another thread than this one runs the steps."""
        if self._thread_id and self._thread_id != threading.get_ident():
            raise UsageError("another thread runs this engine's steps; submit to it, and take results from it")

    def run(self, engine: Stepper) -> None:
        """Step while there is work, wait while there is none, and abort what is open when the inbox is closed.

        Raises:
            BaseException: what broke the loop. Every open request has ended with an error, and no more are taken.
        """
        self.check_thread()
        if self._thread_id:
            raise UsageError("this engine is running; a callback or observer cannot run it once more")
        self._thread_id = threading.get_ident()
        try:
            while not self._inbox.is_closed:
                if not _advance(engine):
                    engine.wait(IDLE_WAIT_S)  # not at all where somebody came since the last wait
            engine.abort_all()
        except BaseException as error:
            self._inbox.close(f"this engine broke and takes no requests ({error!r}); load the model again")
            engine.abandon(RequestFailedError(f"the engine broke: {error!r}; load the model again"))
            raise
        finally:
            self._thread_id = 0


def _advance(engine: Stepper) -> bool:
    """One step; whether there was anything to compute."""
    try:
        return engine.step().plan is not None
    except Exception:
        raise
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            raise
        # The step is over, its requests know, and nobody above this thread can be interrupted.
        log.exception("an interrupt in an engine's thread")
        return True
