"""Client of a running cluster: reads its snapshot, and has threads that update it for `lockstep top`."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.cluster.cluster_stats import MAX_WINDOW_S, ClusterStats
from lockstep.cluster.events import EVENTS, LAGGED, ClusterEvent
from lockstep.cluster.snapshot import ClusterSnapshot
from lockstep.errors import LockstepError, RemoteError
from lockstep.server.request_rows import RequestList, RequestRow

Struct = TypeVar("Struct", bound=msgspec.Struct)
SILENCE_LIMIT_S = 10.0
"""Seconds without an answer after which a server is shown as unreachable."""
MAX_EVENTS = 200
"""Maximum number of retained events, more than a terminal shows."""
_EVENTS = "/v1/events?after=0" + "".join(f"&type={each}" for each in EVENTS if each not in ("step", LAGGED))
"""Path of all events except steps, of which there are hundreds per second."""


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """State of a server at one moment."""

    cluster: ClusterSnapshot
    stats: ClusterStats
    status: str
    """Status of its health, e.g. ``ready``."""
    version: str
    requests: tuple[RequestRow, ...] | None = None
    """Requests, the newest first; None: the server does not list single requests."""


@dataclass(frozen=True, slots=True)
class View:
    """Content of the screen: the newest state of the server, its events, and an error if it cannot be reached."""

    url: str
    server: ServerSnapshot
    events: tuple[ClusterEvent, ...] = ()
    """Events, the oldest first; empty: only the transitions of the cluster's snapshot are shown."""
    error: str = ""
    """Reason why the server cannot be reached; empty: it can."""


def cluster_of(remote: RemoteServer) -> ClusterSnapshot:
    """Read the snapshot of a server's cluster; RemoteError, with the reason, if that fails."""
    answer = remote.get("/v1/cluster")
    try:
        return msgspec.convert(answer, ClusterSnapshot)
    except msgspec.ValidationError as error:
        url = remote.target.url
        raise RemoteError(f"{url} returned a snapshot that this version cannot read ({error})") from None


def read_server(remote: RemoteServer, interval_s: float) -> ServerSnapshot:
    """Read the state of a server, with rates over the interval; RemoteError, with the reason, if that fails."""
    cluster = cluster_of(remote)
    stats = decoded(remote.get_text(f"/v1/stats?window_s={min(interval_s, MAX_WINDOW_S)}")[1], ClusterStats)
    health = _object(remote.get_text("/health")[1])
    version = _object(remote.get_text("/version")[1])
    requests = decoded(remote.get_text("/v1/requests")[1], RequestList)
    return ServerSnapshot(
        cluster,
        ClusterStats(None, None, None, (), ()) if stats is None else stats,
        str(health.get("status", "?")),
        str(version.get("version", "?")),
        None if requests is None else requests.data,
    )


def transitions(cluster: ClusterSnapshot) -> tuple[ClusterEvent, ...]:
    """Tier changes of a snapshot, as events."""
    return tuple(ClusterEvent(0, each.at_s, "tier_changed", msgspec.to_builtins(each)) for each in cluster.transitions)


def events_in(lines: Iterable[str]) -> Iterator[ClusterEvent]:
    """Events of a stream of server-sent events; invalid ones are skipped."""
    head: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "data":
            fields = _object(value)
            with suppress(msgspec.ValidationError):
                event = {**head, "at_s": fields.pop("at_s", None), "fields": fields}
                yield msgspec.convert(event, ClusterEvent, strict=False)
        elif name in ("id", "event"):
            head["type" if name == "event" else name] = value


def decoded(text: str, struct: type[Struct]) -> Struct | None:
    """Decode the answer of a server; None if it has another form, such as an error of an older server."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=struct)
    return None


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty if the text is not one."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class TopClient:
    """Newest state and events of one server, updated by two daemon threads.

    Args:
        target: the server.
        interval_s: seconds between two updates, and between two attempts to reach the server.
        first: first state, which the caller has read to check that the server can be reached.
        changed: called by the threads after each change.
    """

    target: Target
    interval_s: float
    first: ServerSnapshot
    changed: Callable[[], None]
    _view: View = field(init=False)
    _events: deque[ClusterEvent] = field(init=False, default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._view = View(self.target.url, self.first)

    def start(self) -> None:
        """Start both threads."""
        for work, name in ((self._read, "snapshots"), (self._watch, "events")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def view(self) -> View:
        """The newest state and events."""
        with self._lock:
            return replace(self._view, events=tuple(self._events))

    def _read(self) -> None:
        with RemoteServer(self.target, SILENCE_LIMIT_S) as remote:
            while True:
                time.sleep(self.interval_s)
                try:
                    server = read_server(remote, self.interval_s)
                except LockstepError as error:
                    with self._lock:
                        self._view = replace(self._view, error=str(error))
                else:
                    with self._lock:
                        self._view = View(self.target.url, server)
                self.changed()

    def _watch(self) -> None:
        """Read the events. After a reconnection all events are requested again, because a new server numbers from 1."""
        with RemoteServer(self.target) as remote:
            while True:
                try:
                    lines = remote.follow(_EVENTS)
                    next(lines, "")  # a comment, which the server sends at the connection
                    with self._lock:
                        self._events.clear()
                    for event in events_in(lines):
                        with self._lock:
                            self._events.append(event)
                except LockstepError:
                    pass  # the other thread reports the error
                time.sleep(self.interval_s)
