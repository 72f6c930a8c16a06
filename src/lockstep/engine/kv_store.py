"""KV store: stores blocks outside of the device, in shared memory and on disk, for all engines of a process.

Engines submit blocks to store and request chains to load. One thread reads and writes the files. It first reads the
chains that requests wait for, then does the other jobs in order, and copies blocks to disk when there is nothing else
to do. The store makes no scheduling decision: loaded blocks enter a scheduler as a command of its engine.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from lockstep.engine.kv_files import BlockKey
from lockstep.engine.kv_load import ChainLoad
from lockstep.engine.kv_records import SessionRecord, SessionRecords
from lockstep.engine.kv_tiers import KVStoreOptions, KVTierName, KVTiers
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks
from lockstep.system import SYSTEM, System

log = logging.getLogger(__name__)

JOIN_LIMIT_S = 1.0
"""Time limit for the block that is being read or written when the store is closed."""


_Job = Callable[[], None]


class KeptSession(msgspec.Struct, frozen=True, array_like=True):
    """Stored blocks of a session at one moment."""

    owner: str
    session_id: str
    num_blocks: int
    """Number of blocks at the start of its chain that are stored; these can be loaded."""
    num_on_host: int
    """Number of these blocks in host memory. Some may be on disk as well."""
    num_on_disk: int


class KVStore:
    """Tiers of blocks and the thread that uses them.

    Args:
        on_fault: called with a description of each block that does not match what was written or computed, and of each
            loss of records. Called by any thread; must not block.

    Raises:
        UsageError: a folder cannot be used, another process uses it, or no thread can be started.
    """

    def __init__(
        self,
        options: KVStoreOptions,
        on_fault: Callable[[str], None] = lambda text: None,
        system: System = SYSTEM,
    ) -> None:
        self.options = options
        self.system = system
        self._on_fault = on_fault
        self.tiers = KVTiers(options, on_fault, system)
        self._records = SessionRecords(self.tiers.slowest, self.options.max_records)
        self._jobs: OrderedDict[object, _Job] = OrderedDict()
        """Jobs in the order in which they are done. A job that is queued again moves to the end."""
        self._classes: dict[bytes, WeakKeyDictionary[object, int]] = {}
        """Priority of each engine, by environment."""
        self._unwritten: OrderedDict[str, list[BlockKey]] = OrderedDict()
        """Records that wait to be written, with the blocks that no session needs any more."""
        self.num_lost_records = 0
        self._saving_bytes = 0
        self._waiting_for_room: list[Callable[[], None]] = []
        self._loads: deque[ChainLoad] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._is_closing = False
        try:
            self._thread = system.start_thread(self._run, "lockstep-kv")
        except RuntimeError as error:
            self.tiers.close()  # so that another attempt finds the folders unlocked
            raise UsageError(f"KV cannot be stored outside of the device: {error}") from error

    # -- any thread -----------------------------------------------------------------------------------------------

    def find(self, environment: bytes, hashes: Sequence[bytes]) -> int:
        """Number of blocks at the start of a chain that are stored."""
        return sum(self.count_by_tier(environment, hashes).values())

    def has(self, environment: bytes, block_hash: bytes) -> bool:
        """True if one of the tiers has the block."""
        return BlockKey(environment, block_hash) in self.tiers

    def count_by_tier(self, environment: bytes, hashes: Sequence[bytes]) -> Counter[KVTierName]:
        """Number of stored blocks at the start of a chain, by the fastest tier that has each."""
        found: Counter[KVTierName] = Counter()
        for block_hash in hashes:
            tier = self.tiers.tier_of(BlockKey(environment, block_hash))
            if tier is None:
                break
            found[tier] += 1
        return found

    @property
    def can_save(self) -> bool:
        """True if more contents may wait to be written."""
        return self._saving_bytes < self.options.max_saving_bytes

    def call_when_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when more contents may wait to be written; at once if they may now."""
        with self._changed:
            if not self.can_save:
                if wake not in self._waiting_for_room:
                    self._waiting_for_room.append(wake)
                return
        wake()

    def register_engine(self, environment: bytes, engine: object, class_: int) -> None:
        """Register an engine and its priority. All stored blocks of an environment, including those of earlier
        processes, get the highest priority among its engines."""
        with self._changed:
            self._classes.setdefault(environment, WeakKeyDictionary())[engine] = class_
            self._put(("class", environment), partial(self.tiers.classify, environment, self.class_of(environment)))

    def class_of(self, environment: bytes) -> int:
        """Priority of an environment's stored blocks. The environment must have an engine."""
        with self._changed:
            return min(self._classes[environment].values())

    def save(
        self, environment: bytes, hashes: Sequence[bytes], content: Blocks, class_: int, wake: Callable[[], None]
    ) -> None:
        """Store blocks.

        Args:
            content: [len(hashes), bytes of a block]; must not be modified afterwards.
            class_: priority; blocks with larger numbers are evicted first.
            wake: called on the store's thread when they are written.
        """
        with self._changed:
            self._saving_bytes += content.nbytes
            keys = [BlockKey(environment, each) for each in hashes]
            self._put(object(), partial(self._save, keys, content, class_, wake))

    def load(
        self, environment: bytes, hashes: Sequence[bytes], sizes: Sequence[int], wake: Callable[[], None]
    ) -> ChainLoad:
        """Begin to read a chain, up to the first content that is not available.

        Args:
            sizes: size of each content in bytes.
        """
        load = ChainLoad(environment, hashes, sizes, wake, self.options.max_ahead_bytes)
        with self._changed:
            if self._is_closing:
                load.cancel()
            else:
                self._loads.append(load)
            self._changed.notify_all()
        return load

    def continue_loading(self) -> None:
        """Continue reading, after contents of a chain were taken."""
        with self._changed:
            self._changed.notify_all()

    def remember(self, record: SessionRecord) -> None:
        """Store a session's record, in place of its previous one."""
        with self._changed:
            for name, keys in self._records.put(record).items():
                self._queue_record(name, keys)

    def end(self, session_id: str, owner: str | None = None) -> None:
        """Remove a session, of one owner or of all, and the blocks that no other session needs."""
        with self._changed:
            for name, keys in self._records.end(session_id, owner).items():
                self._queue_record(name, keys)

    def resize(self, options: KVStoreOptions) -> None:
        """Apply the budgets of new options in the background, and open tiers that had none. Folders do not change."""
        self._put("size", partial(self._resize, options))

    def count_check(self, environment: bytes, block_hash: bytes, is_same: bool) -> None:
        """Count a block that was recomputed as a check. If it differs, all blocks of its environment are removed."""
        self.tiers.count_check(BlockKey(environment, block_hash), is_same)
        if is_same:
            return
        self.report_fault("a stored KV block differs from the computed one; all stored blocks of its model are removed")
        self._put(("drop", environment), partial(self.tiers.drop, environment))

    def is_needed(self, environment: bytes, block_hash: bytes) -> bool:
        """True if a session needs a block."""
        return self._records.needs(BlockKey(environment, block_hash))

    def records(self, environment: bytes) -> tuple[SessionRecord, ...]:
        """Sessions of an environment, least recently used first."""
        with self._changed:
            return self._records.of(environment)

    def num_unknown_sessions(self, environment: bytes) -> Counter[str]:
        """Number of sessions, by owner, that have records in other environments and none in this one."""
        with self._changed:
            return self._records.num_unknown_sessions(environment)

    def report_fault(self, fault: str) -> None:
        """Log a fault and report it to the store's creator."""
        log.warning("%s", fault)
        self._on_fault(fault)

    def kept(self, environment: bytes) -> tuple[KeptSession, ...]:
        """Sessions of an environment with their stored blocks, least recently used first."""
        return tuple(self._kept(record) for record in self.records(environment))

    def _kept(self, record: SessionRecord) -> KeptSession:
        counts: Counter[KVTierName] = Counter()
        num_blocks = 0
        for block_hash in record.hashes:
            holders = self.tiers.holders(BlockKey(record.environment, block_hash))
            if not holders:
                break
            num_blocks += 1
            counts.update(holders)
        return KeptSession(
            record.owner, record.session_id, num_blocks, counts[KVTierName.HOST], counts[KVTierName.DISK]
        )

    def flush(self, limit_s: float) -> bool:
        """Wait until everything is written, including to disk; False: the time limit was reached."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._jobs or self.tiers.num_pending_copies or self._is_working), limit_s
            )

    def close(self, limit_s: float = 0.0) -> None:
        """Write what is queued, within the time limit, and release the folders. Calling this again has no effect."""
        if self._is_closing:
            return
        if not self.flush(limit_s):
            log.warning("KV blocks were lost: %d were not on disk after %g s", self.tiers.num_pending_copies, limit_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(JOIN_LIMIT_S)
        for load in self._loads:
            load.cancel()
            load.wake()
        if self._thread.is_alive():
            log.warning("the KV store's folders do not respond; they stay locked until this process ends")
        else:
            self.tiers.close()

    def _put(self, key: object, job: _Job) -> None:
        with self._changed:
            self._jobs.pop(key, None)
            self._jobs[key] = job
            self._changed.notify_all()

    def _queue_record(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Queue the write or removal of a session's record, and the removal of blocks that no session needs."""
        self._unwritten[name] = [*self._unwritten.pop(name, ()), *keys]
        self._put(name, partial(self._write, name))
        most = self.options.max_unwritten_records
        if len(self._unwritten) <= most:
            return
        oldest, _ = self._unwritten.popitem(last=False)
        self._jobs.pop(oldest, None)
        if self.num_lost_records % most == 0:
            self.report_fault(f"{most} session records wait to be written; older ones are dropped (slow disk)")
        self.num_lost_records += 1

    # -- the store's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._next_load() or self._jobs or self.tiers.num_pending_copies
                )
                if self._is_closing:
                    return
                load = self._next_load()
                job = self._jobs.popitem(last=False)[1] if load is None and self._jobs else None
                self._is_working = True
            try:
                if load is not None:
                    self._read_next(load)
                elif job is not None:
                    job()
                else:
                    self.tiers.copy_next()
            except Exception:
                log.exception("an error in the KV store; the block is computed again")
                if load is not None:
                    load.is_over = True
                    load.wake()
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def _next_load(self) -> ChainLoad | None:
        while self._loads and self._loads[0].is_over:
            self._loads.popleft()
        return next((load for load in self._loads if load.needs_more), None)

    def _read_next(self, load: ChainLoad) -> None:
        key = BlockKey(load.environment, load.hashes[load.num_read])
        found = self.tiers.read(key, load.sizes[load.num_read])
        if found is None:
            load.is_over = True
        else:
            load.put(found[1])
        load.wake()
        if found is not None and found[0] is KVTierName.DISK:
            self.tiers.promote(key, found[1])

    def _save(self, keys: Sequence[BlockKey], content: Blocks, class_: int, wake: Callable[[], None]) -> None:
        try:
            for key, each in zip(keys, content, strict=True):
                self.tiers.save(key, each, class_)
        finally:
            with self._changed:  # waiting engines may have room now
                self._saving_bytes -= content.nbytes
                wakes = [wake]
                if self.can_save:
                    wakes += self._waiting_for_room
                    self._waiting_for_room = []
            for each_wake in wakes:
                each_wake()

    def _resize(self, options: KVStoreOptions) -> None:
        self.tiers.resize(options)
        if self.tiers.slowest is self._records.tier:
            return
        records = SessionRecords(self.tiers.slowest, self.options.max_records)
        with self._changed:
            self._records, others = records, self._records
            for record in others.all():
                self.remember(record)
        others.discard()

    def _write(self, name: str) -> None:
        with self._changed:
            keys = self._unwritten.pop(name, ())  # none if a later job has already written it
        self._records.write(name)
        for key in keys:
            with self._changed:  # locked, since a session may begin to need it now
                if not self._records.needs(key):
                    self.tiers.remove([key])
