"""Fingerprints of artifacts: compute BLAKE2b-128 over file contents, independent of the files' names and locations.

Hashing a gigabyte takes more than a second, so the digest of a file is cached under its path, size, mtime and inode.
The cache is only an optimization: a damaged, outdated or unwritable record costs time but has no other effect.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import ArtifactNotFoundError

_DIGEST_BYTES = 16
_RECORD = re.compile(r"([0-9]+ [0-9]+ [0-9]+ ([0-9a-f]{32})) ([0-9a-f]{32})\n?")
_MIN_CACHED_BYTES = 1 << 20
MAX_RECORDS = 4096
"""Maximum number of cached records, after which the cache is cleared. Few machines have as many weight files."""
_SETTLED_NS = 2_000_000_000
"""Minimum age of a change for caching. A more recently changed file may change again without a new timestamp."""


def file_fingerprint(path: Path, cache_dir: Path, max_records: int = MAX_RECORDS) -> str:
    """Fingerprint of one file's content, as 32 hex digits.

    Args:
        max_records: number of records with which the cache is cleared before another is added.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
    """
    try:
        status = path.stat()
        record = cache_dir / "fingerprints" / _digest(os.fsencode(path.resolve()))
        state = _state_text(status)
        cached = _recall(record, state)
        if cached is not None:
            return cached
        digest = _content_digest(path)
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error
    if status.st_size >= _MIN_CACHED_BYTES and time.time_ns() - status.st_mtime_ns > _SETTLED_NS:
        _remember(record, f"{state} {digest}", max_records)
    return digest


def files_fingerprint(root: Path, names: Iterable[str], cache_dir: Path) -> str:
    """Fingerprint of several files below a root, as 32 hex digits: relative names and contents, in order of name."""
    lines = [f"{name}\0{file_fingerprint(root / name, cache_dir)}\n" for name in sorted(names)]
    return _digest("".join(lines).encode())


def merged_fingerprint(base: str, adapter: str) -> str:
    """Fingerprint of a base model with an adapter merged into its weights, from the fingerprints of both."""
    return _digest(f"{base}+{adapter}\n".encode())


class MappedFile(NamedTuple):
    """A file that stays mapped into memory, as it was when it was opened."""

    path: Path
    inode: int
    state: str
    """Size, time of the last change, and inode."""
    digest: str

    @classmethod
    def of(cls, path: Path, cache_dir: Path) -> MappedFile:
        """Describe a file that was just mapped.

        Raises:
            ArtifactNotFoundError: the file cannot be read.
        """
        try:
            status = path.stat()  # before the digest, so that a later change is noticed
        except OSError as error:
            raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error
        return cls(path, status.st_ino, _state_text(status), file_fingerprint(path, cache_dir))

    @property
    def is_changed(self) -> bool:
        """True if the file has another content now, which its map shows as well; access to the end of a map whose file
        became shorter kills the process. A map keeps the content of a file that was removed or replaced."""
        try:
            status = self.path.stat()
            if status.st_ino != self.inode or _state_text(status) == self.state:
                return False
            return _content_digest(self.path) != self.digest
        except OSError:
            return False  # removed


def _state_text(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _recall(record: Path, state: str) -> str | None:
    try:
        found = _RECORD.fullmatch(record.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if found is None or _digest(found[1].encode()) != found[3] or found[1] != f"{state} {found[2]}":
        return None
    return found[2]


def _remember(record: Path, content: str, max_records: int) -> None:
    """Write a record atomically. Errors are ignored."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        present = list(record.parent.iterdir())
        if len(present) >= max_records:
            for old in present:
                old.unlink()
        handle, temporary = tempfile.mkstemp(dir=record.parent, prefix=".new-")
        try:
            with open(handle, "w", encoding="ascii") as file:
                file.write(f"{content} {_digest(content.encode())}\n")
            os.replace(temporary, record)
        except OSError:
            os.unlink(temporary)
            raise
