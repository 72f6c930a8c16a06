"""Session records: store which blocks each session needs, and so which blocks of the store are needed at all.

Each session has a file in the slowest tier. The file name is a digest of owner, session and environment, and its size
counts against that tier's budget. Only the store's thread writes the files, later than the records in memory change.
The other methods are called under the store's lock.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec

from lockstep.engine.kv_files import BlockFiles, BlockKey, pages

log = logging.getLogger(__name__)

MAX_RECORDS = 4096
"""Maximum number of session records. Beyond it, the least recently used one is removed."""
_FOLDER = "sessions"


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a session needs for its next request."""

    owner: str
    session_id: str
    environment: bytes
    hashes: tuple[bytes, ...]
    used_at: float
    """Unix time at which its last request ended."""
    others: tuple[bytes, ...] = ()
    """Keys of windows and states that it may need; see `lockstep.engine.kv_transfer`."""

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """All contents that the session needs."""
        return tuple([BlockKey(self.environment, each) for each in (*self.hashes, *self.others)])


class SessionRecords:
    """Records of sessions by file name, and the blocks that any of them needs.

    Args:
        tier: tier of the files; None: records are not written.
        max_records: beyond it, the least recently used one is removed.
    """

    def __init__(self, tier: BlockFiles | None, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self.tier = tier
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()
        """Records by file name, least recently used first."""
        self._num_references: Counter[BlockKey] = Counter()
        self._file_bytes: dict[str, int] = {}
        """Sizes of the existing files, in whole pages."""
        if tier is not None:
            self._read(tier)

    def needs(self, key: BlockKey) -> bool:
        """True if a session needs a block. Any thread may call this without the lock."""
        return key in self._num_references

    def of(self, environment: bytes) -> tuple[SessionRecord, ...]:
        """Sessions of an environment, least recently used first."""
        return tuple(record for record in self._records.values() if record.environment == environment)

    def num_unknown_sessions(self, environment: bytes) -> Counter[str]:
        """Number of sessions, by owner, that have records in other environments and none in this one."""
        known = {(record.owner, record.session_id) for record in self.of(environment)}
        return Counter(owner for owner, _ in {(r.owner, r.session_id) for r in self._records.values()} - known)

    def discard(self) -> None:
        """Remove all files and their records."""
        for name in tuple(self._file_bytes):
            self._records.pop(name, None)
            self.write(name)

    def all(self) -> tuple[SessionRecord, ...]:
        """All sessions, least recently used first."""
        return tuple(self._records.values())

    def put(self, record: SessionRecord) -> dict[str, tuple[BlockKey, ...]]:
        """Store a session's record in place of its previous one. Returns the files to be written, with the blocks that
        no session needs any more."""
        name = _name_of(record)
        before = self._remove(name)
        self._count(name, record)
        changed = {name: tuple(key for key in before if not self.needs(key))}
        if len(self._records) > self._max_records:
            oldest = next(iter(self._records))
            changed[oldest] = self._remove(oldest)
        return changed

    def end(self, session_id: str, owner: str | None) -> dict[str, tuple[BlockKey, ...]]:
        """Remove a session. Returns the files to be written, with the blocks that no other session needs."""
        names = [
            name
            for name, record in self._records.items()
            if record.session_id == session_id and owner in (None, record.owner)
        ]
        return {name: self._remove(name) for name in names}

    def write(self, name: str) -> None:
        """Write or remove a session's file. Called on the store's thread, without the lock."""
        if self.tier is None:
            return
        record, path = self._records.get(name), self.tier.folder / _FOLDER / name
        before = self._file_bytes.get(name, 0)
        try:
            if record is None:
                path.unlink(missing_ok=True)
                self._charge(self.tier, name, 0)
            else:
                data = msgspec.msgpack.encode(record)
                self._charge(self.tier, name, len(data))
                self.tier.system.write_file(path, data)
        except OSError as error:
            self._charge(self.tier, name, before)  # the file has not changed
            self.tier.refused(error)

    def _read(self, tier: BlockFiles) -> None:
        """Read the records of an earlier process. Files that are not records, or exceed the limit, are removed."""
        folder = tier.folder / _FOLDER
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
        except OSError as error:
            log.warning("%s: session records cannot be read: %s", folder, error.strerror)
            return
        for state, path in sorted(found, key=lambda each: (-each[0].st_mtime_ns, each[1].name)):
            record = _record_in(path) if len(self._records) < self._max_records else None
            if record is None:
                with suppress(OSError):
                    path.unlink()
            else:
                self._count(path.name, record)
                self._records.move_to_end(path.name, last=False)
                self._charge(tier, path.name, state.st_size)

    def _count(self, name: str, record: SessionRecord) -> None:
        self._records[name] = record
        self._num_references.update(record.keys)

    def _remove(self, name: str) -> tuple[BlockKey, ...]:
        """Remove a session. Returns the blocks that no other session needs."""
        record = self._records.pop(name, None)
        if record is None:
            return ()
        keys = record.keys
        self._num_references.subtract(keys)
        alone = tuple(key for key in keys if not self._num_references[key])
        for key in alone:
            del self._num_references[key]
        return alone

    def _charge(self, tier: BlockFiles, name: str, num_bytes: int) -> None:
        """Count a file against the budget."""
        tier.charge(pages(num_bytes) - self._file_bytes.pop(name, 0))
        if num_bytes:
            self._file_bytes[name] = pages(num_bytes)


def _record_in(path: Path) -> SessionRecord | None:
    """Read the record in a file; None: the file is not a valid record."""
    try:
        record = msgspec.msgpack.decode(path.read_bytes(), type=SessionRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if path.name == _name_of(record) else None


def _name_of(record: SessionRecord) -> str:
    """Name of a session's file. It is a digest, since ids may contain any character."""
    state = hashlib.blake2b(record.environment, digest_size=16)
    for text in (record.owner, record.session_id):
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
