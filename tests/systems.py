"""Systems for tests: one with another clock, and one whose calls a test may hinder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from lockstep.system import Process, System


class ClockedSystem(System):
    """The real system with another clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def now_s(self) -> float:
        return self._clock()


class WatchedSystem(System):
    """The real system. Before each call it calls a function with the call's name and what it is about.

    Args:
        before: gets ``open``, ``write``, ``sync`` or ``replace`` and a file's path (the new one where it is renamed),
            ``thread`` and the thread's name, or ``process`` and the program. An error that it raises is the call's.
    """

    def __init__(self, before: Callable[[str, str], object]) -> None:
        self.before = before

    def start_thread(self, work: Callable[[], object], name: str) -> threading.Thread:
        self.before("thread", name)
        return super().start_thread(work, name)

    def start_process(self, command: Sequence[str], descriptor: int) -> Process:
        self.before("process", command[0])
        return super().start_process(command, descriptor)

    def run_process(self, command: Sequence[str], data: bytes, limit_s: float) -> tuple[int, bytes]:
        self.before("process", command[0])
        return super().run_process(command, data, limit_s)

    def open(self, path: Path, mode: str, permissions: int = 0o666) -> FileIO:
        self.before("open", str(path))
        return _WatchedFile(path, mode, permissions, lambda: self.before("write", str(path)))

    def sync(self, descriptor: int) -> None:
        self.before("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        super().sync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self.before("replace", str(target))
        super().replace(source, target)


class _WatchedFile(FileIO):
    def __init__(self, path: Path, mode: str, permissions: int, before: Callable[[], object]) -> None:
        super().__init__(path, mode, opener=lambda name, flags: os.open(name, flags, permissions))
        self._before = before

    def write(self, data: Any, /) -> int:
        self._before()
        return super().write(data)
