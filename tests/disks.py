"""Disks for tests: one that is really full, one that refuses by a switch, and what is left after a power failure."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.system import System
from tests.systems import WatchedSystem


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small disk in memory; the test is skipped where this user may mount none."""
    folder.mkdir()
    try:
        command = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a full disk needs a mount, which needs root")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True)


def fill(folder: Path) -> Path:
    """Take all room of a disk; whoever removes the file gives it back."""
    path, size = folder / "filler", 1 << 16
    with path.open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return path


class Refusing(WatchedSystem):
    """A disk that takes nothing in one folder while it refuses.

    Args:
        call: what it refuses: ``write``, or ``sync`` as a full one does that allocates late.
    """

    def __init__(self, folder: Path, number: int = errno.ENOSPC, call: str = "sync") -> None:
        super().__init__(self._refuse)
        self.folder, self.number, self.call = folder, number, call
        self.is_refusing = False
        self.num_refused = 0

    def _refuse(self, call: str, about: str) -> None:
        if self.is_refusing and call == self.call and Path(about).is_relative_to(self.folder):
            self.num_refused += 1
            raise OSError(self.number, os.strerror(self.number))


class Synced(System):
    """What a power failure leaves: files as at their last `sync`, under the names of their folder's last one."""

    def __init__(self, events: list[str] | None = None) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        self._events = [] if events is None else events

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._events.append(f"fsync {path.name.partition('_')[0]}")
        if path.is_dir():
            self._names[path] = {each.name: each.stat().st_ino for each in path.iterdir()}
        else:
            self._contents[os.fstat(descriptor).st_ino] = path.read_bytes()

    def left_of(self, folder: Path, target: Path) -> Path:
        """Write what is left of a folder into another."""
        target.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if inode in self._contents:
                (target / name).write_bytes(self._contents[inode])
        return target
