"""A thread for whoever waits: work is done there whole, and an interrupt finds only the waiting.

Python raises Ctrl-C, and whatever else a signal's handler raises, between any two instructions of the main thread. What
must not be left half done, as a step, has to be done elsewhere.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lockstep.errors import UsageError

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
        """What the work returned, once; raises what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class Aside:
    """One thread that does tasks in the order in which they came. It ends with the last reference to this, or with the
    process."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._tasks,), name=name, daemon=True)
        self._is_ended = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether tasks are done: it was not ended, and this is no fork of its process.

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
