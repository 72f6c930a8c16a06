"""Work whose recursion depth the caller's input decides, on a thread with room for it.

A native compiler that recurses over its input ends the process when the stack does; a stack in proportion to the
largest input that is let in cannot end first. Only touched pages cost memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, TypeVar

from lockstep.errors import QueueFullError

Result = TypeVar("Result")


class DeepStack:
    """Runs one function at a time per place, each on a new thread with a large stack.

    Args:
        stack_bytes: of each thread.
        max_threads: how many may run at once; others wait for a place.
    """

    _starting: ClassVar[threading.Lock] = threading.Lock()
    """The stack size of new threads is a setting of the whole process."""

    def __init__(self, stack_bytes: int, max_threads: int) -> None:
        self._stack_bytes = stack_bytes
        self._places = threading.BoundedSemaphore(max_threads)

    def run(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """The function's result, or what it raised.

        A function that is not done in time is left to end on its own and keeps its place until then.

        Raises:
            TimeoutError: it ran too long.
            QueueFullError: no place became free in that time.
        """
        if not self._places.acquire(timeout=timeout_s):
            raise QueueFullError("too many grammars are being compiled; try again later")
        results: list[Result] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:  # handed to the caller, native panics included
                errors.append(error)
            finally:
                self._places.release()

        thread = threading.Thread(target=body, name="lockstep-deep-stack", daemon=True)
        with self._starting:
            usual = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            except BaseException:
                self._places.release()
                raise
            finally:
                threading.stack_size(usual)
        thread.join(timeout_s)
        if results:
            return results[0]
        if errors:
            raise errors[0]
        raise TimeoutError(f"not done after {timeout_s:g} s")
