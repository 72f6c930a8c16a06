"""The manifest of a recording's folder: every file in it with its size and digest, under one chain.

Format, version 1. A machine has one manifest in each folder that it records to, ``ID.lsmanifest``; all its processes
append to it, under a lock. Manifests of several machines can lie in one folder. A manifest is text, a line for each
change, oldest first::

    CHAIN {"schema":1,"lockstep":"0.9.0"}
    CHAIN {"file":"20261123-091502-811-000001.lstrace","state":"open"}
    CHAIN {"file":"20261123-091502-811-000001.lstrace","state":"closed","num_bytes":4096,"digest":"..."}

- The first line is a `ManifestHeader`, each other one a `Listed`. The last line about a file applies.
- ``digest`` is the BLAKE2b-128 of the file's first ``num_bytes`` bytes on disk.
- ``CHAIN`` is the BLAKE2b-128 of the line's JSON, keyed with the chain of the previous line; the first has no key.
- A file is listed as *open* before it is created, again about once per second while it grows, then as *closed* or
  *deleted*. A process that is killed at any moment therefore leaves no unlisted file. An open file may be longer than
  listed, and its own chain covers the rest. A line without a newline is incomplete and is ignored.
- A manifest of more than `MAX_BYTES` is compacted: deleted files are left out, and the others keep their order. The
  header then contains the number of lines that were left out, and the chain at their end.

The chain has no secret key: it reveals changed, truncated, removed and added lines, but not a completely new folder.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from io import FileIO
from pathlib import Path

import msgspec

from lockstep.errors import TraceError
from lockstep.system import SYSTEM, System, write_all
from lockstep.version import __version__

MANIFEST_SCHEMA_VERSION = 1
MANIFEST_SUFFIX = ".lsmanifest"
TEXT_SUFFIX = ".lstext"
"""Suffix of files with a model's vocabulary and template."""
DIGEST_BYTES = 16
MAX_BYTES = 1 << 16
"""Size in bytes from which a manifest is compacted, if it has also doubled since the last time."""
_ID_BYTES = 8
_HEX = 2 * DIGEST_BYTES
_MACHINE_ID = Path("/etc/machine-id")
_MAX_REOPENED = 100
"""Maximum number of attempts to lock a manifest that other processes compact at the same time."""


class State(Enum):
    """States of a listed file."""

    OPEN = "open"
    """The file is being written, or its process was killed."""
    CLOSED = "closed"
    DELETED = "deleted"
    """The recorder deleted the file to stay within its size limit."""


class Listed(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A line about one file."""

    file: str
    state: State
    num_bytes: int = 0
    digest: str = ""
    """Digest of the first ``num_bytes`` bytes; empty if ``num_bytes`` is 0."""
    needs: tuple[str, ...] = ()
    """Names of the files without which this one cannot be served: vocabularies and templates."""


class ManifestHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a manifest."""

    schema: int
    lockstep: str
    """Version of Lockstep that wrote the manifest."""
    num_left_out: int = 0
    """Total number of lines that compactions have left out."""
    chain: str = ""
    """Chain at the end of the lines that were left out."""


@dataclass(slots=True)
class Manifest:
    """Content of a manifest file."""

    path: Path
    header: ManifestHeader
    files: dict[str, Listed] = field(default_factory=dict)
    """Last line of each file. Recordings are in the order in which they were begun, texts in the order in which they
    were last written."""
    chain: bytes = b""
    num_lines: int = 0

    @property
    def live(self) -> Sequence[Listed]:
        """Files that were not deleted."""
        return [each for each in self.files.values() if each.state is not State.DELETED]

    def take(self, listed: Listed) -> None:
        """Apply the next line."""
        if listed.state is State.OPEN and not listed.num_bytes:
            self.files.pop(listed.file, None)
        self.files[listed.file] = listed


def digest_of(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def manifest_files(folder: Path) -> list[Path]:
    """Manifests of a folder, by name."""
    return sorted(folder.glob(f"*{MANIFEST_SUFFIX}"))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and check its chain.

    Raises:
        TraceError: the manifest cannot be read or has another version, or a line does not match the chain.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: the folder's manifest cannot be read: {error.strerror}") from error
    *lines, rest = data.split(b"\n")
    manifest: Manifest | None = None
    chain = b""
    for number, line in enumerate(lines, 1):
        content = line[_HEX + 1 :]
        chain = chained(chain, content)
        if line[: _HEX + 1] != b"%s " % chain.hex().encode():
            raise _changed(path, number)
        try:
            if manifest is None:
                manifest = Manifest(path, _checked(path, msgspec.json.decode(content, type=ManifestHeader)))
            else:
                manifest.take(msgspec.json.decode(content, type=Listed))
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}: line {number} is not a line of a folder's manifest: {error}") from None
    if rest and rest[: _HEX + 1] == b"%s " % chained(chain, rest[_HEX + 1 : -1]).hex().encode():
        raise _changed(path, len(lines) + 1)  # a complete line with another byte instead of its newline
    if manifest is None:
        return Manifest(path, ManifestHeader(MANIFEST_SCHEMA_VERSION, __version__))
    manifest.chain, manifest.num_lines = chain, len(lines)
    return manifest


class FolderManifest:
    """Appends lines to this machine's manifest of a folder. Safe for any thread and process; each call appends once.

    Args:
        max_bytes: size from which the manifest is compacted, if it has also doubled since the last time.
    """

    def __init__(self, folder: Path, system: System = SYSTEM, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.system = system
        self.id = _id_of(folder)
        self.path = folder / f"{self.id}{MANIFEST_SUFFIX}"
        self._least_bytes = self._max_bytes = max_bytes

    def put(self, *lines: Listed, path: Path | None = None) -> None:
        """List files.

        Args:
            path: another manifest of the folder; None: this machine's.

        Raises:
            OSError: the manifest cannot be written.
        """
        path = path or self.path
        with _locked(path, self.system) as file:
            descriptor = file.fileno()
            chain = _chain_at_end(descriptor)
            contents = list(map(msgspec.json.encode, lines))
            if not os.fstat(descriptor).st_size:
                contents.insert(0, msgspec.json.encode(ManifestHeader(MANIFEST_SCHEMA_VERSION, __version__)))
            write_all(file, _as_lines(contents, chain))
            if os.fstat(descriptor).st_size > self._max_bytes:
                with suppress(OSError, TraceError):  # the longer manifest remains valid
                    self.system.write_file(path, _compacted(path))
                self._max_bytes = max(self._least_bytes, 2 * path.stat().st_size)


def lock(descriptor: int, operation: int) -> bool:
    """Lock an open file; False: another process holds the lock. True if the file system does not support locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def _locked(path: Path, system: System) -> Iterator[FileIO]:
    """Open the file, created if missing, while no other process writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_MAX_REOPENED):
        with system.open(path, "a+b", 0o644) as file:
            lock(file.fileno(), fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    yield file
                    return
    raise OSError(0, "other processes replace the folder's manifest too often")


def _chain_at_end(descriptor: int) -> bytes:
    """Return the chain of the last complete line, and remove an incomplete line after it."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - MAX_BYTES)
    tail = os.pread(descriptor, size - begin, begin)
    end = tail.rfind(b"\n") + 1
    if end < len(tail):
        os.ftruncate(descriptor, begin + end)
    line = tail[tail.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]
    try:
        return bytes.fromhex(line[:_HEX].decode())
    except ValueError:
        return b""  # the line was changed; readers reject it


def _compacted(path: Path) -> bytes:
    """Content of a compacted manifest."""
    manifest = read_manifest(path)
    live = manifest.live
    num_left_out = manifest.header.num_left_out + manifest.num_lines - len(live)
    header = ManifestHeader(MANIFEST_SCHEMA_VERSION, __version__, num_left_out, manifest.chain.hex())
    return _as_lines(list(map(msgspec.json.encode, (header, *live))), b"")


def _as_lines(contents: Sequence[bytes], chain: bytes) -> bytes:
    lines = bytearray()
    for content in contents:
        chain = chained(chain, content)
        lines += b"%s %s\n" % (chain.hex().encode(), content)
    return bytes(lines)


def chained(chain: bytes, content: bytes | memoryview) -> bytes:
    """Chain after a line of a manifest or a chunk of a recording."""
    return blake2b(content, digest_size=DIGEST_BYTES, key=chain).digest()


def _checked(path: Path, header: ManifestHeader) -> ManifestHeader:
    if header.schema != MANIFEST_SCHEMA_VERSION:
        raise TraceError(
            f"{path}: its schema is {header.schema}, this version reads schema {MANIFEST_SCHEMA_VERSION}; "
            f"it was written by lockstep {header.lockstep}"
        )
    return header


def _changed(path: Path, number: int) -> TraceError:
    return TraceError(f"{path}: line {number} differs from what was written: its chain does not match")


def _id_of(folder: Path) -> str:
    """Name of this machine's manifest in a folder; it does not reveal the machine's name."""
    machine = b""
    with suppress(OSError):
        machine = _MACHINE_ID.read_bytes()
    named = (socket.gethostname().encode(), machine, os.fsencode(folder.absolute()))
    return blake2b(b"\0".join(named), digest_size=_ID_BYTES).hexdigest()
