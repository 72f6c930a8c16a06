"""The sessions of one engine: whose blocks stay on the device when a request has ended. Engine thread only.

A session keeps the full blocks of the last prompt that was computed for it, and of its answer where decoding gives the
bits of a prompt; the rest is computed again with the next prompt, so that a session changes no bit. What is kept is
pinned: other content is evicted first, but no request waits for room that only idle sessions take. The number of
sessions is bounded, as each request sets it for its owner: the least recently used idle one is swept for a new one, and
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
"""Of all owners together; beyond, the least recently used idle one is evicted, as within its owner."""

SweepReason = Literal["idle", "room", "ended", "unloaded"]
"""It was swept by command; another session took its place; it was ended; its replica was unloaded."""


class SessionChange(msgspec.Struct, frozen=True, array_like=True):
    """Change of a session: admitted, kept or swept."""

    owner: str
    session_id: str
    what: Literal["admitted", "kept", "swept"]
    """Its first request has come; a request has ended and left blocks; it is gone from the device."""
    num_blocks: int = 0
    """Full blocks that it holds now, or, swept, that became free."""
    num_tokens: int = 0
    reason: SweepReason | None = None
    """Why it was swept."""
    num_stored_tokens: int = 0
    """Swept: those of its tokens that the store keeps."""


class SessionReport(msgspec.Struct, frozen=True, array_like=True):
    """One session at one moment."""

    owner: str
    session_id: str
    num_busy: int
    """Its requests that have not ended."""
    num_blocks: int
    """Full blocks on the device that its next request finds; blocks that sessions share count for each."""
    num_tokens: int
    idle_s: float
    """Since its last request came or ended; 0 while it is busy."""
    age_s: float


class Swept(NamedTuple):
    """Result of a sweep."""

    num_sessions: int
    num_blocks: int
    """That became free; what others share or use stays."""


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
    """Of what is pinned for it."""
    is_ended: bool = False
    """It goes with its last request, and keeps nothing."""


class Sessions:
    """Pins and sweeps between the steps of one scheduler.

    Args:
        scheduler: of the engine, with no step under way whenever this is called.
        tell: called with every change.
        kv: keeps what leaves the device; None: it is lost.
    """

    def __init__(
        self, scheduler: Scheduler, tell: Callable[[SessionChange], None], kv: KVTransfer | None = None
    ) -> None:
        self.kv = kv
        self.on_return: Callable[[LiveRequest], None] = lambda live: None
        """Called with requests that got a slot after a wait, and now wait for their blocks."""
        self._scheduler = scheduler
        self._tell = tell
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()
        """Least recently used first."""
        self._num_of: Counter[str] = Counter()
        """Sessions by owner."""
        self._waiting: deque[LiveRequest] = deque()
        """Requests of sessions for which there is no place yet; as many as may wait in the scheduler's queue."""
        self._has_changed = False
        """Whether one that waits may have a place now."""

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait until a session is idle, or until their blocks are back."""
        return len(self._waiting) + (0 if self.kv is None else self.kv.num_waiting)

    @property
    def has_work(self) -> bool:
        """True if requests may be ready, or blocks can be moved."""
        return bool(self._waiting) or (self.kv is not None and self.kv.has_work)

    def enter(self, live: LiveRequest, now_s: float) -> bool:
        """A request has come; False: it waits here, since all sessions of its owner are busy, or for its blocks.

        Raises:
            QueueFullError: as many wait as may.
        """
        if live.request.session_id is None or self._open(live, now_s):
            return self.kv is None or not self.kv.enter(live)
        most = self._scheduler.config.max_num_queued_reqs
        if len(self._waiting) >= most:
            raise QueueFullError(f"{most} requests already wait for a session to become idle; try again later")
        self._waiting.append(live)
        return False

    def ready(self, now_s: float) -> Iterator[LiveRequest]:
        """Those that waited and have a place and their blocks now, in the order in which they came. Moves blocks."""
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
        """A request has ended, wherever it was; one whose prompt was never computed leaves its session as it was."""
        if self.kv is not None:
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
            self._keep(session, live.kept_hashes)
        elif session.is_ended and not session.num_busy:
            self._forget(session, "ended")

    # -- commands -------------------------------------------------------------------------------------------------

    def sweep(self, session_id: str | None = None, owner: str | None = None) -> Swept:
        """Free what idle sessions keep: that of one id, of one owner, or of all; busy ones stay as they are."""
        return self._forget_all([s for s in self._named(session_id, owner) if not s.num_busy], "idle")

    def end(self, session_id: str | None = None, owner: str | None = None, reason: SweepReason = "ended") -> Swept:
        """As `sweep`, and busy sessions keep nothing from now on, unless a new request comes for them."""
        named = list(self._named(session_id, owner))
        num_blocks = 0
        for session in named:
            if session.num_busy:
                session.is_ended = True
                num_blocks += self._unpin(session)
        swept = self._forget_all([session for session in named if not session.num_busy], reason)
        return Swept(len(named), swept.num_blocks + num_blocks)

    def reports(self, now_s: float) -> tuple[SessionReport, ...]:
        """All sessions, least recently used first."""
        return tuple(self._report(session, now_s) for session in self._sessions.values())

    def stored(self) -> tuple[SessionChange, ...]:
        """Those that are known from before, as what their last change has left and the store still has."""
        size, kv = self._scheduler.config.block_size, self.kv
        if kv is None:
            return ()
        found = [(each, kv.store.find(kv.environment, each.hashes)) for each in kv.store.records(kv.environment)]
        return tuple(
            SessionChange(record.owner, record.session_id, "swept", num_stored_tokens=count * size)
            for record, count in found
        )

    def abandon(self) -> None:
        """The scheduler cannot be trusted any more: forget everything, and say nothing to it."""
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
            self._tell(SessionChange(*key, "admitted"))
        session.num_busy += 1
        session.is_ended = False
        live.is_in_session = True
        self._use(session, now_s)
        return True

    def _make_room(self, owner: str, most: int) -> bool:
        """Sweep until one more session fits; False: those that remain are busy."""
        while self._num_of[owner] >= most:
            if not self._sweep_oldest(owner):
                return False
        return len(self._sessions) < MAX_SESSIONS or self._sweep_oldest(None)

    def _sweep_oldest(self, owner: str | None) -> bool:
        oldest = next((session for session in self._named(None, owner) if not session.num_busy), None)
        if oldest is not None:
            self._forget(oldest, "room")
        return oldest is not None

    def _use(self, session: _Session, now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.move_to_end(session.key)

    def _keep(self, session: _Session, hashes: tuple[bytes, ...]) -> None:
        """Pin first, so that what both prompts share is never without a pin."""
        self._scheduler.pin(hashes)
        self._unpin(session)
        session.hashes = hashes
        if self.kv is not None:
            self.kv.keep(*session.key, hashes)
        num_blocks = self._num_blocks(session)
        num_tokens = num_blocks * self._scheduler.config.block_size
        self._tell(SessionChange(*session.key, "kept", num_blocks, num_tokens))

    def _unpin(self, session: _Session) -> int:
        hashes, session.hashes = session.hashes, ()
        return len(self._scheduler.sweep(hashes))

    def _forget(self, session: _Session, reason: SweepReason) -> int:
        del self._sessions[session.key]
        self._num_of -= Counter((session.key.owner,))
        self._has_changed = True
        num_stored = self._store(session, reason)
        num_blocks = self._unpin(session)
        size = self._scheduler.config.block_size
        self._tell(SessionChange(*session.key, "swept", num_blocks, num_blocks * size, reason, num_stored * size))
        return num_blocks

    def _store(self, session: _Session, reason: SweepReason) -> int:
        """Have kept what a session will come back for; returns how many blocks that are."""
        if self.kv is None:
            return 0
        if reason == "ended":
            self.kv.end(*session.key)
            return 0
        return self.kv.keep_now(session.hashes)

    def _forget_all(self, sessions: list[_Session], reason: SweepReason) -> Swept:
        return Swept(len(sessions), sum(self._forget(session, reason) for session in sessions))

    def _named(self, session_id: str | None, owner: str | None) -> Iterator[_Session]:
        """Least recently used first."""
        for key, session in self._sessions.items():
            if session_id in (None, key.session_id) and owner in (None, key.owner):
                yield session

    def _num_blocks(self, session: _Session) -> int:
        found = self._scheduler.cached_blocks(session.hashes)
        return sum(1 for _ in takewhile(lambda block: block is not None, found))

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
