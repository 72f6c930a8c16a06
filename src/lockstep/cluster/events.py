"""Event log of a cluster: keeps a limited number of events, which any number of clients read at their own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

from lockstep.system import SYSTEM

MAX_KEPT_EVENTS = 1024
"""Number of kept events: a client may lag behind by this many, or catch up with them after a disconnection. Older
events are lost."""
LAGGED = "lagged"
CALLER = "name of the API key of the request, shown to that key and to admins only; empty: the request had no key"

EVENTS: Mapping[str, Mapping[str, str]] = {
    "tier_changed": {
        "model": "id in the manifest",
        "replica": "key of its replica",
        "from": "previous state: resident, standby, loading, unloading or failed",
        "to": "new state",
        "reason": "short reason of the change",
        "duration_ms": "duration of the previous state; 0 when a load or unload starts",
    },
    "hop": {
        "caller": CALLER,
        "model": "model that answered",
        "completion": "its answer",
        "intent": "value that the rule read from it; null: none of the rule's values",
        "target": "model that answers next; null: none",
        "duration_ms": "time from submission to the end of the hop",
    },
    "session_admitted": {"caller": CALLER, "session": "its id", "model": "model of its first request"},
    "session_evicted": {
        "caller": CALLER,
        "session": "its id; one event until its next request, even if several models held its KV",
        "model": "model that evicted its KV; of several, the one that answered last",
        "reason": "room: evicted for another session; idle: unused for too long; unloaded: with its model; worker lost",
    },
    "co_activation_warmed": {"model": "id of the warmed model", "by": "model whose requests warm it"},
    "manifest_replacing": {"cluster": "cluster name in the new manifest"},
    "manifest_replaced": {
        "cluster": "cluster name in the manifest that now applies",
        "error": "reason why the new manifest was not applied; null: it was",
        "duration_ms": "time from the request to the end of draining",
    },
    "worker_restarted": {"reason": "how the device worker ended"},
    "replica_lost": {"replica": "key of the group that has lost its last replica on any host"},
    "kv_rejected": {"reason": "which stored KV is damaged or belongs to another model; it is computed again"},
    "step": {
        "replica": "key of the replica",
        "step": "number of the step",
        "num_sequences": "number of its sequences",
        "num_tokens": "number of computed tokens, of prompts and of answers",
        "num_samples": "number of sequences that got a token",
        "duration_ms": "duration of the whole step",
        "num_unreported": "number of steps since the last reported one",
    },
    LAGGED: {"num_lost": "number of events that this client missed because it read too slowly"},
}
"""Fields of each event type, with descriptions; `EventLog.emit` accepts no others.

Steps are sampled, and only while a client watches them. All other events are complete.
"""


class ClusterEvent(msgspec.Struct, frozen=True):
    """One event of a cluster."""

    id: int
    """Consecutive id from 1, so that a client that reconnects can continue after the last event it has read."""
    at_s: float
    """Unix time."""
    type: str
    fields: Mapping[str, Any]

    def concerns(self, caller: str) -> bool:
        """True if a caller may see the event, by the name of the caller's API key: the event belongs to the caller's
        own request, or to none."""
        return bool(self.fields.get("caller", caller) == caller)


class EventLog:
    """Event log, written and read on one event loop."""

    def __init__(self, unix_time_s: Callable[[], float] = SYSTEM.unix_time_s) -> None:
        self.unix_time_s = unix_time_s
        self._kept: deque[ClusterEvent] = deque(maxlen=MAX_KEPT_EVENTS)
        self._last_id = 0
        self._waiting: list[asyncio.Future[None]] = []
        """Waiting clients that have read all events."""
        self.num_watchers = 0

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0: there is none."""
        return self._last_id

    def emit(self, type_: str, /, **fields: Any) -> None:
        """Append an event. Fields that `EVENTS` does not list are a programming error.

        ``from`` is a Python keyword: write ``from_``.
        """
        fields = {name.rstrip("_"): value for name, value in fields.items()}
        assert fields.keys() == EVENTS[type_].keys(), f"{type_} has the fields {', '.join(EVENTS[type_])}"
        self._last_id += 1
        self._kept.append(ClusterEvent(self._last_id, self.unix_time_s(), type_, fields))
        waiting, self._waiting = self._waiting, []
        for watcher in waiting:
            if not watcher.done():
                watcher.set_result(None)

    async def subscribe(self, after_id: int | None = None) -> AsyncGenerator[ClusterEvent, None]:
        """Yield events as they happen, without end.

        Args:
            after_id: id of the last event already read; None: only new events are returned.
        """
        read_id = self._last_id if after_id is None else min(max(after_id, 0), self._last_id)
        self.num_watchers += 1
        try:
            while True:
                num_lost = self._last_id - len(self._kept) - read_id
                if num_lost > 0:
                    read_id += num_lost
                    yield ClusterEvent(read_id, self.unix_time_s(), LAGGED, {"num_lost": num_lost})
                elif read_id < self._last_id:
                    event = self._kept[read_id - self._last_id]
                    read_id = event.id
                    yield event
                else:
                    await self._more()
        finally:
            self.num_watchers -= 1

    async def _more(self) -> None:
        more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(more)
        try:
            await more
        finally:
            if more in self._waiting:
                self._waiting.remove(more)
