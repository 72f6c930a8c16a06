"""System: clocks, pauses, threads, processes and written files as one value, which tests and simulations replace.

The parts of a server get a `System` when they are created and pass it on, so that a test can replace time, fill a disk,
refuse a thread, or end a process. Time limits and timers of an event loop are not here: they belong to the loop, which
a simulation replaces as a whole. Reading and removing files is not here either.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor

T = TypeVar("T")


class Process(Protocol):
    """A child process; see `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class System:
    """The operating system. Tests pass subclasses that replace some of its methods."""

    __slots__ = ()

    def now_s(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def unix_time_s(self) -> float:
        """Seconds since 1970."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Pause a task."""
        import asyncio

        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """Pause a thread."""
        time.sleep(seconds)

    # -- threads and processes ------------------------------------------------------------------------------------

    def start_thread(self, work: Callable[[], object], name: str) -> threading.Thread:
        """Run a function on its own daemon thread. RuntimeError: the thread cannot be started."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def pool(self, num_threads: int, name: str) -> Executor:
        """Threads that take work in its order. The interpreter joins them when it ends."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(num_threads, name)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run a function on a thread of the event loop's pool, and return its value or raise its error."""
        import asyncio

        return await asyncio.to_thread(work)

    def start_process(self, command: Sequence[str], descriptor: int) -> Process:
        """Start a process that inherits one more descriptor. It reads nothing, and prints to our standard error.

        Raises:
            OSError: it cannot be started.
        """
        import subprocess

        return subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.DEVNULL, stdout=2)

    def run_process(self, command: Sequence[str], data: bytes, limit_s: float) -> tuple[int, bytes]:
        """Run a process to its end. Returns its exit code, negative for a signal, and what it printed.

        Args:
            data: its standard input.

        Raises:
            OSError: it cannot be started.
            TimeoutError: it took longer than the limit, and was killed.
        """
        import subprocess

        try:
            ended = subprocess.run(command, input=data, stdout=subprocess.PIPE, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return ended.returncode, ended.stdout

    # -- files that are written; every method raises OSError ------------------------------------------------------

    def open(self, path: Path, mode: str, permissions: int = 0o666) -> FileIO:
        """Open a file without a buffer: `write` returns how much it took; `write_all` repeats it.

        Args:
            mode: as of the function `open`.
            permissions: of a new file, as far as the process's mask permits.
        """
        return FileIO(path, mode, opener=lambda name, flags: os.open(name, flags, permissions))

    def sync(self, descriptor: int) -> None:
        """Make a file or folder durable."""
        os.fsync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file another name, which another file may have."""
        os.replace(source, target)

    def write_file(self, path: Path, *parts: bytes | memoryview, permissions: int = 0o666) -> None:
        """Write a whole file. It gets its name once it is complete; if that fails, nothing of it is left."""
        partial = path.with_suffix(f".{os.urandom(4).hex()}.part")
        try:
            with self.open(partial, "xb", permissions) as file:
                for part in parts:
                    write_all(file, part)
            self.replace(partial, path)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


SYSTEM = System()
"""The real system, where nothing else is passed."""


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of the data, in as many parts as the system takes. OSError: a part of it may have been written."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
