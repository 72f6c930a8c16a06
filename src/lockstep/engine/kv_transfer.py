"""KV transfer of one engine: moves blocks to a store and back, between two steps. Engine thread only.

The blocks of a session are copied to the store soon after its request has ended, while they are still on the device, so
that a crash loses little. A request whose prompt continues in the store waits here until those blocks are loaded, and
is then added to the scheduler like any other. Between two steps, a limited number of bytes is moved.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

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


@dataclass(slots=True, eq=False)
class _PendingLoad:
    """A request that waits for its blocks."""

    live: LiveRequest
    chain: tuple[bytes, ...]
    """Hashes of the prompt's blocks up to the last one in the store."""
    start: int
    """Index of the first block that comes from the store."""
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
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()
        """Blocks to be saved, at most as many as the pool holds, since only blocks on the device are saved."""
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

    def _find(self, live: LiveRequest) -> tuple[tuple[bytes, ...], int] | None:
        """The known chain of a prompt, and the index of its first block in the store; None: it has none there."""
        request = live.core_request
        config = self._scheduler.config
        if not (request.reads_cache and config.enable_prefix_caching and request.block_hashes):
            return None
        usable = request.block_hashes[: config.usable_blocks(request.num_prompt_tokens)]
        start = self._num_cached(usable)
        count = self.store.find(self.environment, usable[start:])
        return (usable[: start + count], start) if count else None

    def _begin(self, live: LiveRequest, ready: list[LiveRequest]) -> None:
        found = self._find(live)  # other requests may have loaded the blocks meanwhile
        if found is None:
            ready.append(live)
            return
        chain, start = found
        num_bytes = self._executor.geometry.bytes_per_block
        load = self.store.load(self.environment, chain[start:], num_bytes, self._wake)
        self._pending_loads.append(_PendingLoad(live, chain, start, load))

    def _load_blocks(self, each: _PendingLoad, budget: int) -> int:
        """Assign device blocks to loaded contents and write them. Returns the number of bytes that were moved."""
        load = each.load
        first = each.start + load.num_taken
        contents = load.take(budget)
        if not contents:
            return 0
        self.store.continue_loading()
        if first == 0:
            self._check.count_loaded(each.live, contents[0])
        given = self._scheduler.fill(each.chain[: first + len(contents)], first)
        for place, block in given:
            self._executor.write_blocks([block], contents[place - first][None])
        end = first + len(contents)
        if self._num_cached(each.chain[:end]) < end:
            load.cancel()  # no room on the device, so the rest is computed
        return sum(content.nbytes for content in contents)

    # -- saving ---------------------------------------------------------------------------------------------------

    def keep(self, owner: str, session_id: str, hashes: tuple[bytes, ...]) -> None:
        """Queue a session's blocks to be copied to the store."""
        if not self.store.tiers:
            return
        self.store.remember(SessionRecord(owner, session_id, self.environment, hashes, self.store.system.unix_time_s()))
        self._unsaved.update(dict.fromkeys(self._missing(hashes)))
        while len(self._unsaved) > self._scheduler.config.num_blocks:
            self._unsaved.popitem(last=False)  # no longer on the device
        if not self.store.can_save:
            self.store.call_when_ready(self._wake)

    def keep_now(self, hashes: Sequence[bytes]) -> int:
        """Copy contents that are about to leave the device, as far as the store can take them now. Almost all were
        already copied after their request. Returns how many blocks at the start of the chain are stored."""
        if not self.store.tiers:
            return 0
        missing = self._missing(hashes)
        for each in missing:
            self._unsaved.pop(each, None)
        kept: set[bytes] = set()
        size = self._num_at_once
        for first in range(0, len(missing), size):
            if not self.store.can_save:
                break
            kept |= self._copy(missing[first : first + size])
        lost = set(missing) - kept
        return sum(1 for _ in takewhile(lambda each: each not in lost, hashes))

    def end(self, owner: str, session_id: str) -> None:
        """Remove a session, and the blocks that no other session needs."""
        self.store.end(session_id, owner)

    def _missing(self, hashes: Iterable[bytes]) -> list[bytes]:
        return [each for each in hashes if not self.store.has(self.environment, each)]

    @property
    def _num_at_once(self) -> int:
        """Number of blocks that are moved between two steps."""
        return max(1, MAX_MOVED_BYTES // self._executor.geometry.bytes_per_block)

    def _save(self) -> None:
        if self._unsaved and self.store.can_save:
            size = min(self._num_at_once, len(self._unsaved))
            oldest = [self._unsaved.popitem(last=False)[0] for _ in range(size)]
            self._copy([each for each in oldest if self.store.is_needed(self.environment, each)])
        if self._unsaved and not self.store.can_save:
            self.store.call_when_ready(self._wake)

    def _copy(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Copy those of the contents that are on the device. Returns them."""
        found = zip(hashes, self._scheduler.cached_blocks(hashes), strict=True)
        pairs = [(each, block) for each, block in found if block is not None]
        if pairs:
            content = self._executor.read_blocks([block for _, block in pairs])
            class_ = self.store.class_of(self.environment)
            self.store.save(self.environment, [each for each, _ in pairs], content, class_, self._wake)
        return {each for each, _ in pairs}

    def _num_cached(self, hashes: Sequence[bytes]) -> int:
        blocks = self._scheduler.cached_blocks(hashes)
        return sum(1 for _ in takewhile(lambda block: block is not None, blocks))


def environment_of(model: LoadedModel) -> bytes:
    """Key of everything that affects the bytes of a block, except its tokens."""
    return kv_environment(model.executor.environment, model.executor.geometry, model.fingerprint)
