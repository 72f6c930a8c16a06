"""Sessions: tracks conversations whose KV is retained, limits how many a model holds on the device, and selects which
wait or are evicted.

A request without a session id forms its own session, which ends with it. Event loop only; times are passed in as
values.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.cluster.manifest import SessionLimits
from lockstep.cluster.snapshot import KVLocation, SessionSnapshot
from lockstep.errors import LockstepError, QueueFullError

MAX_SESSIONS = 4096
"""Maximum number of sessions that are remembered; beyond it the least recently used idle one is forgotten."""
MAX_WAITING_SESSIONS = 1024
"""Maximum number of requests that wait for one model's sessions; further ones are rejected."""
_SEPARATOR = "\0"
"""Separator of caller and id in a key. A caller's name never contains it; an id may."""


class SessionName(NamedTuple):
    """Name of a session: callers have separate sessions even under the same id."""

    caller: str
    """Name of the caller's API key; empty: the request had no key."""
    id: str
    """Session id that the client sent."""

    @property
    def key(self) -> str:
        """Caller and id as one string, under which the cluster and the worker store the session. Without a caller it is
        usually the id."""
        return f"{self.caller}{_SEPARATOR}{self.id}" if self.caller or _SEPARATOR in self.id else self.id

    @classmethod
    def of(cls, key: str) -> SessionName:
        """Parse a key into the name from which it was built."""
        caller, separator, id_ = key.partition(_SEPARATOR)
        return cls(caller, id_) if separator else cls("", key)


class StoredTokens(NamedTuple):
    """Tokens of a session that are stored outside of the device."""

    total: int
    host: int
    disk: int
    """Tokens on disk; some of them may also be in host memory."""

    @property
    def has_place(self) -> bool:
        """False if the worker has reported only the total."""
        return bool(self.host or self.disk or not self.total)


@dataclass(slots=True, eq=False)
class Session:
    """One named session."""

    id: str
    """Key of its name."""
    model: str
    began_s: float
    last_used_s: float
    num_requests: int = 0
    num_active: int = 0
    kept_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of its last prompt that are retained on the device, by model."""
    stored: dict[str, StoredTokens] = field(default_factory=dict)
    """Tokens of its last prompt that are stored in host memory or on disk, by model."""
    is_stored_known: bool = True
    """True if the current worker has reported the stored tokens."""
    is_held: bool = True
    """True if at least one model holds the session on the device."""
    is_accepted: bool = False
    """True if a model has accepted a request of the session, now or before this server started."""
    is_evicted: bool = False
    """True if a model has evicted its KV since its last request."""

    def snapshot(self, now_s: float) -> SessionSnapshot:
        stored = StoredTokens(*map(sum, zip((0, 0, 0), *self.stored.values(), strict=True)))
        is_kept = self.is_held or stored.total or not self.is_stored_known
        state = "active" if self.num_active else "idle" if is_kept else "dropped"
        num_tokens = sum(self.kept_tokens.values())
        idle_s = 0.0 if self.num_active else now_s - self.last_used_s
        has_place = self.is_stored_known and all(each.has_place for each in self.stored.values())
        name = SessionName.of(self.id)
        return SessionSnapshot(
            id=name.id,
            caller=name.caller,
            model=self.model,
            state=state,
            age_s=now_s - self.began_s,
            idle_s=idle_s,
            num_requests=self.num_requests,
            num_tokens=num_tokens,
            num_stored_tokens=stored.total if self.is_stored_known else None,
            num_host_tokens=stored.host if has_place else None,
            num_disk_tokens=stored.disk if has_place else None,
            place=self._place(num_tokens, stored if has_place else None),
        )

    def _place(self, num_tokens: int, stored: StoredTokens | None) -> KVLocation | None:
        if num_tokens:
            return "device"
        if stored is None:
            return None
        return "host" if stored.host else "disk" if stored.disk else "none"


class ModelSessions:
    """Sessions whose KV one model holds.

    Args:
        limit: maximum number of sessions held at once; None: no request waits, and up to `MAX_SESSIONS` idle named
            sessions are held.
        on_evicted: called with the idle session that was evicted for another one.
    """

    def __init__(self, limit: int | None, on_evicted: Callable[[str], None]) -> None:
        self.limit = limit
        self._on_evicted = on_evicted
        self._num_ephemeral = 0
        self._active: dict[str, int] = {}
        """Number of open requests by named session."""
        self._idle: dict[str, None] = {}
        """Idle sessions, least recently used first."""
        self._waiting: deque[tuple[asyncio.Future[None], str | None]] = deque()

    @property
    def num_active(self) -> int:
        return self._num_ephemeral + len(self._active)

    @property
    def num_held(self) -> int:
        return self.num_active + len(self._idle)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_open(self, session: str | None) -> bool:
        """True if a request of the session may run at once."""
        return not self._waiting and self._has_room(session)

    async def enter(self, session: str | None) -> None:
        """Wait until a request of a session may run; each successful call is paired with a call of `leave`.

        Raises:
            QueueFullError: too many requests wait already.
        """
        if self.is_open(session):
            self._take(session)
            return
        if len(self._waiting) >= MAX_WAITING_SESSIONS:
            raise QueueFullError(f"{MAX_WAITING_SESSIONS} requests already wait for this model's sessions")
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (slot, session)
        self._waiting.append(waiter)
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled() and slot.done() and slot.exception() is None:
                self.leave(session)
            elif waiter in self._waiting:  # otherwise it was removed from the queue meanwhile
                self._waiting.remove(waiter)
                self._next()  # requests behind it may have had room all along
            raise

    def leave(self, session: str | None) -> None:
        """Record the end of a request; a named session stays held as an idle one."""
        if session is None:
            self._num_ephemeral -= 1
        elif self._active[session] > 1:
            self._active[session] -= 1
        else:
            del self._active[session]
            self._idle[session] = None
        self._next()

    def holds(self, session: str) -> bool:
        return session in self._active or session in self._idle

    def drop(self, session: str) -> bool:
        """Evict an idle session; returns True if it was held."""
        is_held = session in self._idle
        self._idle.pop(session, None)
        if is_held:
            self._next()
        return is_held

    def resize(self, limit: int | None) -> None:
        """Set a new limit. It applies to new requests, and waiting requests may run now."""
        self.limit = limit
        self._next()

    def fail_all(self, error: LockstepError) -> None:
        """Fail all waiting requests with an error."""
        while self._waiting:
            slot, _ = self._waiting.popleft()
            if not slot.done():
                slot.set_exception(error)

    def _has_room(self, session: str | None) -> bool:
        limit = self.limit
        return limit is None or session in self._active or session in self._idle or self.num_active < limit

    @property
    def _num_excess(self) -> int:
        """Number of sessions held beyond the limit; without a limit, idle ones beyond `MAX_SESSIONS`."""
        return len(self._idle) - MAX_SESSIONS if self.limit is None else self.num_held - self.limit

    def _take(self, session: str | None) -> None:
        if session is None:
            self._num_ephemeral += 1
        else:
            self._idle.pop(session, None)
            self._active[session] = self._active.get(session, 0) + 1
        while self._idle and self._num_excess > 0:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._on_evicted(oldest)

    def _next(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][1]):
            slot, session = self._waiting.popleft()
            if not slot.done():
                self._take(session)
                slot.set_result(None)


class SessionUpdate(NamedTuple):
    """Update of a session at one gateway, for all other gateways. It contains ages, as the hosts' clocks differ."""

    id: str
    model: str
    age_s: float
    idle_s: float
    num_requests: int
    """Number of requests since the last report."""
    is_ended: bool = False


class Sessions:
    """All sessions of a cluster: named ones, and those of requests without a session id.

    Args:
        is_shared: whether other gateways serve the same models and receive updates about these sessions.
    """

    def __init__(self, is_shared: bool = False) -> None:
        self.by_id: dict[str, Session] = {}
        """Named sessions by key, least recently used first."""
        self._num_ephemeral = 0
        self._is_shared = is_shared
        self._unreported: dict[str, int] = {}
        """Number of requests since the last report, by session that has changed since then."""

    @property
    def num_live(self) -> int:
        """Number of sessions with open requests or with KV on the device."""
        return self._num_ephemeral + sum(bool(each.num_active or each.is_held) for each in self.by_id.values())

    def begin(self, id_: str | None, model: str, now_s: float) -> bool:
        """Count a request of a session; returns True if this creates a named session."""
        if id_ is None:
            self._num_ephemeral += 1
            return False
        session = self.by_id.pop(id_, None)
        is_new = session is None
        if session is None:
            session = Session(id_, model, now_s, now_s)
        self.by_id[id_] = session
        session.model, session.last_used_s = model, now_s
        session.is_held, session.is_evicted = True, False
        session.num_requests += 1
        session.num_active += 1
        self._change(id_, 1)
        return is_new

    def accepted(self, id_: str | None) -> None:
        """Record that a model has accepted a request of a session."""
        if (session := self.by_id.get(id_ or "")) is not None:
            session.is_accepted = True

    def store(self, id_: str, model: str, stored: StoredTokens, now_s: float) -> None:
        """Record the tokens of a session that a model stores outside of the device. The session may predate this
        server."""
        session = self.by_id.get(id_)
        if session is None and stored.total and len(self.by_id) < MAX_SESSIONS:
            session = self.by_id[id_] = Session(id_, model, now_s, now_s, is_held=False, is_accepted=True)
        if session is not None:
            session.stored[model] = stored

    def forget_refused(self, id_: str) -> bool:
        """Forget a session if no request of it was ever accepted and none is open; returns whether it was forgotten."""
        session = self.by_id.get(id_)
        if session is None or session.is_accepted or session.num_active:
            return False
        del self.by_id[id_]
        return True

    def end(self, id_: str | None, now_s: float) -> None:
        """Count the end of a request, whatever its result."""
        if id_ is None:
            self._num_ephemeral -= 1
        elif (session := self.by_id.get(id_)) is not None:
            session.num_active = max(0, session.num_active - 1)  # a session that was ended and recreated counts its own
            session.last_used_s = now_s
            self._change(id_, 0)

    def forget(self, id_: str) -> None:
        """Forget a session that was ended."""
        del self.by_id[id_]
        self._change(id_, 0)

    # -- other gateways -----------------------------------------------------------------------------------------------

    def _change(self, id_: str, num_requests: int) -> None:
        if self._is_shared and (id_ in self._unreported or len(self._unreported) < MAX_SESSIONS):
            self._unreported[id_] = self._unreported.get(id_, 0) + num_requests

    def take_updates(self, now_s: float) -> tuple[SessionUpdate, ...]:
        """Return the updates since the last report."""
        unreported, self._unreported = self._unreported, {}
        found = []
        for id_, num_requests in unreported.items():
            session = self.by_id.get(id_)
            if session is None:
                found.append(SessionUpdate(id_, "", 0.0, 0.0, num_requests, is_ended=True))
                continue
            idle_s = 0.0 if session.num_active else now_s - session.last_used_s
            found.append(SessionUpdate(id_, session.model, now_s - session.began_s, idle_s, num_requests))
        return tuple(found)

    def apply_updates(self, news: Iterable[SessionUpdate], now_s: float) -> None:
        """Apply updates from other gateways, so that a session that continues here is found and its KV is not evicted
        as idle."""
        for each in news:
            session = self.by_id.get(each.id)
            if each.is_ended:
                if session is not None and not session.num_active:
                    del self.by_id[each.id]
                continue
            if session is None:
                if len(self.by_id) >= MAX_SESSIONS:
                    continue
                began_s, used_s = now_s - each.age_s, now_s - each.idle_s
                session = self.by_id[each.id] = Session(each.id, each.model, began_s, used_s, is_accepted=True)
            session.num_requests += each.num_requests
            session.last_used_s = max(session.last_used_s, now_s - each.idle_s)

    def idle(self, limits: SessionLimits, now_s: float) -> list[Session]:
        """Sessions that have been idle long enough for their KV to be evicted. Sessions beyond `MAX_SESSIONS` are
        forgotten."""
        excess = len(self.by_id) - MAX_SESSIONS
        for session in list(self.by_id.values())[: max(0, excess)]:
            if not session.num_active and not session.is_held:
                del self.by_id[session.id]
        threshold_s = limits.idle_threshold_s
        if threshold_s is None:
            return []
        return [
            session
            for session in self.by_id.values()
            if session.is_held
            and not session.num_active
            and now_s - session.last_used_s >= threshold_s
            and now_s - session.began_s >= limits.min_lifetime_s
        ]

    def snapshot(self, now_s: float) -> tuple[SessionSnapshot, ...]:
        return tuple(session.snapshot(now_s) for session in self.by_id.values())
