"""Output files of commands: they are checked before the work begins, and errors have messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import UsageError

OutputFile = tuple[Path | None, str]
"""Path of an output file, None if it is not written, and its name in messages, with an article."""


def expanded(path: Path | None) -> Path | None:
    """The path with ``~`` replaced by the home directory, also if no shell has done so."""
    return None if path is None else path.expanduser()


def check_outputs(outputs: Iterable[OutputFile], inputs: Iterable[Path | str | None] = ()) -> None:
    """Check that output files can be written, before the work begins. Missing folders are valid: `make_folder` creates
    them.

    Args:
        inputs: files that the command reads, directories whose files it reads, or None.

    Raises:
        UsageError: an output cannot be written, is also an input, or is the same file as another output.
    """
    read = [file for path in inputs if path is not None for file in _files(Path(path).expanduser())]
    taken: dict[Path, str] = {}
    for path, what in outputs:
        if path is None:
            continue
        try:
            _check(path, what)
        except OSError as error:
            raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None
        for file in read:
            if _is_same(path, file):
                raise UsageError(f"{path}: {what} cannot be written there: {file} is an input; give another file")
        other = taken.setdefault(path.resolve(), what)
        if other != what and (path.is_file() or not path.exists()):
            raise UsageError(f"{path}: {what} cannot be written there: {other} has the same path; give another file")


def make_folder(path: Path, what: str) -> None:
    """Create the folder of an output file; UsageError if it cannot be created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: {what} cannot be written there: {error.strerror}") from None


def write_file(path: Path, data: bytes, what: str, note: str = "") -> None:
    """Write a file, create its folder if needed, and report it on standard error; UsageError if it cannot be written.

    Args:
        what: name of the file in messages, with an article.
        note: end of the line on standard error.
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
        raise UsageError(f"{no}: it is a directory; give a file in it")
    folder = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not folder.is_dir():
        raise UsageError(f"{no}: {folder} is not a directory; give a file in a directory")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{no}: you have no permission to write to it")


def _files(path: Path) -> Iterator[Path]:
    """The file of a path, or all files of a directory; empty if it cannot be listed, which fails later, at reading."""
    try:
        if path.is_dir():
            yield from sorted(path.iterdir())
        else:
            yield path
    except OSError:
        return


def _is_same(path: Path, file: Path) -> bool:
    """True if two paths are the same file, also through links."""
    try:
        return path.samefile(file)
    except OSError:  # one of them does not exist
        return False
