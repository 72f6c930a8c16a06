"""KV store: blocks that are kept outside of the device, in shared memory and on disk, for all engines of a process.

Engines say what to keep and what they want back; one thread reads and writes the files. Host memory comes first, and
what is in it is copied to disk when nothing else is to be done, so that either tier may lose any block at any time.
Nothing here decides: what comes back enters a scheduler as a command of its engine.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.engine.kv_files import BlockError, BlockFiles, BlockKey
from lockstep.engine.kv_records import SessionRecord, SessionRecords
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks

log = logging.getLogger(__name__)

MAX_SAVING_BYTES = 64 << 20
"""Contents that wait to be written; engines keep the rest on the device until there is room."""
MAX_AHEAD_BYTES = 32 << 20
"""Contents that were read for one chain and not taken yet."""
MAX_BEHIND = 1 << 16
"""Blocks that wait to be copied to disk; beyond, the oldest are not."""
JOIN_LIMIT_S = 1.0
"""For the block that is being read or written when the store is closed."""


class Place(StrEnum):
    """Tier of a block outside of the device."""

    HOST = "host"
    DISK = "disk"


class KVStoreOptions(msgspec.Struct, frozen=True):
    """Options of a store; a tier without a folder is not there."""

    host_dir: str = ""
    host_bytes: int = 0
    disk_dir: str = ""
    disk_bytes: int = 0
    check_share: float = 0.0
    """Part of the chains that come back whose first block is computed again and compared."""


class TierStats(NamedTuple):
    """Figures of one tier."""

    num_blocks: int
    num_bytes: int
    budget_bytes: int
    num_evicted: int
    num_loaded: int
    """Blocks that came back from it."""
    num_rejected: int
    """Blocks that were not what had been written, or what is computed."""
    num_checked: int
    """Blocks that came back and were computed again."""


class ChainLoad:
    """Contents of a chain on their way back: read by the store's thread, taken by one engine's."""

    def __init__(self, environment: bytes, hashes: Sequence[bytes], num_bytes: int, wake: Callable[[], None]) -> None:
        self.environment = environment
        self.hashes = tuple(hashes)
        self.num_bytes = num_bytes
        """Of one block."""
        self.wake = wake
        """Called by the store's thread when there is something to take, or nothing more will come."""
        self.num_read = 0
        self.num_taken = 0
        self.is_over = False
        """Nothing more will be read."""
        self._ready: deque[Blocks] = deque()
        self._lock = threading.Lock()
        """So that nothing is added to what was cancelled meanwhile: it would be taken for the block that is missing."""

    @property
    def is_ready(self) -> bool:
        """True if there is something to take, or nothing more will come."""
        return bool(self._ready) or self.is_over

    @property
    def is_done(self) -> bool:
        """True if all that came was taken, and nothing more will come."""
        return self.is_over and not self._ready

    @property
    def wants_more(self) -> bool:
        """True if the next block should be read."""
        return not self.is_over and (self.num_read - self.num_taken) * self.num_bytes < MAX_AHEAD_BYTES

    def put(self, content: Blocks) -> None:
        """Add the next block's content, unless nobody wants it any more."""
        with self._lock:
            if not self.is_over:
                self._ready.append(content)
                self.num_read += 1
                self.is_over = self.num_read == len(self.hashes)

    def take(self, most_bytes: int) -> list[Blocks]:
        """Contents of the next blocks, at least one where there is any."""
        with self._lock:
            count = min(len(self._ready), max(1, most_bytes // self.num_bytes))
            self.num_taken += count
            return [self._ready.popleft() for _ in range(count)]

    def cancel(self) -> None:
        """Want nothing more of it."""
        with self._lock:
            self.is_over = True
            self._ready.clear()


class _Save(NamedTuple):
    environment: bytes
    hashes: tuple[bytes, ...]
    content: Blocks
    class_: int
    wake: Callable[[], None]


class _Write(NamedTuple):
    """A session's record is to be written as it is now, or removed, and blocks that nobody will come back for."""

    name: str
    keys: tuple[BlockKey, ...] = ()


class _Resize(NamedTuple):
    """Blocks beyond the budgets are to be removed."""


class _Adopt(NamedTuple):
    """The blocks of an environment have a class from now on."""

    environment: bytes
    class_: int


class _Drop(NamedTuple):
    """All blocks of an environment are to be removed."""

    environment: bytes


_Job = _Save | _Write | _Resize | _Adopt | _Drop


class KVStore:
    """Tiers of blocks and the thread that has them.

    Args:
        on_fault: called on that thread with a sentence on each block that was not what had been written.

    Raises:
        UsageError: a folder cannot be used, or another process uses it.
    """

    def __init__(self, options: KVStoreOptions, on_fault: Callable[[str], None] = lambda text: None) -> None:
        self.options = options
        self._on_fault = on_fault
        self._tiers: dict[Place, BlockFiles] = {}
        for place, folder, num_bytes in (
            (Place.HOST, options.host_dir, options.host_bytes),
            (Place.DISK, options.disk_dir, options.disk_bytes),
        ):
            if folder and num_bytes:
                try:
                    self._tiers[place] = BlockFiles(Path(folder), num_bytes)
                except UsageError:
                    self._close_tiers()  # or nobody could have the other folder, this process included
                    raise
        lasting = [self._tiers[place] for place in (Place.DISK, Place.HOST) if place in self._tiers]
        self._records = SessionRecords(lasting[0] if lasting else None)
        self._jobs: deque[_Job] = deque()
        self._saving_bytes = 0
        self._waiting_for_room: list[Callable[[], None]] = []
        self._loads: deque[ChainLoad] = deque()
        self._behind: OrderedDict[BlockKey, tuple[int, int]] = OrderedDict()
        """Bytes and class of blocks that are not on disk yet."""
        self.num_loaded: Counter[Place] = Counter()
        self.num_rejected: Counter[Place] = Counter()
        self.num_checked: Counter[Place] = Counter()
        self._changed = threading.Condition()
        self._is_working = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lockstep-kv", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def find(self, environment: bytes, hashes: Sequence[bytes]) -> int:
        """Number of the first blocks of a chain that it has."""
        for place, block_hash in enumerate(hashes):
            if not self.has(environment, block_hash):
                return place
        return len(hashes)

    def has(self, environment: bytes, block_hash: bytes) -> bool:
        """True if one of the tiers has a block."""
        key = BlockKey(environment, block_hash)
        return any(key in tier for tier in self._tiers.values())

    def places(self, environment: bytes, hashes: Sequence[bytes]) -> Counter[Place]:
        """Number of the first blocks of a chain by the fastest tier that has them."""
        found: Counter[Place] = Counter()
        for block_hash in hashes:
            key = BlockKey(environment, block_hash)
            place = next((place for place, tier in self._tiers.items() if key in tier), None)
            if place is None:
                break
            found[place] += 1
        return found

    @property
    def can_save(self) -> bool:
        """True if more contents may wait to be written."""
        return self._saving_bytes < MAX_SAVING_BYTES

    def when_it_can_save(self, wake: Callable[[], None]) -> None:
        """Call once when more contents may wait to be written, whoever wrote the others; at once if so now."""
        with self._changed:
            if not self.can_save:
                if wake not in self._waiting_for_room:
                    self._waiting_for_room.append(wake)
                return
        wake()

    def adopt(self, environment: bytes, class_: int) -> None:
        """Say the priority of what an environment has in the store, from now on and from earlier processes."""
        with self._changed:
            self._put(_Adopt(environment, class_))

    def save(
        self, environment: bytes, hashes: Sequence[bytes], content: Blocks, class_: int, wake: Callable[[], None]
    ) -> None:
        """Keep blocks.

        Args:
            content: [len(hashes), bytes of a block]; not to be changed any more.
            class_: priority; blocks of larger numbers are given up first.
            wake: called on the store's thread when they are written.
        """
        with self._changed:
            self._saving_bytes += content.nbytes
            self._put(_Save(environment, tuple(hashes), content, class_, wake))

    def load(self, environment: bytes, hashes: Sequence[bytes], num_bytes: int, wake: Callable[[], None]) -> ChainLoad:
        """Begin to read a chain, up to the first block that cannot be had."""
        load = ChainLoad(environment, hashes, num_bytes, wake)
        with self._changed:
            if self._is_closing:
                load.cancel()
            else:
                self._loads.append(load)
            self._changed.notify_all()
        return load

    def taken(self) -> None:
        """Read on, after contents of a chain were taken."""
        with self._changed:
            self._changed.notify_all()

    def remember(self, record: SessionRecord) -> None:
        """Remember what a session will come back for, in place of what it came back for before."""
        with self._changed:
            for name in self._records.put(record):
                self._put(_Write(name))

    def end(self, session_id: str, owner: str | None = None) -> None:
        """Forget a session, of one owner or of all, and remove the blocks that no other session will come back for."""
        with self._changed:
            for name, keys in self._records.end(session_id, owner).items():
                self._put(_Write(name, keys))

    def resize(self, options: KVStoreOptions) -> None:
        """Take over the budgets of options; folders stay as they are."""
        for place, num_bytes in ((Place.HOST, options.host_bytes), (Place.DISK, options.disk_bytes)):
            if place in self._tiers:
                self._tiers[place].budget_bytes = num_bytes
        with self._changed:
            self._put(_Resize())

    def checked(self, environment: bytes, block_hash: bytes, is_same: bool) -> None:
        """Count a block that was computed again; where it differs, nothing of its environment is trusted any more."""
        key = BlockKey(environment, block_hash)
        place = next((place for place, tier in self._tiers.items() if key in tier), next(iter(self._tiers)))
        self.num_checked[place] += 1
        if is_same:
            return
        self.num_rejected[place] += 1
        text = "a KV block that came back is not what is computed; all that was kept of its model is removed"
        log.error("%s", text)
        self._on_fault(text)
        with self._changed:
            self._put(_Drop(environment))

    def is_wanted(self, environment: bytes, block_hash: bytes) -> bool:
        """True if a session will come back for a block."""
        return self._records.wants(BlockKey(environment, block_hash))

    def records(self, environment: bytes) -> tuple[SessionRecord, ...]:
        """Sessions of an environment, least recently used first."""
        with self._changed:
            return self._records.of(environment)

    def stats(self) -> dict[Place, TierStats]:
        """Figures of each tier."""
        return {
            place: TierStats(
                len(tier),
                tier.num_bytes,
                tier.budget_bytes,
                tier.num_evicted,
                self.num_loaded[place],
                self.num_rejected[place],
                self.num_checked[place],
            )
            for place, tier in self._tiers.items()
        }

    def flush(self, limit_s: float) -> bool:
        """Wait until everything is written, disk included; False: time was up."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs or self._behind or self._is_working), limit_s)

    def close(self, limit_s: float = 0.0) -> None:
        """Write what is to be written, as far as the time allows, and give the folders free; once."""
        if self._is_closing:
            return
        if not self.flush(limit_s):
            log.warning("KV blocks are lost: %d were not on disk after %g s", len(self._behind), limit_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(JOIN_LIMIT_S)
        for load in self._loads:
            load.cancel()
            load.wake()
        if self._thread.is_alive():
            log.warning("the KV store's folders do not answer; they are free when this process has ended")
        else:
            self._close_tiers()

    def _close_tiers(self) -> None:
        for tier in self._tiers.values():
            tier.close()

    def _put(self, job: _Job) -> None:
        self._jobs.append(job)
        self._changed.notify_all()

    # -- the store's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._next_load() or self._jobs or self._behind)
                if self._is_closing:
                    return
                load = self._next_load()
                job = self._jobs.popleft() if load is None and self._jobs else None
                self._is_working = True
            try:
                if load is not None:
                    self._read_next(load)
                elif job is not None:
                    self._do(job)
                else:
                    self._copy_behind()
            except Exception:
                log.exception("a defect in the KV store; the block is computed again")
                if load is not None:
                    load.is_over = True
                    load.wake()
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _next_load(self) -> ChainLoad | None:
        while self._loads and self._loads[0].is_over:
            self._loads.popleft()
        return next((load for load in self._loads if load.wants_more), None)

    def _read_next(self, load: ChainLoad) -> None:
        key = BlockKey(load.environment, load.hashes[load.num_read])
        content = np.empty(load.num_bytes, np.uint8)
        place = next((place for place in self._tiers if self._read(place, key, content)), None)
        if place is None:
            load.is_over = True
        else:
            load.put(content)
            self.num_loaded[place] += 1
        load.wake()
        if place is Place.DISK and Place.HOST in self._tiers:
            self._tiers[Place.HOST].write(key, content, self._tiers[Place.DISK].class_of(key))

    def _read(self, place: Place, key: BlockKey, content: Blocks) -> bool:
        try:
            return self._tiers[place].read(key, content)
        except BlockError as error:
            self.num_rejected[place] += 1
            log.warning("%s; it is computed again", error)
            self._on_fault(str(error))
            return False

    def _do(self, job: _Job) -> None:
        match job:
            case _Save():
                try:
                    for block_hash, content in zip(job.hashes, job.content, strict=True):
                        self._save(BlockKey(job.environment, block_hash), content, job.class_)
                finally:
                    self._saved(job)
            case _Resize():
                for tier in self._tiers.values():
                    tier.shrink()
            case _Adopt(environment, class_):
                for tier in self._tiers.values():
                    tier.classify(environment, class_)
            case _Drop(environment):
                for tier in self._tiers.values():
                    for key in tier:
                        if key.environment == environment:
                            self._behind.pop(key, None)
                            tier.remove(key)
            case _Write(name, keys):
                self._records.write(name)
                for key in keys:
                    self._drop_unwanted(key)

    def _saved(self, job: _Save) -> None:
        """Make room for the next contents, and tell who waits for it."""
        with self._changed:
            self._saving_bytes -= job.content.nbytes
            wakes = [job.wake]
            if self.can_save:
                wakes += self._waiting_for_room
                self._waiting_for_room = []
        for wake in wakes:
            wake()

    def _drop_unwanted(self, key: BlockKey) -> None:
        with self._changed:  # or a session that begins to want it now would believe that it is kept
            if not self._records.wants(key):
                self._behind.pop(key, None)
                for tier in self._tiers.values():
                    tier.remove(key)

    def _save(self, key: BlockKey, content: Blocks, class_: int) -> None:
        host, disk = self._tiers.get(Place.HOST), self._tiers.get(Place.DISK)
        is_on_host = host is not None and host.write(key, content, class_)
        if disk is None or key in disk:
            return
        if not is_on_host:
            disk.write(key, content, class_)
            return
        self._behind[key] = len(content), class_
        if len(self._behind) > MAX_BEHIND:
            self._behind.popitem(last=False)

    def _copy_behind(self) -> None:
        """Copy the block that has waited longest from host memory to disk."""
        key, (num_bytes, class_) = self._behind.popitem(last=False)
        content = np.empty(num_bytes, np.uint8)
        if self._read(Place.HOST, key, content):
            self._tiers[Place.DISK].write(key, content, class_)
