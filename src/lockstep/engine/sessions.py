"""Sessions of one engine: keep blocks on the device after their requests have ended. Engine thread only.

A session keeps the full blocks of its last computed prompt, and of the answer if decoding gives the same bits as
prefill. The rest is computed again with the next prompt, so that a session does not change any bit. Kept blocks are
pinned: other content is evicted first, but a request never waits for room that only idle sessions occupy. Each request
sets the maximum number of sessions of its owner. A new session evicts the owner's least recently used idle session;
while all are busy, the new one waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

import msgspec

from lockstep.core.scheduler import Scheduler
from lockstep.engine.generation import LiveRequest
from lockstep.engine.kv_transfer import KVTransfer
from lockstep.engine.request import GenerationRequest
from lockstep.errors import QueueFullError

MAX_SESSIONS = 4096
"""Maximum number of sessions of all owners. Beyond it, the least recently used idle one is evicted, as within an
owner."""

_EVICTED: Literal["swept"] = "swept"  # plain: wire value
SweepReason = Literal["idle", "room", "ended", "unloaded"]
"""The reason for an eviction: by command; to make room for another session; the session ended; the replica was
unloaded."""


class SessionChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of a session: admitted, kept or evicted."""

    owner: str
    session_id: str
    what: Literal["admitted", "kept", "swept"]  # plain: wire value
    """Kind of change: the first request of the session was admitted; a request has ended, and its blocks stay on the
    device; or the session was evicted from the device."""
    num_blocks: int = 0
    """Number of full blocks that it holds now, or, after an eviction, that became free."""
    num_tokens: int = 0
    reason: SweepReason | None = None
    """The reason for an eviction."""
    num_stored_tokens: int = 0
    """Number of its tokens in the KV store after an eviction."""


class SessionReport(msgspec.Struct, frozen=True, array_like=True):
    """One session at one moment."""

    owner: str
    session_id: str
    num_busy: int
    """Number of its requests that have not ended."""
    num_blocks: int
    """Number of full blocks on the device that its next request can reuse. Shared blocks count for each session."""
    num_tokens: int
    idle_s: float
    """Seconds since its last request arrived or ended; 0 while it is busy."""
    age_s: float


class SweepResult(NamedTuple):
    """Result of an eviction."""

    num_sessions: int
    num_blocks: int
    """Number of blocks that became free. Blocks that others share or use stay."""


class _Key(NamedTuple):
    owner: str
    session_id: str


@dataclass(slots=True)
class _Session:
    key: _Key
    opened_s: float
    last_used_s: float
    num_busy: int = 0
    hashes: tuple[bytes, ...] = ()
    """Hashes of the blocks that are pinned for it."""
    borders: tuple[int, ...] = ()
    """Numbers of these blocks after which it may continue; see `Scheduler.pin`."""
    is_ended: bool = False
    """True if it is removed, and keeps no blocks, when its last request ends."""


class EngineSessions:
    """Admits requests to sessions, and pins and evicts blocks, between the steps of one scheduler.

    Args:
        scheduler: the engine's scheduler; no step may be under way when methods are called.
        notify: called with every change.
        kv: stores blocks that leave the device; None: they are lost.
    """

    def __init__(
        self, scheduler: Scheduler, notify: Callable[[SessionChange], None], kv: KVTransfer | None = None
    ) -> None:
        self.kv = kv
        self.on_return: Callable[[LiveRequest], None] = lambda live: None
        """Called with requests that were admitted after a wait and now wait for their blocks."""
        self._scheduler = scheduler
        self._notify = notify
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()
        """Sessions, least recently used first."""
        self._num_of: Counter[str] = Counter()
        """Number of sessions by owner."""
        self._waiting: deque[LiveRequest] = deque()
        """Requests that wait for a session, at most as many as may wait in the scheduler's queue."""
        self._has_changed = False
        """True if a waiting request may be admitted now."""

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an idle session or for their blocks."""
        return len(self._waiting) + (0 if self.kv is None else self.kv.num_waiting)

    @property
    def has_work(self) -> bool:
        """True if requests may be ready, or blocks can be moved."""
        return bool(self._waiting) or (self.kv is not None and self.kv.has_work)

    def enter(self, live: LiveRequest, now_s: float) -> bool:
        """Admit a new request; False: it waits here, since all sessions of its owner are busy, or for its blocks.

        Raises:
            QueueFullError: too many requests wait already.
        """
        if live.request.session_id is None or self._open(live, now_s):
            return self.kv is None or not self.kv.enter(live)
        most = self._scheduler.config.max_num_queued_reqs
        if len(self._waiting) >= most:
            raise QueueFullError(f"{most} requests already wait for a session to become idle; try again later")
        self._waiting.append(live)
        return False

    def ready(self, now_s: float) -> Iterator[LiveRequest]:
        """Move blocks, and yield the waiting requests that now have a session and their blocks, in order of arrival."""
        if self.kv is not None and self.kv.has_work:
            yield from self.kv.move(now_s)
        if not self._has_changed:
            return
        self._has_changed = False
        for _ in range(len(self._waiting)):
            live = self._waiting.popleft()
            if self._open(live, now_s):
                if self.kv is None or not self.kv.enter(live):
                    yield live
                else:
                    self.on_return(live)
            else:
                self._waiting.append(live)

    def leave(self, live: LiveRequest, now_s: float) -> None:
        """Remove a request that has ended. If its prompt was never computed, its session keeps its previous blocks."""
        if self.kv is not None and not live.generations:  # one that was scheduled waits for no blocks
            self.kv.leave(live)
        if live.request.session_id is None:
            return
        if not live.is_in_session:
            if live in self._waiting:
                self._waiting.remove(live)
            return
        live.is_in_session, self._has_changed = False, True
        session = self._sessions.get(_key_of(live.request))
        if session is None:
            return
        session.num_busy -= 1
        self._use(session, now_s)
        if not session.is_ended and live.first_token_s is not None:
            self._keep(session, live.kept_hashes, live.borders(self._scheduler.config.block_size))
        elif session.is_ended and not session.num_busy:
            self._forget(session, "ended")

    # -- commands -------------------------------------------------------------------------------------------------

    def sweep(self, session_id: str | None = None, owner: str | None = None) -> SweepResult:
        """Free the blocks of idle sessions: of one id, of one owner, or of all. Busy sessions are left unchanged."""
        return self._forget_all([s for s in self._matching(session_id, owner) if not s.num_busy], "idle")

    def end(
        self, session_id: str | None = None, owner: str | None = None, reason: SweepReason = "ended"
    ) -> SweepResult:
        """Evict as `sweep` does. In addition, busy sessions keep no blocks from now on, unless they get a new
        request."""
        matching = list(self._matching(session_id, owner))
        num_blocks = 0
        for session in matching:
            if session.num_busy:
                session.is_ended = True
                num_blocks += self._unpin(session)
        evicted = self._forget_all([session for session in matching if not session.num_busy], reason)
        return SweepResult(len(matching), evicted.num_blocks + num_blocks)

    def reports(self, now_s: float) -> tuple[SessionReport, ...]:
        """All sessions, least recently used first."""
        return tuple(self._report(session, now_s) for session in self._sessions.values())

    def stored(self) -> tuple[SessionChange, ...]:
        """Sessions of earlier processes, as changes with the number of tokens that the store still has."""
        size, kv = self._scheduler.config.block_size, self.kv
        if kv is None:
            return ()
        found = [(each, kv.store.find(kv.environment, each.hashes)) for each in kv.store.records(kv.environment)]
        return tuple(
            SessionChange(record.owner, record.session_id, _EVICTED, num_stored_tokens=count * size)
            for record, count in found
        )

    def abandon(self) -> None:
        """Remove all sessions without calling the scheduler, whose state may be inconsistent after a failure."""
        if self.kv is not None:
            self.kv.abandon()
        self._sessions.clear()
        self._num_of.clear()
        self._waiting.clear()

    # -- one session ----------------------------------------------------------------------------------------------

    def _open(self, live: LiveRequest, now_s: float) -> bool:
        request = live.request
        key = _key_of(request)
        session = self._sessions.get(key)
        if session is None:
            if not self._make_room(key.owner, request.max_active_sessions):
                return False
            session = self._sessions[key] = _Session(key, now_s, now_s)
            self._num_of[key.owner] += 1
            self._notify(SessionChange(*key, "admitted"))
        session.num_busy += 1
        session.is_ended = False
        live.is_in_session = True
        self._use(session, now_s)
        return True

    def _make_room(self, owner: str, most: int) -> bool:
        """Evict sessions until one more fits; False: the remaining ones are busy."""
        while self._num_of[owner] >= most:
            if not self._evict_oldest(owner):
                return False
        return len(self._sessions) < MAX_SESSIONS or self._evict_oldest(None)

    def _evict_oldest(self, owner: str | None) -> bool:
        oldest = next((session for session in self._matching(None, owner) if not session.num_busy), None)
        if oldest is not None:
            self._forget(oldest, "room")
        return oldest is not None

    def _use(self, session: _Session, now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.move_to_end(session.key)

    def _keep(self, session: _Session, hashes: tuple[bytes, ...], borders: tuple[int, ...]) -> None:
        """Pin the new blocks before the old ones are unpinned, so that shared blocks always have a pin."""
        self._scheduler.pin(hashes, borders)
        self._unpin(session)
        session.hashes, session.borders = hashes, borders
        if self.kv is not None:
            self.kv.keep(*session.key, hashes, borders)
        num_blocks = self._num_blocks(session)
        num_tokens = num_blocks * self._scheduler.config.block_size
        self._notify(SessionChange(*session.key, "kept", num_blocks, num_tokens))

    def _unpin(self, session: _Session) -> int:
        hashes, session.hashes = session.hashes, ()
        borders, session.borders = session.borders, ()
        return len(self._scheduler.sweep(hashes, borders))

    def _forget(self, session: _Session, reason: SweepReason) -> int:
        del self._sessions[session.key]
        self._num_of -= Counter((session.key.owner,))
        self._has_changed = True
        num_stored = self._store(session, reason)
        num_blocks = self._unpin(session)
        size = self._scheduler.config.block_size
        self._notify(SessionChange(*session.key, _EVICTED, num_blocks, num_blocks * size, reason, num_stored * size))
        return num_blocks

    def _store(self, session: _Session, reason: SweepReason) -> int:
        """Store the session's blocks outside of the device. Returns the number of stored blocks."""
        if self.kv is None:
            return 0
        if reason == "ended":
            self.kv.end(*session.key)
            return 0
        return self.kv.keep_now(session.hashes, session.borders)

    def _forget_all(self, sessions: list[_Session], reason: SweepReason) -> SweepResult:
        return SweepResult(len(sessions), sum(self._forget(session, reason) for session in sessions))

    def _matching(self, session_id: str | None, owner: str | None) -> Iterator[_Session]:
        """Yield the matching sessions, least recently used first."""
        for key, session in self._sessions.items():
            if session_id in (None, key.session_id) and owner in (None, key.owner):
                yield session

    def _num_blocks(self, session: _Session) -> int:
        found = self._scheduler.cached_blocks(session.hashes)
        return sum(1 for _ in takewhile(bool, found))

    def _report(self, session: _Session, now_s: float) -> SessionReport:
        num_blocks = self._num_blocks(session)
        return SessionReport(
            *session.key,
            session.num_busy,
            num_blocks,
            num_blocks * self._scheduler.config.block_size,
            0.0 if session.num_busy else max(0.0, now_s - session.last_used_s),
            max(0.0, now_s - session.opened_s),
        )


def _key_of(request: GenerationRequest) -> _Key:
    assert request.session_id is not None, "only requests of sessions have a key"
    return _Key(request.session_owner, request.session_id)
