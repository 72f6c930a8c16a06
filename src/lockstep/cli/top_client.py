"""Client of `lockstep top`: threads that read a running server again and again, and the newest state of both."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from lockstep.bench.protocol import Target
from lockstep.bench.remote import Remote
from lockstep.cluster.cluster_stats import MAX_WINDOW_S, ClusterStats
from lockstep.cluster.snapshot import ClusterSnapshot
from lockstep.errors import LockstepError, RemoteError

SILENCE_LIMIT_S = 10.0
"""A server that does not answer for so long is shown as gone."""
MAX_EVENTS = 200
"""The latest that are kept; no terminal shows more."""
_EVENT_TYPES = (
    *("tier_changed", "hop", "session_admitted", "session_evicted", "co_activation_warmed", "manifest_replacing"),
    *("manifest_replaced", "kv_rejected", "worker_restarted"),
)
"""All but steps, of which there are hundreds a second."""
_EVENTS = "/v1/events?after=0" + "".join(f"&type={each}" for each in _EVENT_TYPES)


class Event(NamedTuple):
    """One thing that happened."""

    at_s: float
    """Unix time of the server."""
    type: str
    fields: Mapping[str, Any]


class RequestWait(msgspec.Struct, frozen=True):
    """A reason for which a request waited."""

    reason: str


class RequestReplay(msgspec.Struct, frozen=True):
    """A sequence of a request in a recording."""

    sequence: int
    step: int
    command: str | None = None
    """None: it is not for this caller to know."""


class RequestRow(msgspec.Struct, frozen=True):
    """A request as `GET /v1/requests` shows it, as far as it is shown here. None: not known, or not yet."""

    id: str
    state: str
    model: str | None = None
    session_id: str | None = None
    error: str | None = None
    finish_reasons: tuple[str, ...] = ()
    waited_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float = 0.0
    tokens_per_second: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    waits: tuple[RequestWait, ...] = ()
    replay: tuple[RequestReplay, ...] = ()


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
    events: tuple[Event, ...] = ()
    """Oldest first; empty: only those of the reading itself."""
    trouble: str = ""
    """Why nothing newer is known; empty: it is."""


def take(remote: Remote, interval_s: float) -> Reading:
    """Ask a server for all that is shown, rates over about an interval; RemoteError states why it does not answer."""
    answer, told = remote.get("/v1/cluster"), remote.get_text(f"/v1/stats?window_s={min(interval_s, MAX_WINDOW_S)}")
    try:
        cluster = msgspec.convert(answer, ClusterSnapshot)
    except msgspec.ValidationError as error:
        url = remote.target.url
        raise RemoteError(f"{url} shows its cluster otherwise than this version reads it ({error})") from None
    try:
        stats = msgspec.json.decode(told[1], type=ClusterStats)
    except msgspec.DecodeError:  # an older server has none
        stats = ClusterStats(None, None, None, (), ())
    health = _object(remote.get_text("/health")[1])
    version = _object(remote.get_text("/version")[1])
    return Reading(
        *(cluster, stats, str(health.get("status", "?")), str(version.get("version", "?"))),
        requests_in(remote.get_text("/v1/requests")[1]),
    )


def requests_in(text: str) -> tuple[RequestRow, ...] | None:
    """The rows of a list of requests; None where it is something else, such as the refusal of an older server."""
    try:
        return msgspec.convert(_object(text).get("data"), tuple[RequestRow, ...])
    except msgspec.ValidationError:
        return None


def transitions(cluster: ClusterSnapshot) -> tuple[Event, ...]:
    """Changes of tier in a snapshot, as events."""
    return tuple(Event(each.at_s, "tier_changed", msgspec.to_builtins(each)) for each in cluster.transitions)


def events_in(lines: Iterable[str]) -> Iterator[Event]:
    """Events of a stream of server-sent events; what is none of ours is passed over."""
    kind = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            fields = _object(value)
            at_s = fields.pop("at_s", None)
            if isinstance(at_s, int | float):
                yield Event(at_s, kind, fields)


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
    _events: deque[Event] = field(init=False, default_factory=lambda: deque(maxlen=MAX_EVENTS))
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
        with Remote(self.target, SILENCE_LIMIT_S) as remote:
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
        with Remote(self.target) as remote:
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
