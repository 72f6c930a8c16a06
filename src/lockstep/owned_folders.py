"""Temporary folders with one owner each: a process locks its folder and removes it at its end.

If a process was killed, the next process removes its folder. The lock is a `flock` on a file in the folder, which the
system releases whenever the process ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_OWNER = "owner"
"""Name of the locked file."""
MAX_CLAIMS = 10
"""Maximum attempts of `claim_folder`: another process may remove a new folder before it is locked."""


class OwnedFolder(NamedTuple):
    """A folder that this process has locked."""

    path: Path
    descriptor: int
    """File descriptor of the locked file."""

    def remove(self) -> None:
        """Remove the folder with its content, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.descriptor)


def lock_file(path: Path) -> int:
    """Create a file if it is missing, and lock it for this process until the returned descriptor is closed.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be created or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def claim_folder(parent: Path, prefix: str) -> OwnedFolder:
    """Create and lock a new folder, readable by this user alone, and remove the folders of killed processes.

    Args:
        prefix: beginning of the names of all folders of this kind. Other entries of `parent` must not have it, for
            example folders of an older version that does not lock them.

    Raises:
        OSError: a folder cannot be created or locked.
    """
    for left in sorted(parent.glob(f"{prefix}*")):
        with suppress(OSError):
            _remove_left(left)
    for _ in range(MAX_CLAIMS):
        path = parent / f"{prefix}{secrets.token_hex(8)}"  # named before it is created: a signal may come at any moment
        try:
            path.mkdir(mode=0o700)
            return OwnedFolder(path, lock_file(path / _OWNER))
        except (FileNotFoundError, BlockingIOError):  # another process removed it as the folder of a killed process
            continue
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    raise FileNotFoundError(
        f"{MAX_CLAIMS} folders {prefix}* were removed right after their creation; find the process that removes them"
    )


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Folder of this process in the system's directory for temporary files (`TMPDIR`), removed at the block's end."""
    import tempfile

    folder = claim_folder(Path(tempfile.gettempdir()), prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def _remove_left(folder: Path) -> None:
    """Remove the folder of a killed process; OSError: its process runs, or the folder belongs to another user."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        return
    owner = lock_file(folder / _OWNER)
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(owner)
