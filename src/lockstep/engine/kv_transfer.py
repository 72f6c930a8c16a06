"""KV transfer of one engine: blocks on their way to a store and back, between two steps. Engine thread only.

What a session will come back for is copied to the store soon after its request has ended, while it is still on the
device, so that a crash loses little. A request whose prompt goes on in the store waits here until those blocks are
back, and is then added to the scheduler as any other. Between two steps a bounded number of bytes is moved.
"""

from __future__ import annotations

import time
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
"""Between two steps, in each direction."""
MAX_LOADS = 2
"""Requests whose blocks are read at one time; who comes behind them may find those blocks on the device."""


@dataclass(slots=True, eq=False)
class _Return:
    """A request that waits for its blocks."""

    live: LiveRequest
    chain: tuple[bytes, ...]
    """Contents of the prompt up to the last that is in the store."""
    start: int
    """Place of the first that comes from there."""
    load: ChainLoad


class KVTransfer:
    """Moves blocks between a scheduler's pool and a store.

    Args:
        class_: priority of what is kept; larger numbers are given up first.
        wake: called by the store's thread when there is something to move.
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
        """At most one each of what the pool can hold, as only what is there is saved."""
        self._waiting: deque[LiveRequest] = deque()
        self._returns: list[_Return] = []
        self._strangers = store.strangers(self.environment)
        """Sessions by owner whose blocks are of no use here, until that is reported."""
        self._check = KVCheck(scheduler, model, store, self.environment)
        self.prioritise(class_)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting) + len(self._returns)

    @property
    def has_work(self) -> bool:
        """True if something can be moved now."""
        if self._check.has_work(is_idle=not self.num_waiting):
            return True
        can_begin = bool(self._waiting) and len(self._returns) < MAX_LOADS
        return can_begin or (bool(self._unsaved) and self.store.can_save) or any(r.load.is_ready for r in self._returns)

    # -- requests -------------------------------------------------------------------------------------------------

    def enter(self, live: LiveRequest) -> bool:
        """Take a request that has to wait for blocks; False: it has nothing to wait for."""
        owner = live.request.session_owner
        if live.request.session_id is not None and (count := self._strangers.pop(owner, 0)):
            self.store.tell(
                f"KV that was kept for sessions of {owner!r} ({count}) is of another artifact, precision or library"
                " than what is loaded; it is computed again"
            )
        found = self._find(live)
        if found is None:
            return False
        self._waiting.append(live)
        return True

    def leave(self, live: LiveRequest) -> None:
        """Forget a request that has ended."""
        if live in self._waiting:
            self._waiting.remove(live)
        for each in self._returns:
            if each.live is live:
                each.load.cancel()
        self._returns = [each for each in self._returns if each.live is not live]

    def abandon(self) -> None:
        """Forget everybody who waits, and what was not saved."""
        for each in self._returns:
            each.load.cancel()
        self._returns.clear()
        self._waiting.clear()
        self._unsaved.clear()

    def prioritise(self, class_: int) -> None:
        """Change the priority of what is kept, that of earlier times included; on any thread."""
        self.class_ = class_
        self.store.adopt(self.environment, self, class_)

    def move(self, now_s: float) -> list[LiveRequest]:
        """Move what can be moved now, within the bound; returns the requests that wait no longer."""
        ready: list[LiveRequest] = []
        while self._waiting and len(self._returns) < MAX_LOADS:
            self._begin(self._waiting.popleft(), ready)
        budget = MAX_MOVED_BYTES
        for each in tuple(self._returns):
            budget -= self._bring_back(each, budget)
            if each.load.is_done:
                self._returns.remove(each)
                ready.append(each.live)
            if budget <= 0:
                break
        self._save()
        check = self._check.next(not (ready or self.num_waiting), now_s)
        return ready if check is None else [*ready, check]

    def _find(self, live: LiveRequest) -> tuple[tuple[bytes, ...], int] | None:
        """The chain of a prompt as far as it is known, and where its part in the store begins; None: it has none."""
        request = live.core_request
        config = self._scheduler.config
        if not (request.reads_cache and config.enable_prefix_caching and request.block_hashes):
            return None
        usable = request.block_hashes[: config.usable_blocks(request.num_prompt_tokens)]
        start = self._num_cached(usable)
        count = self.store.find(self.environment, usable[start:])
        return (usable[: start + count], start) if count else None

    def _begin(self, live: LiveRequest, ready: list[LiveRequest]) -> None:
        found = self._find(live)  # others may have brought it back meanwhile
        if found is None:
            ready.append(live)
            return
        chain, start = found
        num_bytes = self._executor.geometry.bytes_per_block
        load = self.store.load(self.environment, chain[start:], num_bytes, self._wake)
        self._returns.append(_Return(live, chain, start, load))

    def _bring_back(self, each: _Return, budget: int) -> int:
        """Give blocks to contents that have come, and write them there; returns the bytes that were moved."""
        load = each.load
        first = each.start + load.num_taken
        contents = load.take(budget)
        if not contents:
            return 0
        self.store.taken()
        if first == 0:
            self._check.came_back(each.live, contents[0])
        given = self._scheduler.fill(each.chain[: first + len(contents)], first)
        for place, block in given:
            self._executor.write_blocks([block], contents[place - first][None])
        end = first + len(contents)
        if self._num_cached(each.chain[:end]) < end:
            load.cancel()  # no room on the device: the rest is computed
        return sum(content.nbytes for content in contents)

    # -- what is kept ---------------------------------------------------------------------------------------------

    def keep(self, owner: str, session_id: str, hashes: tuple[bytes, ...]) -> None:
        """Copy what a session will come back for, soon."""
        if not self.store.tiers:
            return
        self.store.remember(SessionRecord(owner, session_id, self.environment, hashes, time.time()))
        self._unsaved.update(dict.fromkeys(self._missing(hashes)))
        while len(self._unsaved) > self._scheduler.config.num_blocks:
            self._unsaved.popitem(last=False)  # no longer there
        if not self.store.can_save:
            self.store.when_it_can_save(self._wake)

    def keep_now(self, hashes: Sequence[bytes]) -> int:
        """Copy contents that are about to leave the device, as far as the store can take them now: almost all were
        copied soon after their request. Returns how many of the first ones are kept then."""
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
        """Forget a session, and what it alone would come back for."""
        self.store.end(session_id, owner)

    def _missing(self, hashes: Iterable[bytes]) -> list[bytes]:
        return [each for each in hashes if not self.store.has(self.environment, each)]

    @property
    def _num_at_once(self) -> int:
        """Blocks that are moved between two steps."""
        return max(1, MAX_MOVED_BYTES // self._executor.geometry.bytes_per_block)

    def _save(self) -> None:
        if self._unsaved and self.store.can_save:
            size = min(self._num_at_once, len(self._unsaved))
            oldest = [self._unsaved.popitem(last=False)[0] for _ in range(size)]
            self._copy([each for each in oldest if self.store.is_wanted(self.environment, each)])
        if self._unsaved and not self.store.can_save:
            self.store.when_it_can_save(self._wake)

    def _copy(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Copy what the device has of these contents; returns what that was."""
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
    """Key of everything that the bytes of a block depend on beside its tokens."""
    return kv_environment(model.executor.environment, model.executor.geometry, model.fingerprint)
