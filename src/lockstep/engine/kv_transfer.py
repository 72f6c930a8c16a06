"""KV transfer of one engine: moves blocks to a store and back, between two steps. Engine thread only.

The blocks of a session are copied to the store soon after its request has ended, while they are still on the device, so
that a crash loses little. A request whose prompt continues in the store waits here until those blocks are loaded, and
is then added to the scheduler like any other. Between two steps, a limited number of bytes is moved.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from typing import NamedTuple

from lockstep.core.groups import contents_of_chain, contents_to_continue
from lockstep.core.prefix import HASH_BYTES
from lockstep.core.scheduler import Scheduler
from lockstep.engine.generation import LiveRequest
from lockstep.engine.kv_check import KVCheck
from lockstep.engine.kv_load import ChainLoad
from lockstep.engine.kv_records import SessionRecord
from lockstep.engine.kv_store import KVStore
from lockstep.engine.loading import LoadedModel
from lockstep.executors.base import kv_environment

MAX_MOVED_BYTES = 16 << 20
"""Maximum number of bytes between two steps, in each direction."""
MAX_LOADS = 2
"""Maximum number of requests whose blocks are read at one time. Later requests may then find those blocks on the
device."""


class _Content(NamedTuple):
    """A column of a KV group."""

    block_hash: bytes
    group: int

    @property
    def key(self) -> bytes:
        """Name in the store: the hash, for groups after the first one BLAKE2b-128 of the hash and the group's
        number."""
        if not self.group:
            return self.block_hash
        return hashlib.blake2b(self.block_hash + bytes((self.group,)), digest_size=HASH_BYTES).digest()


class _Found(NamedTuple):
    """Contents in the store with which a prompt can continue."""

    chain: tuple[bytes, ...]
    """Hashes of the prompt's blocks up to the last one that it can use."""
    missing: tuple[tuple[int, int], ...]
    """Contents that come from the store, as pairs of KV group and index in the chain."""

    def contents(self) -> list[_Content]:
        return [_Content(self.chain[place], group) for group, place in self.missing]


@dataclass(slots=True, eq=False)
class _PendingLoad:
    """A request that waits for its blocks."""

    live: LiveRequest
    found: _Found
    load: ChainLoad


class KVTransfer:
    """Moves blocks between a scheduler's pool and a store.

    Args:
        class_: priority of the stored blocks; larger numbers are evicted first.
        wake: called by the store's thread when there are blocks to move.
    """

    def __init__(
        self, scheduler: Scheduler, model: LoadedModel, store: KVStore, class_: int, wake: Callable[[], None]
    ) -> None:
        self.store = store
        self.environment = environment_of(model)
        self._scheduler = scheduler
        self._executor = model.executor
        self._wake = wake
        self._unsaved: OrderedDict[_Content, None] = OrderedDict()
        """Contents to be saved, at most as many as the pool holds, since only blocks on the device are saved."""
        self._waiting: deque[LiveRequest] = deque()
        self._pending_loads: list[_PendingLoad] = []
        self._unknown_sessions = store.num_unknown_sessions(self.environment)
        """Number of sessions by owner whose stored blocks do not fit this model, until that is reported."""
        self._check = KVCheck(scheduler, model, store, self.environment)
        self.prioritise(class_)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self._waiting) + len(self._pending_loads)

    @property
    def has_work(self) -> bool:
        """True if blocks can be moved now."""
        if self._check.has_work(is_idle=not self.num_waiting):
            return True
        can_begin = bool(self._waiting) and len(self._pending_loads) < MAX_LOADS
        can_save = bool(self._unsaved) and self.store.can_save
        return can_begin or can_save or any(each.load.is_ready for each in self._pending_loads)

    # -- requests -------------------------------------------------------------------------------------------------

    def enter(self, live: LiveRequest) -> bool:
        """Take a request that has to wait for blocks; False: it need not wait."""
        owner = live.request.session_owner
        if live.request.session_id is not None and (count := self._unknown_sessions.pop(owner, 0)):
            self.store.report_fault(
                f"the stored KV of {count} sessions of {owner!r} belongs to another artifact, precision or library"
                " version; it is computed again"
            )
        found = self._find(live)
        if found is None:
            return False
        self._waiting.append(live)
        return True

    def leave(self, live: LiveRequest) -> None:
        """Remove a request that has ended before it was scheduled."""
        if live in self._waiting:
            self._waiting.remove(live)
        for each in self._pending_loads:
            if each.live is live:
                each.load.cancel()
        self._pending_loads = [each for each in self._pending_loads if each.live is not live]

    def abandon(self) -> None:
        """Remove all waiting requests and unsaved blocks."""
        for each in self._pending_loads:
            each.load.cancel()
        self._pending_loads.clear()
        self._waiting.clear()
        self._unsaved.clear()

    def prioritise(self, class_: int) -> None:
        """Change the priority of all stored blocks, including those of earlier processes. Any thread may call this."""
        self.class_ = class_
        self.store.register_engine(self.environment, self, class_)

    def move(self, now_s: float) -> list[LiveRequest]:
        """Move the blocks that can be moved now, within the limit. Returns the requests that no longer wait."""
        ready: list[LiveRequest] = []
        while self._waiting and len(self._pending_loads) < MAX_LOADS:
            self._begin(self._waiting.popleft(), ready)
        budget = MAX_MOVED_BYTES
        for each in tuple(self._pending_loads):
            budget -= self._load_blocks(each, budget)
            if each.load.is_done:
                self._pending_loads.remove(each)
                ready.append(each.live)
            if budget <= 0:
                break
        self._save()
        check = self._check.next(not (ready or self.num_waiting), now_s)
        return ready if check is None else [*ready, check]

    def _find(self, live: LiveRequest) -> _Found | None:
        """Stored contents with which a prompt can continue; None: none that the device lacks."""
        request = live.core_request
        config = self._scheduler.config
        if not (request.reads_cache and config.enable_prefix_caching and request.block_hashes):
            return None
        usable = request.block_hashes[: config.usable_blocks(request.num_prompt_tokens)]
        start = self._num_cached(usable)
        end = start + self.store.find(self.environment, usable[start:])
        for count in range(end, 0, -1):
            others = self._missing_others(usable, count)
            if others is not None:
                missing = (*[(0, place) for place in range(start, count)], *others)
                return _Found(usable[:count], missing) if missing else None
        return None

    def _missing_others(self, hashes: Sequence[bytes], count: int) -> list[tuple[int, int]] | None:
        """Contents of other groups that are not on the device and with which a prompt can continue after this many
        blocks; None: they are not stored either."""
        config, missing = self._scheduler.config, []
        for group, columns in contents_to_continue(config.groups, count, config.block_size):
            for place in columns:
                if self._scheduler.cached_blocks([hashes[place]], group)[0]:
                    continue
                if not self.store.has(self.environment, _Content(hashes[place], group).key):
                    return None
                missing.append((group, place))
        return missing

    def _begin(self, live: LiveRequest, ready: list[LiveRequest]) -> None:
        found = self._find(live)  # other requests may have loaded the blocks meanwhile
        if found is None:
            ready.append(live)
            return
        groups = self._scheduler.config.groups
        sizes = [groups[group].num_parts * self._executor.geometry.bytes_per_block for group, _ in found.missing]
        keys = [each.key for each in found.contents()]
        load = self.store.load(self.environment, keys, sizes, self._wake)
        self._pending_loads.append(_PendingLoad(live, found, load))

    def _load_blocks(self, each: _PendingLoad, budget: int) -> int:
        """Assign device blocks to loaded contents and write them. Returns the number of bytes that were moved."""
        load, found = each.load, each.found
        first = load.num_taken
        contents = load.take(budget)
        if not contents:
            return 0
        self.store.continue_loading()
        if found.missing[first] == (0, 0):
            self._check.count_loaded(each.live, contents[0])
        taken = enumerate(zip(found.missing[first : first + len(contents)], contents, strict=True))
        # A run of adjacent places of one group, since `fill` gives blocks to all places from the first to the last.
        for (group, _), run in groupby(taken, key=lambda each: (each[1][0][0], each[1][0][1] - each[0])):
            by_place = {place: content for _, ((_, place), content) in run}
            chain = found.chain[: max(by_place) + 1]
            for place, blocks in self._scheduler.fill(chain, min(by_place), group):
                self._executor.write_blocks(blocks, by_place[place].reshape(len(blocks), -1))
            if not all(self._scheduler.cached_blocks([chain[place] for place in by_place], group)):
                load.cancel()  # no room on the device, so the rest is computed
        return sum(content.nbytes for content in contents)

    # -- saving ---------------------------------------------------------------------------------------------------

    def keep(self, owner: str, session_id: str, hashes: tuple[bytes, ...], borders: tuple[int, ...]) -> None:
        """Queue a session's contents to be copied to the store.

        Args:
            borders: numbers of blocks after which the session may continue.
        """
        if not self.store.tiers:
            return
        contents = self._contents(hashes, borders)
        others = tuple([each.key for each in contents if each.group])
        time_s = self.store.system.unix_time_s()
        self.store.remember(SessionRecord(owner, session_id, self.environment, hashes, time_s, others))
        self._unsaved.update(dict.fromkeys(self._missing(contents)))
        while len(self._unsaved) > self._scheduler.config.num_blocks:
            self._unsaved.popitem(last=False)  # no longer on the device
        if not self.store.can_save:
            self.store.call_when_ready(self._wake)

    def keep_now(self, hashes: Sequence[bytes], borders: Sequence[int]) -> int:
        """Copy contents that are about to leave the device, as far as the store can take them now. Almost all were
        already copied after their request. Returns how many blocks at the start of the chain are stored."""
        if not self.store.tiers:
            return 0
        missing = self._missing(self._contents(hashes, borders))
        for each in missing:
            self._unsaved.pop(each, None)
        kept: set[_Content] = set()
        while missing and self.store.can_save:
            some, missing = self._split(missing)
            kept |= self._copy(some)
        stored = (_Content(each, 0) in kept or self.store.has(self.environment, each) for each in hashes)
        return sum(1 for _ in takewhile(bool, stored))

    def end(self, owner: str, session_id: str) -> None:
        """Remove a session, and the blocks that no other session needs."""
        self.store.end(session_id, owner)

    def _contents(self, hashes: Sequence[bytes], borders: Sequence[int]) -> list[_Content]:
        config = self._scheduler.config
        return [_Content(*each) for each in contents_of_chain(config.groups, hashes, borders, config.block_size)]

    def _missing(self, contents: Iterable[_Content]) -> list[_Content]:
        return [each for each in contents if not self.store.has(self.environment, each.key)]

    def _split(self, contents: Sequence[_Content]) -> tuple[list[_Content], list[_Content]]:
        """The first contents, at least one, as many as are moved between two steps; and the rest."""
        groups, count, num_bytes = self._scheduler.config.groups, 0, 0
        for each in contents:
            num_bytes += groups[each.group].num_parts * self._executor.geometry.bytes_per_block
            if count and num_bytes > MAX_MOVED_BYTES:
                break
            count += 1
        return list(contents[:count]), list(contents[count:])

    def _save(self) -> None:
        if self._unsaved and self.store.can_save:
            oldest, _ = self._split(list(islice(self._unsaved, self._num_at_once)))
            for each in oldest:
                del self._unsaved[each]
            self._copy([each for each in oldest if self.store.is_needed(self.environment, each.key)])
        if self._unsaved and not self.store.can_save:
            self.store.call_when_ready(self._wake)

    @property
    def _num_at_once(self) -> int:
        """Maximum number of blocks that are moved between two steps."""
        return max(1, MAX_MOVED_BYTES // self._executor.geometry.bytes_per_block)

    def _copy(self, contents: Sequence[_Content]) -> set[_Content]:
        """Copy those of the contents that are on the device. Returns them."""
        copied: set[_Content] = set()
        class_ = self.store.class_of(self.environment)
        for group, some in groupby(contents, key=lambda each: each.group):
            these = list(some)
            found = self._scheduler.cached_blocks([each.block_hash for each in these], group)
            pairs = [(each, blocks) for each, blocks in zip(these, found, strict=True) if blocks]
            if pairs:
                content = self._executor.read_blocks([block for _, blocks in pairs for block in blocks])
                keys = [each.key for each, _ in pairs]
                self.store.save(self.environment, keys, content.reshape(len(pairs), -1), class_, self._wake)
                copied.update(each for each, _ in pairs)
        return copied

    def _num_cached(self, hashes: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(bool, self._scheduler.cached_blocks(hashes)))


def environment_of(model: LoadedModel) -> bytes:
    """Key of everything that affects the bytes of a block, except its tokens."""
    return kv_environment(model.executor.environment, model.executor.geometry, model.fingerprint)
