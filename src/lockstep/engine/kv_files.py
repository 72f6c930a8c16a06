"""KV blocks as files: stores one tier of offloaded KV blocks in a folder, on disk or in shared memory.

Each block is a file ``ENVIRONMENT/HA/HASH.kv``, with hexadecimal names: a header of 64 bytes, then the block's bytes;
little-endian:

    magic 8 | environment 16 | block hash 16 | length of the content, u64 | checksum 16
    checksum = BLAKE2b-128(the header up to here + content)

A file is renamed to its final name once it is complete. The header and the checksum detect files that are incomplete
after a power failure or that were modified. A file that does not match is removed and never returned. The files take no
more than the budget, in pages of 4 KiB. Beyond it, blocks of the lowest priority are removed, least recently used
first. Only one process can use a folder at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UsageError
from lockstep.executors.base import Blocks
from lockstep.owned_folders import OwnedFolder, claim_folder, lock_file
from lockstep.system import SYSTEM, System

log = logging.getLogger(__name__)

MAGIC = b"LSKVBLK1"
_KEYS = struct.Struct("<8s16s16sQ")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _KEYS.size + _CHECKSUM_BYTES
_PAGE_BYTES = 4096
MAX_RETRIES = 1
"""Further attempts to write a block when the disk is full, each after the removal of another block."""
RECOVERED_BYTES, RECOVERED_BLOCKS = 1 << 20, 8
"""A disk that rejected a file counts as recovered after it accepts this much more, whichever is larger."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
UNKNOWN_CLASS = 1 << 16
"""Priority of blocks whose model no engine of this process has loaded yet."""
_SUFFIX = ".kv"
SHARED_MEMORY = Path("/dev/shm")
"""Folder for files in memory on Linux. Other systems use the folder for temporary files."""
_HOST_PREFIX = "lockstep-kv-"
USABLE_SHARE = 0.9
"""Usable share of the free space in the host memory folder, which other programs use too."""


class BlockKey(NamedTuple):
    """Identity of a block's content: equal keys have equal bytes."""

    environment: bytes
    """16 bytes: digest of everything except the tokens that affects the bits."""
    block_hash: bytes
    """16 bytes: hash of the chain of tokens; see `lockstep.core.prefix`."""


class BlockError(Exception):
    """A block's file was corrupted or unreadable. It has been removed."""


class BlockFiles:
    """Blocks in a folder, within a budget. One thread reads, writes and removes; any thread may test membership.

    Args:
        folder: created if missing, with access for its owner only.
        budget_bytes: maximum size of all files.

    Raises:
        UsageError: the folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path, budget_bytes: int, system: System = SYSTEM) -> None:
        self.folder = folder
        self.system = system
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        """Size of all files, in whole pages."""
        self.num_evicted = 0
        self.fault = ""
        """The reason why the disk takes less than the budget, in one sentence; empty: no such limit is known."""
        self._refused_bytes = 0
        """`num_bytes` when the disk last rejected a file."""
        self._blocks: dict[BlockKey, tuple[int, int]] = {}
        """Priority and size in bytes of each stored block."""
        self._order: dict[int, OrderedDict[BlockKey, None]] = {}
        """Keys by priority, least recently used first."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            self._scan()
            self.shrink()
        except OSError as error:
            self.close()
            raise _unusable(folder, error) from error

    def close(self) -> None:
        """Release the folder to other processes. The files stay."""
        os.close(self._lock)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over a copy of the present keys."""
        return iter(tuple(self._blocks))

    def shrink(self) -> None:
        """Remove the blocks that exceed the budget."""
        self._evict(0)

    def class_of(self, key: BlockKey) -> int:
        """Priority of a stored block; `UNKNOWN_CLASS` for other keys."""
        return self._blocks.get(key, (UNKNOWN_CLASS, 0))[0]

    def classify(self, environment: bytes, class_: int) -> None:
        """Change the priority of an environment's blocks. They become the most recently used of that priority."""
        for key, (old, num_bytes) in tuple(self._blocks.items()):
            if key.environment == environment and old != class_:
                del self._order[old][key]
                self._order.setdefault(class_, OrderedDict())[key] = None
                self._blocks[key] = class_, num_bytes

    def charge(self, num_bytes: int) -> None:
        """Count other files against the budget. A negative number stops counting them."""
        self.num_bytes += num_bytes
        self._evict(0)

    def read(self, key: BlockKey, content: Blocks) -> bool:
        """Copy a block's content; False: the block is not stored.

        Args:
            content: [bytes of the block], overwritten.

        Raises:
            BlockError: the file does not match what was written. It is removed, and `content` is invalid.
        """
        if key not in self._blocks:
            return False
        try:
            with self._path(key).open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                num_read = _read_all(file.fileno(), content.data)
                is_at_end = not file.read(1)
        except OSError as error:
            self.remove(key)
            raise BlockError(f"{self._path(key)} cannot be read: {error.strerror}") from error
        fault = _fault(key, header, content) if num_read == len(content) and is_at_end else "has a wrong length"
        if fault:
            self.remove(key)
            raise BlockError(f"{self._path(key)} {fault}")
        self._use(key)
        return True

    def write(self, key: BlockKey, content: Blocks, class_: int) -> bool:
        """Store a block; False: there is no room for it, or the disk rejects it.

        Args:
            content: [bytes of the block].
            class_: priority; blocks with larger numbers are removed first.
        """
        if key in self._blocks:
            self._use(key)
            return True
        num_bytes = pages(HEADER_BYTES + len(content))
        if not self._evict(num_bytes, class_):
            return False
        is_written = self._write(key, content, class_)
        if is_written:
            self._note(key, class_, num_bytes)
            self._took(num_bytes)
        return is_written

    def _write(self, key: BlockKey, content: Blocks, class_: int) -> bool:
        path = self._path(key)
        header = header_of(key, content)
        for _ in range(1 + MAX_RETRIES):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.system.write_file(path, header, content.data, permissions=0o600)
                return True
            except OSError as error:
                if not self.refused(error, class_):
                    break
        return False

    def refused(self, error: OSError, class_: int | None = None) -> bool:
        """Record that the disk rejects a file of the folder. Logs one warning until the disk has room again.

        Args:
            class_: the file's priority; None: above that of every block.

        Returns:
            True if a block of the same or a lower priority was removed, so that another attempt may succeed.
        """
        before, self.fault = self.fault, f"{self.folder}: KV blocks cannot be stored there now: {error.strerror}"
        if error.errno in _FULL:
            self.fault += "; free space on that disk, or lower the budget for KV there"
        if not before:
            log.warning("%s", self.fault)
        self._refused_bytes = self.num_bytes
        return error.errno in _FULL and self._evict_one(class_)  # other programs filled the disk, so remove a block

    def _took(self, num_bytes: int) -> None:
        """Clear the fault when clearly more is stored than when the disk rejected a file.

        A disk that is almost full accepts one block for each that is removed, and rejects the next.
        """
        margin = max(RECOVERED_BYTES, RECOVERED_BLOCKS * num_bytes)
        if self.fault and self.num_bytes >= min(self._refused_bytes + margin, self.budget_bytes - num_bytes):
            self.fault = ""
            log.info("%s: KV blocks are stored there again", self.folder)

    def remove(self, key: BlockKey) -> bool:
        """Remove a block; False: it was not stored."""
        class_, num_bytes = self._blocks.pop(key, (0, 0))
        if not num_bytes:
            return False
        del self._order[class_][key]
        self.num_bytes -= num_bytes
        with suppress(OSError):  # on a read-only disk, the next scan finds the file
            self._path(key).unlink(missing_ok=True)
        return True

    # -- index ---------------------------------------------------------------------------------------------------

    def _path(self, key: BlockKey) -> Path:
        name = key.block_hash.hex()
        return self.folder / key.environment.hex() / name[:2] / f"{name}{_SUFFIX}"

    def _scan(self) -> None:
        """Index the files of an earlier process, least recently written first, and remove unfinished files.

        Until an engine claims these blocks, they are evicted first: their model may never be served again.
        """
        found: list[tuple[int, str, BlockKey, int]] = []
        for environment in _folders(self.folder, 32):
            for part in _folders(environment.path, 2):
                for entry in os.scandir(part.path):
                    key = _key(environment.name, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        continue  # not a block file
                    if key is None:
                        os.unlink(entry.path)
                        continue
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime_ns, entry.name, key, pages(state.st_size)))
        for _, _, key, num_bytes in sorted(found):
            self._note(key, UNKNOWN_CLASS, num_bytes)

    def _note(self, key: BlockKey, class_: int, num_bytes: int) -> None:
        self._blocks[key] = class_, num_bytes
        self._order.setdefault(class_, OrderedDict())[key] = None
        self.num_bytes += num_bytes

    def _use(self, key: BlockKey) -> None:
        self._order[self._blocks[key][0]].move_to_end(key)

    def _evict(self, num_bytes: int, class_: int | None = None) -> bool:
        """Free so many bytes for a block of this priority; False: only blocks of higher priority are left."""
        while self.num_bytes + num_bytes > self.budget_bytes:
            if not self._evict_one(class_):
                return False
        return True

    def _evict_one(self, class_: int | None) -> bool:
        worst = max((each for each, blocks in self._order.items() if blocks), default=None)
        if worst is None or (class_ is not None and worst < class_):
            return False
        self.num_evicted += self.remove(next(iter(self._order[worst])))
        return True


def header_of(key: BlockKey, content: Blocks) -> bytes:
    """Header of a block's file."""
    keys = _KEYS.pack(MAGIC, key.environment, key.block_hash, len(content))
    state = blake2b(keys, digest_size=_CHECKSUM_BYTES)
    state.update(content.data)
    return keys + state.digest()


def check_folder(folder: Path) -> None:
    """Check that a folder can be used.

    Raises:
        UsageError: it cannot be used; the message states why.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(_locked(folder / "lock"))
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"{folder}: KV blocks cannot be stored there: {error.strerror or error}")


class HostFolder(NamedTuple):
    """Folder in host memory that a server created for its workers."""

    folder: OwnedFolder
    usable_bytes: int
    """Bytes that KV may take there, based on the free space at the start."""

    @property
    def path(self) -> Path:
        return self.folder.path

    def remove(self) -> None:
        """Remove the folder and free its memory."""
        self.folder.remove()


def claim_host_folder(parent: Path = SHARED_MEMORY) -> HostFolder:
    """Create a folder in host memory, and remove those of servers that were killed.

    Raises:
        UsageError: it cannot be created.
    """
    import tempfile

    parent = parent if parent.is_dir() else Path(tempfile.gettempdir())
    try:
        folder = claim_folder(parent, _HOST_PREFIX)
        return HostFolder(folder, _usable_bytes(folder.path))
    except OSError as error:
        raise _unusable(parent, error) from error


def _usable_bytes(folder: Path) -> int:
    usage = shutil.disk_usage(folder)
    return int(usage.free * USABLE_SHARE) if usage.total else sys.maxsize  # Linux reports 0 if unlimited


def host_fault(parent: Path, budget_bytes: int, usable_bytes: int) -> str:
    """Warning about a budget that exceeds host memory; empty if it does not."""
    if budget_bytes <= usable_bytes:
        return ""
    return (
        f"{parent} has room for only {usable_bytes >> 20} of {budget_bytes >> 20} MiB of KV, so more sessions are"
        " recomputed; enlarge it (docker: --shm-size) or lower --host-kv-mb"
    )


def _locked(path: Path) -> int:
    """Lock a file and return its descriptor. Only one process can hold the lock."""
    try:
        return lock_file(path)
    except BlockingIOError:
        raise UsageError(
            f"{path.parent}: another process stores its KV blocks there; use a separate folder for each process"
        ) from None


def _folders(path: str | Path, length: int) -> list[os.DirEntry[str]]:
    """Folders whose names have this many hexadecimal digits."""
    found = [entry for entry in os.scandir(path) if len(entry.name) == length and entry.is_dir(follow_symlinks=False)]
    return [entry for entry in found if all(letter in "0123456789abcdef" for letter in entry.name)]


def _key(environment: str, name: str) -> BlockKey | None:
    stem, dot, suffix = name.partition(".")
    if len(stem) != 32 or dot + suffix != _SUFFIX:
        return None
    try:
        return BlockKey(bytes.fromhex(environment), bytes.fromhex(stem))
    except ValueError:
        return None


def _fault(key: BlockKey, header: bytes, content: Blocks) -> str:
    if len(header) != HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        return "is not a KV block of this version"
    if header[: _KEYS.size] != _KEYS.pack(MAGIC, key.environment, key.block_hash, len(content)):
        return "holds another block than its name states"
    return "" if header == header_of(key, content) else "does not match its checksum"


def pages(num_bytes: int) -> int:
    """Size on disk of a file with this many bytes, in whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _read_all(descriptor: int, content: memoryview) -> int:
    num_read = 0
    while num_read < len(content) and (count := os.readv(descriptor, [content[num_read:]])):
        num_read += count
    return num_read
