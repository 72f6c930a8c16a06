"""KV store: blocks that are kept outside of the device, in shared memory and on disk, for all engines of a process.

Engines say what to keep and what they want back; one thread reads and writes the files. It reads first what somebody
waits for, then obeys in the order in which it was told, and copies to disk when nothing else is to be done. Nothing
here decides: what comes back enters a scheduler as a command of its engine.
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
from lockstep.executors.base import Blocks

log = logging.getLogger(__name__)

MAX_SAVING_BYTES = 64 << 20
"""Contents that wait to be written; engines keep the rest on the device until there is room."""
MAX_NOTES = 4096
"""Sessions whose records wait to be written; beyond, what the oldest will come back for is not noted."""
JOIN_LIMIT_S = 1.0
"""For the block that is being read or written when the store is closed."""


_Job = Callable[[], None]


class KeptSession(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a session that the tiers have at one moment."""

    owner: str
    session_id: str
    num_blocks: int
    """First blocks of its chain that any of them has: those come back."""
    num_on_host: int
    """Of these; some may be on disk as well."""
    num_on_disk: int


class KVStore:
    """Tiers of blocks and the thread that has them.

    Args:
        on_fault: called with a sentence on each block that was not what had been written or is computed, and on records
            that are given up; by any thread, and must not block.

    Raises:
        UsageError: a folder cannot be used, or another process uses it.
    """

    def __init__(self, options: KVStoreOptions, on_fault: Callable[[str], None] = lambda text: None) -> None:
        self.options = options
        self._on_fault = on_fault
        self.tiers = KVTiers(options, on_fault)
        self._records = SessionRecords(self.tiers.lasting)
        self._jobs: OrderedDict[object, _Job] = OrderedDict()
        """In the order in which they are done; what is to be done again takes its place at the end."""
        self._classes: dict[bytes, WeakKeyDictionary[object, int]] = {}
        """By environment: the class of each of its engines."""
        self._unnoted: OrderedDict[str, list[BlockKey]] = OrderedDict()
        """Records that wait to be written, with blocks that no session may come back for."""
        self.num_lost_notes = 0
        self._saving_bytes = 0
        self._waiting_for_room: list[Callable[[], None]] = []
        self._loads: deque[ChainLoad] = deque()
        self._changed = threading.Condition()
        self._is_working = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="lockstep-kv", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def find(self, environment: bytes, hashes: Sequence[bytes]) -> int:
        """Number of the first blocks of a chain that it has."""
        return sum(self.places(environment, hashes).values())

    def has(self, environment: bytes, block_hash: bytes) -> bool:
        """True if one of the tiers has a block."""
        return BlockKey(environment, block_hash) in self.tiers

    def places(self, environment: bytes, hashes: Sequence[bytes]) -> Counter[KVTierName]:
        """Number of the first blocks of a chain by the fastest tier that has them."""
        found: Counter[KVTierName] = Counter()
        for block_hash in hashes:
            place = self.tiers.place_of(BlockKey(environment, block_hash))
            if place is None:
                break
            found[place] += 1
        return found

    @property
    def can_save(self) -> bool:
        """True if more contents may wait to be written."""
        return self._saving_bytes < MAX_SAVING_BYTES

    def when_it_can_save(self, wake: Callable[[], None]) -> None:
        """Call once when more contents may wait to be written; at once if so now."""
        with self._changed:
            if not self.can_save:
                if wake not in self._waiting_for_room:
                    self._waiting_for_room.append(wake)
                return
        wake()

    def adopt(self, environment: bytes, engine: object, class_: int) -> None:
        """Say an engine's priority: the best among an environment's engines is that of all that it has in the store,
        from now on and from earlier processes."""
        with self._changed:
            self._classes.setdefault(environment, WeakKeyDictionary())[engine] = class_
            self._put(("class", environment), partial(self.tiers.classify, environment, self.class_of(environment)))

    def class_of(self, environment: bytes) -> int:
        """Priority of what an environment has in the store, while it has an engine."""
        with self._changed:
            return min(self._classes[environment].values())

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
            keys = [BlockKey(environment, each) for each in hashes]
            self._put(object(), partial(self._save, keys, content, class_, wake))

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
            for name, keys in self._records.put(record).items():
                self._note(name, keys)

    def end(self, session_id: str, owner: str | None = None) -> None:
        """Forget a session, of one owner or of all, and remove the blocks that no other session will come back for."""
        with self._changed:
            for name, keys in self._records.end(session_id, owner).items():
                self._note(name, keys)

    def resize(self, options: KVStoreOptions) -> None:
        """Take over the budgets of options, soon, and open the tiers that had none; folders stay as they are."""
        self._put("size", partial(self._resize, options))

    def checked(self, environment: bytes, block_hash: bytes, is_same: bool) -> None:
        """Count a block that was computed again; where it differs, nothing of its environment is trusted any more."""
        self.tiers.checked(BlockKey(environment, block_hash), is_same)
        if is_same:
            return
        self.tell("a KV block that came back is not what is computed; all that was kept of its model is removed")
        self._put(("drop", environment), partial(self.tiers.drop, environment))

    def is_wanted(self, environment: bytes, block_hash: bytes) -> bool:
        """True if a session will come back for a block."""
        return self._records.wants(BlockKey(environment, block_hash))

    def records(self, environment: bytes) -> tuple[SessionRecord, ...]:
        """Sessions of an environment, least recently used first."""
        with self._changed:
            return self._records.of(environment)

    def strangers(self, environment: bytes) -> Counter[str]:
        """Number of sessions, by owner, that other environments know and this one does not."""
        with self._changed:
            return self._records.strangers(environment)

    def tell(self, fault: str) -> None:
        """Log a fault, and report it to the creator of the store."""
        log.warning("%s", fault)
        self._on_fault(fault)

    def kept(self, environment: bytes) -> tuple[KeptSession, ...]:
        """Sessions of an environment with what is there of each now, least recently used first."""
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
        """Wait until everything is written, disk included; False: time was up."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._jobs or self.tiers.num_behind or self._is_working), limit_s
            )

    def close(self, limit_s: float = 0.0) -> None:
        """Write what is to be written, as far as the time allows, and give the folders free; once."""
        if self._is_closing:
            return
        if not self.flush(limit_s):
            log.warning("KV blocks are lost: %d were not on disk after %g s", self.tiers.num_behind, limit_s)
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
            self.tiers.close()

    def _put(self, key: object, job: _Job) -> None:
        with self._changed:
            self._jobs.pop(key, None)
            self._jobs[key] = job
            self._changed.notify_all()

    def _note(self, name: str, keys: Sequence[BlockKey]) -> None:
        """Have a session's record written as it is then, or removed, and blocks that no session will come back for."""
        self._unnoted[name] = [*self._unnoted.pop(name, ()), *keys]
        self._put(name, partial(self._write, name))
        if len(self._unnoted) <= MAX_NOTES:
            return
        oldest, _ = self._unnoted.popitem(last=False)
        self._jobs.pop(oldest, None)
        if self.num_lost_notes % MAX_NOTES == 0:
            self.tell(f"{MAX_NOTES} sessions wait to be noted and older ones are not: the folder does not keep up")
        self.num_lost_notes += 1

    # -- the store's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closing or self._next_load() or self._jobs or self.tiers.num_behind
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
                    self.tiers.copy_behind()
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
        found = self.tiers.read(key, load.num_bytes)
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
            with self._changed:  # who waits for room may have it now
                self._saving_bytes -= content.nbytes
                wakes = [wake]
                if self.can_save:
                    wakes += self._waiting_for_room
                    self._waiting_for_room = []
            for each_wake in wakes:
                each_wake()

    def _resize(self, options: KVStoreOptions) -> None:
        self.tiers.resize(options)
        if self.tiers.lasting is self._records.tier:
            return
        records = SessionRecords(self.tiers.lasting)
        with self._changed:
            self._records, others = records, self._records
            for record in others.all():
                self.remember(record)
        others.discard()

    def _write(self, name: str) -> None:
        with self._changed:
            keys = self._unnoted.pop(name, ())  # none where it was noted once more meanwhile, and is written
        self._records.write(name)
        for key in keys:
            with self._changed:  # or a session that begins to want it now would believe that it is kept
                if not self._records.wants(key):
                    self.tiers.remove([key])
