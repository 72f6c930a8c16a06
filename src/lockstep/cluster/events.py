"""Event log of a cluster: bounded, and read by any number of watchers at their own pace."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec

MAX_KEPT_EVENTS = 1024
"""What a watcher may lag behind, or catch up with after it was away; older events are gone."""
LAGGED = "lagged"
CALLER = "name of the API key whose request it was, which alone sees it beside admins; empty: it came without one"

EVENTS: Mapping[str, Mapping[str, str]] = {
    "tier_changed": {
        "model": "id in the manifest",
        "replica": "key of the replica that it shares",
        "from": "state before: resident, standby, loading, unloading or failed",
        "to": "state after",
        "reason": "why, in a few words",
        "duration_ms": "how long the change took; 0 at its beginning",
    },
    "hop": {
        "caller": CALLER,
        "model": "the model that answered",
        "completion": "its answer",
        "intent": "the value that the rule read from it; null: none of the rule's values",
        "target": "the model that answers next; null: none",
        "duration_ms": "submission to the end of the hop",
    },
    "session_admitted": {"caller": CALLER, "session": "its id", "model": "where it began"},
    "session_evicted": {
        "caller": CALLER,
        "session": "its id; once, however many models held it, until its next request",
        "model": "who gave up its KV; of several at once, the one that answered last",
        "reason": "room: another session took its place; idle: unused for long; unloaded: with its model; worker lost",
    },
    "co_activation_warmed": {"model": "id of the warmed model", "by": "the model whose requests warm it"},
    "manifest_replacing": {"cluster": "name in the new manifest"},
    "manifest_replaced": {
        "cluster": "name in the manifest that holds now",
        "error": "why the new one does not hold; null: it does",
        "duration_ms": "from the text to the end of draining",
    },
    "worker_restarted": {"reason": "what the device worker ended with"},
    "replica_lost": {"replica": "key of the group of which no replica is there, on any host"},
    "kv_rejected": {"reason": "which kept KV is not what was written, or not of what is loaded; it is computed again"},
    "step": {
        "replica": "key of the replica that stepped",
        "step": "number of its step",
        "num_sequences": "sequences in it",
        "num_tokens": "tokens that it computed, of prompts and of answers",
        "num_samples": "sequences that got a token",
        "duration_ms": "of the forward pass and all around it",
        "num_unreported": "steps of the replica since the last one that was reported",
    },
    LAGGED: {"num_lost": "events that this watcher was too slow for"},
}
"""Every type with its fields; `EventLog.emit` takes no others.

Steps are sampled while somebody watches; all else is told whole.
"""


class ClusterEvent(msgspec.Struct, frozen=True):
    """One thing that happened."""

    id: int
    """Consecutive from 1, so that who was away can say where to go on."""
    at_s: float
    """Unix time."""
    type: str
    fields: Mapping[str, Any]

    def concerns(self, caller: str) -> bool:
        """True if a caller may see it, by the name of its key: it is about its own request, or about no request."""
        return bool(self.fields.get("caller", caller) == caller)


class EventLog:
    """Written and read on one event loop."""

    def __init__(self, unix_time_s: Callable[[], float] = time.time) -> None:
        self.unix_time_s = unix_time_s
        self._kept: deque[ClusterEvent] = deque(maxlen=MAX_KEPT_EVENTS)
        self._last_id = 0
        self._waiting: list[asyncio.Future[None]] = []
        """Watchers who have read everything."""
        self.num_watchers = 0

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0: nothing has happened."""
        return self._last_id

    def emit(self, type_: str, /, **fields: Any) -> None:
        """Append an event; fields that the table does not have are a programming error.

        ``from`` is a word of Python: write ``from_``.
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
        """Events as they happen, without end.

        Args:
            after_id: begin behind this event, with what happened since; None: with what happens from now on.
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
