"""Records of the blocks that sessions will come back for: what of the store's content is wanted, and by whom.

A file a session in the slowest tier, named by a digest of owner, session and environment, and counted against that
tier's budget. Files are written behind what is in memory, and by the store's thread alone; the rest is under its lock.
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
"""Sessions that are remembered; beyond, the least recently used is forgotten."""
_FOLDER = "sessions"


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that a session will come back for."""

    owner: str
    session_id: str
    environment: bytes
    hashes: tuple[bytes, ...]
    used_at: float
    """Unix time of its last request's end."""


class SessionRecords:
    """Sessions by the name of their file, and the blocks that any of them wants.

    Args:
        tier: where the files are; None: nowhere.
    """

    def __init__(self, tier: BlockFiles | None) -> None:
        self.tier = tier
        self._records: OrderedDict[str, SessionRecord] = OrderedDict()
        """Least recently used first."""
        self._num_references: Counter[BlockKey] = Counter()
        self._file_bytes: dict[str, int] = {}
        """Of the files that are there, in whole pages."""
        if tier is not None:
            self._read(tier)

    def wants(self, key: BlockKey) -> bool:
        """True if a session will come back for a block; for any thread, without the lock."""
        return key in self._num_references

    def of(self, environment: bytes) -> tuple[SessionRecord, ...]:
        """Sessions of an environment, least recently used first."""
        return tuple(record for record in self._records.values() if record.environment == environment)

    def strangers(self, environment: bytes) -> Counter[str]:
        """Number of sessions, by owner, that other environments know and this one does not."""
        known = {(record.owner, record.session_id) for record in self.of(environment)}
        return Counter(owner for owner, _ in {(r.owner, r.session_id) for r in self._records.values()} - known)

    def discard(self) -> None:
        """Remove all files; nothing is remembered here any more."""
        for name in tuple(self._file_bytes):
            self._records.pop(name, None)
            self.write(name)

    def all(self) -> tuple[SessionRecord, ...]:
        """All sessions, least recently used first."""
        return tuple(self._records.values())

    def put(self, record: SessionRecord) -> dict[str, tuple[BlockKey, ...]]:
        """Remember a session in place of what it came back for before; returns the files to be written, with the blocks
        that no session will come back for."""
        name = _name_of(record)
        before = self._remove(name)
        self._count(name, record)
        changed = {name: tuple(key for key in before if not self.wants(key))}
        if len(self._records) > MAX_RECORDS:
            oldest = next(iter(self._records))
            changed[oldest] = self._remove(oldest)
        return changed

    def end(self, session_id: str, owner: str | None) -> dict[str, tuple[BlockKey, ...]]:
        """Forget a session; returns the files to be written, with the blocks that no other one will come back for."""
        names = [
            name
            for name, record in self._records.items()
            if record.session_id == session_id and owner in (None, record.owner)
        ]
        return {name: self._remove(name) for name in names}

    def write(self, name: str) -> None:
        """Bring a session's file up to date; on the store's thread, without the lock."""
        if self.tier is None:
            return
        record, path = self._records.get(name), self.tier.folder / _FOLDER / name
        partial, before = path.with_suffix(".part"), self._file_bytes.get(name, 0)
        try:
            if record is None:
                path.unlink(missing_ok=True)
                self._charge(self.tier, name, 0)
            else:
                data = msgspec.msgpack.encode(record)
                self._charge(self.tier, name, len(data))
                partial.write_bytes(data)
                partial.rename(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._charge(self.tier, name, before)  # the file is as it was
            self.tier.refused(error)

    def _read(self, tier: BlockFiles) -> None:
        """Take over what an earlier process left; whatever is no record, or too much, is removed."""
        folder = tier.folder / _FOLDER
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
        except OSError as error:
            log.warning("%s: what sessions will come back for is not known: %s", folder, error.strerror)
            return
        for state, path in sorted(found, key=lambda each: (-each[0].st_mtime_ns, each[1].name)):
            record = _record_in(path) if len(self._records) < MAX_RECORDS else None
            if record is None:
                with suppress(OSError):
                    path.unlink()
            else:
                self._count(path.name, record)
                self._records.move_to_end(path.name, last=False)
                self._charge(tier, path.name, state.st_size)

    def _count(self, name: str, record: SessionRecord) -> None:
        self._records[name] = record
        self._num_references.update(BlockKey(record.environment, each) for each in record.hashes)

    def _remove(self, name: str) -> tuple[BlockKey, ...]:
        """Forget a session; returns the blocks that no other one will come back for."""
        record = self._records.pop(name, None)
        if record is None:
            return ()
        keys = [BlockKey(record.environment, each) for each in record.hashes]
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
    """Record in a file; None: it is not one that was written there."""
    try:
        record = msgspec.msgpack.decode(path.read_bytes(), type=SessionRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if path.name == _name_of(record) else None


def _name_of(record: SessionRecord) -> str:
    """Name of a session's file; the ids may be anything."""
    state = hashlib.blake2b(record.environment, digest_size=16)
    for text in (record.owner, record.session_id):
        data = text.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()
