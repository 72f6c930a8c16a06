"""Client of a running cluster: its snapshot, and threads that keep the newest state of it for `lockstep top`."""

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
"""A server that does not answer for so long is shown as gone."""
MAX_EVENTS = 200
"""The latest that are kept; no terminal shows more."""
_EVENTS = "/v1/events?after=0" + "".join(f"&type={each}" for each in EVENTS if each not in ("step", LAGGED))
"""All but steps, of which there are hundreds a second."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A server at one moment."""

    cluster: ClusterSnapshot
    stats: ClusterStats
    status: str
    """``ready``, or another status of its health."""
    version: str
    requests: tuple[RequestRow, ...] | None = None
    """Newest first; None: the server does not list single requests."""


@dataclass(frozen=True, slots=True)
class View:
    """Input of a frame: readings, events and whether the server still answers."""

    url: str
    reading: Reading
    events: tuple[ClusterEvent, ...] = ()
    """Oldest first; empty: only those of the reading itself."""
    trouble: str = ""
    """Why nothing newer is known; empty: it is."""


def cluster_of(remote: RemoteServer) -> ClusterSnapshot:
    """The state of a server's cluster; RemoteError states why there is none."""
    answer = remote.get("/v1/cluster")
    try:
        return msgspec.convert(answer, ClusterSnapshot)
    except msgspec.ValidationError as error:
        url = remote.target.url
        raise RemoteError(f"{url} shows its cluster otherwise than this version reads it ({error})") from None


def take(remote: RemoteServer, interval_s: float) -> Reading:
    """Read all that is shown of a server, rates over about an interval; RemoteError states why it does not answer."""
    cluster = cluster_of(remote)
    stats = decoded(remote.get_text(f"/v1/stats?window_s={min(interval_s, MAX_WINDOW_S)}")[1], ClusterStats)
    health = _object(remote.get_text("/health")[1])
    version = _object(remote.get_text("/version")[1])
    requests = decoded(remote.get_text("/v1/requests")[1], RequestList)
    return Reading(
        cluster,
        ClusterStats(None, None, None, (), ()) if stats is None else stats,
        str(health.get("status", "?")),
        str(version.get("version", "?")),
        None if requests is None else requests.data,
    )


def transitions(cluster: ClusterSnapshot) -> tuple[ClusterEvent, ...]:
    """Changes of tier in a snapshot, as events."""
    return tuple(ClusterEvent(0, each.at_s, "tier_changed", msgspec.to_builtins(each)) for each in cluster.transitions)


def events_in(lines: Iterable[str]) -> Iterator[ClusterEvent]:
    """Events of a stream of server-sent events; unknown data is skipped."""
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
    """The answer of a server; None where it is something else, such as the refusal of an older server."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=struct)
    return None


def _object(text: str) -> dict[str, Any]:
    """The JSON object that a text is; empty: it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class TopClient:
    """Readings and events of one server as they come, from two threads that end with the process.

    Args:
        target: the server.
        interval_s: between two readings, and between two tries where it is gone.
        first: the first reading, which the caller took to check that the server can be reached.
        changed: called by the threads whenever there is something new.
    """

    target: Target
    interval_s: float
    first: Reading
    changed: Callable[[], None]
    _view: View = field(init=False)
    _events: deque[ClusterEvent] = field(init=False, default_factory=lambda: deque(maxlen=MAX_EVENTS))
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._view = View(self.target.url, self.first)

    def start(self) -> None:
        """Start both threads."""
        for work, name in ((self._read, "readings"), (self._watch, "events")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def view(self) -> View:
        """The newest readings and events."""
        with self._lock:
            return replace(self._view, events=tuple(self._events))

    def _read(self) -> None:
        with RemoteServer(self.target, SILENCE_LIMIT_S) as remote:
            while True:
                time.sleep(self.interval_s)
                try:
                    reading = take(remote, self.interval_s)
                except LockstepError as error:
                    with self._lock:
                        self._view = replace(self._view, trouble=str(error))
                else:
                    with self._lock:
                        self._view = View(self.target.url, reading)
                self.changed()

    def _watch(self) -> None:
        """Follow the events. A server that comes back counts them anew, so all of them are requested again."""
        with RemoteServer(self.target) as remote:
            while True:
                try:
                    lines = remote.follow(_EVENTS)
                    next(lines, "")  # a comment: it is connected
                    with self._lock:
                        self._events.clear()
                    for event in events_in(lines):
                        with self._lock:
                            self._events.append(event)
                except LockstepError:
                    pass  # the readings report it
                time.sleep(self.interval_s)
