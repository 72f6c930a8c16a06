"""Temporary folders of one process each: locked while the process runs, removed by the next one if it was killed.

The lock is the system's (`flock`) on a file in the folder, so it ends with the process, however that ends.
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
"""Folders that are made before `claim_folder` gives up; another process may remove each before it is locked."""


class OwnedFolder(NamedTuple):
    """A folder that this process has locked."""

    path: Path
    descriptor: int
    """Of the locked file."""

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.descriptor)


def lock_file(path: Path) -> int:
    """Make a file if it is missing, and lock it for this process until the returned descriptor is closed.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file cannot be made or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def claim_folder(parent: Path, prefix: str) -> OwnedFolder:
    """Make and lock a new folder, readable by this user alone, and remove those that killed processes left.

    Args:
        prefix: beginning of the names of all folders of this kind; nothing else in `parent` may have it, such as
            folders of an older version that does not lock them.

    Raises:
        OSError: a folder cannot be made or locked.
    """
    for left in sorted(parent.glob(f"{prefix}*")):
        with suppress(OSError):
            _remove_left(left)
    for _ in range(MAX_CLAIMS):
        path = parent / f"{prefix}{secrets.token_hex(8)}"  # known before it is made: a signal may come at any moment
        try:
            path.mkdir(mode=0o700)
            return OwnedFolder(path, lock_file(path / _OWNER))
        except (FileNotFoundError, BlockingIOError):  # another process removed it as one that was left
            continue
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    raise FileNotFoundError(
        f"{MAX_CLAIMS} folders {prefix}* were removed as they were made; find the process that does"
    )


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder of this process in the system's place for temporary files (`TMPDIR`), removed at the block's end."""
    import tempfile

    folder = claim_folder(Path(tempfile.gettempdir()), prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def _remove_left(folder: Path) -> None:
    """Remove a folder whose process was killed; OSError: its process runs, or it is not this user's."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
        return
    owner = lock_file(folder / _OWNER)
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(owner)
