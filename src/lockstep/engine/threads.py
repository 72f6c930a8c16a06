"""Threads that step an engine: one that runs it until it is stopped, and one that does tasks for callers who wait."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from lockstep.engine.outputs import StepOutputs
from lockstep.engine.queues import Inbox
from lockstep.errors import LockstepError, RequestFailedError, UsageError

LAST_TASK_S = 10.0
"""For the task under way when the process ends."""

News = TypeVar("News")
Result = TypeVar("Result")


class Task(Generic[News, Result]):
    """Work for an `Aside`, what it tells meanwhile and what it brought."""

    def __init__(self, work: Callable[[Task[News, Result]], Result]) -> None:
        self._work = work
        self.is_stopped = False
        """Set once nobody waits for the rest; long work looks at it now and then."""
        self.news: SimpleQueue[News | None] = SimpleQueue()
        """What the work tells, and None when it is over. A wait for it is one native call: an interrupt comes before it
        or after it, and nothing that was told is lost."""
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, on the thread that is for it."""
        try:
            self._results.append(self._work(self))
        except BaseException as error:  # the waiting one's, whatever it is
            self._error = error
        finally:
            self.news.put(None)

    def result(self) -> Result:
        """Take what the work returned; raises what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class Aside:
    """One thread that does tasks in the order in which they came. It ends with the last reference to this, or with the
    process.

    Python raises Ctrl-C, and whatever else a signal's handler raises, between any two instructions of the main thread.
    What must not be left half done, as a step, is done here: an interrupt finds only the waiting.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._tasks,), name=name, daemon=True)
        self._is_ended = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while tasks are done: it was not ended, and this is no fork of its process.

        The thread is not asked: `Thread.is_alive` takes a lock, and says no for ever once it was interrupted there.
        """
        return not self._is_ended and os.getpid() == self._pid

    def end(self) -> None:
        """End the thread behind the tasks that wait. Calling it again does what an interrupt left of it."""
        self._is_ended = True
        _end(self._tasks, self._thread)

    def begin(self, task: Task[Any, Any]) -> None:
        """Do a task as soon as those before it are done.

        Raises:
            UsageError: it never could be.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a callback or observer of a model cannot wait for the model; ask it after the call")
        if not self.is_alive:
            raise UsageError("this model is closed, or was loaded before the process was forked; load it again")
        self._tasks.put(task)

    def do(self, work: Callable[[Task[Any, Result]], Result]) -> Result:
        """Do it and wait; an interrupt stops it, and a second one no longer waits until it has stopped."""
        task = Task(work)
        try:
            self.begin(task)
            task.news.get()
        except BaseException:
            self.stop(task)
            raise
        return task.result()

    def stop(self, task: Task[Any, Any]) -> None:
        """Stop a task, wherever its beginning was interrupted, and wait until it and those before it are over."""
        task.is_stopped = True
        if self.is_alive and threading.current_thread() is not self._thread:
            last: Task[Any, None] = Task(lambda task: None)
            self._tasks.put(last)
            last.news.get()


def _work_off(tasks: SimpleQueue[Task[Any, Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # with what it brought


def _end(tasks: SimpleQueue[Task[Any, Any] | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(LAST_TASK_S)


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
    """The thread of one engine's steps, which waits where there is nothing to do, until the engine is stopped.

    Steps have one thread at a time: while one is in `run`, all others are refused. Whatever ends the loop, nobody is
    left waiting for an answer that cannot come.

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
