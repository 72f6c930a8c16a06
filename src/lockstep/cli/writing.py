"""Files that commands write: checked before the work begins, with a message for each failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import UsageError

OutputFile = tuple[Path | None, str]
"""Path of something to be written, None for nowhere, and what it is called."""


def expanded(path: Path | None) -> Path | None:
    """A path as a user means it: ``~`` is home, also where no shell has seen it."""
    return None if path is None else path.expanduser()


def check_outputs(places: Iterable[OutputFile], inputs: Iterable[Path | str | None] = ()) -> None:
    """Refuse what cannot be written, before an hour's work and not after it. Folders that are missing are no fault:
    `make_folder` makes them.

    Args:
        inputs: what the command reads: files, directories whose files it reads, or None.

    Raises:
        UsageError: nothing can be written at one of the places, it holds what is read, or two are the same.
    """
    read = [file for path in inputs if path is not None for file in _files(Path(path).expanduser())]
    taken: dict[Path, str] = {}
    for path, what in places:
        if path is None:
            continue
        try:
            _check(path, what)
        except OSError as error:
            raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None
        for file in read:
            if _is_same(path, file):
                raise UsageError(f"{path}: {what} cannot be written there: {file} is read from; name another file")
        other = taken.setdefault(path.resolve(), what)
        if other != what and (path.is_file() or not path.exists()):
            raise UsageError(f"{path}: {what} cannot be written there: it is where {other} goes; name another file")


def make_folder(path: Path, what: str) -> None:
    """Make the folder that a file is to be in; UsageError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None


def write_file(path: Path, data: bytes, what: str, note: str = "") -> None:
    """Write a file whole, in a folder that may have to be made, and say so; UsageError where that cannot be done.

    Args:
        what: it is called, with its article.
        note: ends the line on standard error.
    """
    make_folder(path, what)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None
    print(f"{what.removeprefix('the ')} written to {path}{note}", file=sys.stderr)


def _check(path: Path, what: str) -> None:
    no = f"{path}: {what} cannot be written there"
    if path.is_dir():
        raise UsageError(f"{no}: it is a directory; name a file in it")
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not folder.is_dir():
        raise UsageError(f"{no}: {folder} is no directory; name a file in one")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{no}: it may not be written to")


def _files(path: Path) -> Iterator[Path]:
    """Files of a path: itself, or all files in it. A path that cannot be listed fails when it is read."""
    try:
        if path.is_dir():
            yield from sorted(path.iterdir())
        else:
            yield path
    except OSError:
        return


def _is_same(path: Path, file: Path) -> bool:
    """True if two names are one file: links are followed."""
    try:
        return path.samefile(file)
    except OSError:  # one of them is not there
        return False
