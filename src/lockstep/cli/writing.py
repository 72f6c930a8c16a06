"""Files that commands write: whether they can be, before the work begins, and what is said when they are not."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import UsageError


def check_place(path: Path | None, what: str) -> None:
    """UsageError if nothing can be written at a path; None is no path. Said before an hour's work, not after it."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{path}: {what} cannot be written there: it is a directory; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{path}: {what} cannot be written there: {folder} is no directory; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path}: {what} cannot be written there: it may not be written to")


def write_file(path: Path, data: bytes, what: str) -> None:
    """Write a file whole; UsageError where that cannot be done."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None
