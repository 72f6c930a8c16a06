"""Recording of routes: all inputs of each group's balancer, in order, and its choices.

A file is a sequence of zstd frames with checksums, as those of the device (worker/flight/entries.py), and has lines of
JSON. The first is a `RouteHeader`; then comes a `GroupOpened` with its state for each group that is there, so that a
file can be understood without those before it; then one line for each call, as its class below says. Now and then, and
behind every choice, comes a mark (`lockstep.cluster.marked_lines`).

Contents are numbered as they come, and no hash is written; a session is a digest under the recording's key
(worker/flight/content.py), and its name is nowhere. Both mean the same in all files of one run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec

import msgspec

from lockstep.cluster.marked_lines import Marker
from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy, bits_of
from lockstep.core.prefix import ContentNews
from lockstep.version import __version__
from lockstep.worker.flight.content import Digests
from lockstep.worker.flight.entries import Runs, runs_of
from lockstep.worker.flight.files import TraceFiles
from lockstep.worker.flight.options import TraceOptions

log = logging.getLogger(__name__)

ROUTE_SCHEMA_VERSION = 2
ROUTE_SUFFIX = ".lsroutes"
SHARE = 4
"""Routes get one part in so many of the bytes that a recording may take, in addition."""
MAX_PENDING_BYTES = 1 << 14
"""Lines that are handed over together; a choice is handed over at once, with the inputs before it."""
MAX_CONTENTS = 1 << 19
"""Contents that the beginning of a file writes down, of all groups together, replica by replica."""
DEFECT = "the recorder of routes has a defect, which the log tells"
NO_REPLICA = -1
"""The replica of a request where none was there."""
TOO_LARGE = f"replicas hold more than {MAX_CONTENTS:,} blocks, more than the beginning of a file of routes can have"


Arguments = ParamSpec("Arguments")


class RouteHeader(msgspec.Struct, frozen=True):
    """Header of a file."""

    schema: int
    lockstep: str
    run: str
    file: int
    gap: str = ""
    """Why routes before it are in no file; empty: it goes on where the file before it ends."""
    key_name: str = ""
    """Of the key of its digests, as in a device's recording."""


class _Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    group: int
    """Groups are numbered as they are opened; one that is opened again has another number."""


class Opened(_Line, frozen=True, tag="opened"):
    """A group of replicas, all of them there; in the place of one of its key, if there is one."""

    key: str
    num: int
    policy: str
    max_imbalance: int


class Resumed(_Line, frozen=True, tag="resumed"):
    """A group as it is where the file begins; see `lockstep.core.balancer.BalancerState`."""

    key: str
    policy: str
    max_imbalance: int
    loads: tuple[int, ...]
    there: Runs
    last: int
    contents: tuple[Runs, ...]
    """By replica."""
    sessions: tuple[tuple[str, int], ...]


class Admitted(_Line, frozen=True, tag="admitted"):
    """A replica gets requests."""

    replica: int


class Withdrawn(_Line, frozen=True, tag="withdrawn"):
    """A replica gets no requests."""

    replica: int
    is_lost: bool


class Learned(_Line, frozen=True, tag="learned"):
    """News of a replica's contents."""

    replica: int
    news: tuple[Runs, ...]
    """What can be found from now on, what no longer can, what can, and so on."""


class Ended(_Line, frozen=True, tag="ended"):
    """A request that a replica was given is open no longer."""

    replica: int


class Chosen(_Line, frozen=True, tag="chosen"):
    """A route: the request and the decision."""

    contents: Runs
    """Of the prompt's beginning, as far as any replica holds them."""
    num_blocks: int
    """Of the whole prompt."""
    session: str | None
    replica: int
    """`NO_REPLICA`: none was there."""
    why: str
    num_cached: int


Entry = Opened | Resumed | Admitted | Withdrawn | Learned | Ended | Chosen


class _Group:
    """A group as it is recorded: a balancer with the inputs of the group's own, and the numbers of its contents."""

    def __init__(self, number: int, key: str, balancer: Balancer) -> None:
        self.number = number
        self.key = key
        self.balancer = balancer
        self._numbers: dict[bytes, int] = {}
        """Of contents that any replica holds."""
        self._next = 0

    @property
    def num_held(self) -> int:
        """Contents, replica by replica."""
        return sum([self.balancer.num_held(replica) for replica in range(self.balancer.num_replicas)])

    def choose(self, hashes: Sequence[bytes], session: str | None) -> Runs:
        """Numbers of the prompt's beginning, as far as any replica holds it."""
        numbers: list[int] = []
        for each in hashes:
            number = self._numbers.get(each)
            if number is None:
                break
            numbers.append(number)
        self.balancer.choose(hashes, session)
        return runs_of(numbers)

    def learn(self, replica: int, news: Sequence[ContentNews]) -> tuple[Runs, ...]:
        """News by numbers, in turns."""
        turns: list[list[int]] = [[]]
        for content, is_held in news:
            if is_held is not bool(len(turns) % 2):
                turns.append([])
            if content not in self._numbers:
                self._numbers[content] = self._next
                self._next += 1
            turns[-1].append(self._numbers[content])
        self.balancer.learn(replica, news)
        self._forget(content for content, is_held in news if not is_held)
        return tuple(map(runs_of, turns))

    def withdraw(self, replica: int, is_lost: bool) -> None:
        self.balancer.withdraw(replica, is_lost)
        if is_lost:
            self._forget(tuple(self._numbers))

    def _forget(self, contents: Iterable[bytes]) -> None:
        for each in contents:
            if not self.balancer.is_held(each):
                self._numbers.pop(each, None)

    def resumed(self, name_of: Callable[[str], str]) -> Resumed:
        """The group as the beginning of a file has it."""
        state = self.balancer.state()
        contents: list[list[int]] = [[] for _ in state.loads]
        for content, holders in state.holders.items():
            for replica in bits_of(holders):
                contents[replica].append(self._numbers[content])
        return Resumed(
            self.number,
            self.key,
            self.balancer.policy.value,
            self.balancer.max_imbalance,
            state.loads,
            runs_of(bits_of(state.there)),
            state.last,
            tuple([runs_of(sorted(each)) for each in contents]),
            tuple([(name_of(name), replica) for name, replica in state.sessions]),
        )


Method = Callable[Concatenate["RouteRecorder", Arguments], None]


def _guarded(method: Method[Arguments]) -> Method[Arguments]:
    """A defect of the recorder ends the recording, and never a request."""

    @wraps(method)
    def call(self: RouteRecorder, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        if self.fault == DEFECT:
            return
        try:
            method(self, *arguments, **named)
        except Exception:  # whatever it is: requests are routed on
            log.exception("no routes are recorded from here on; requests are served all the same")
            self._fault = DEFECT

    return call


class RouteRecorder:
    """Writes every route, in a thread of its files; what cannot be written is reported once, and nothing waits for it.

    A `lockstep.hosts.group.RouteWatcher`: told by one thread, in order, what each group's balancer was told, and after
    it. It knows balancers by that alone, so that a file which begins later begins with what the files before it say.
    """

    def __init__(self, options: TraceOptions) -> None:
        share = msgspec.structs.replace(options, max_bytes=options.max_bytes // SHARE)
        self._files = TraceFiles(share, ROUTE_SUFFIX)
        self._digests = Digests(options.secret())
        self._encode = msgspec.json.Encoder().encode
        self._groups: dict[str, _Group] = {}
        self._num_groups = 0
        self._lines = bytearray()
        """Not handed over yet."""
        self._marker = Marker()
        self._fault = ""
        """Why nothing is being recorded, though files can be written."""

    @_guarded
    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None:
        """A group is there, with all its replicas, in the place of the one that had its key."""
        self._begin()
        self._num_groups += 1
        made = _Group(self._num_groups, group, Balancer(num_replicas, policy, max_imbalance))
        self._groups[group] = made
        self._put(Opened(made.number, group, num_replicas, policy.value, max_imbalance))

    @_guarded
    def admitted(self, group: str, replica: int) -> None:
        """Follow `Balancer.admit`; likewise the others."""
        found = self._begun(group)
        found.balancer.admit(replica)
        self._put(Admitted(found.number, replica))

    @_guarded
    def withdrawn(self, group: str, replica: int, is_lost: bool) -> None:
        found = self._begun(group)
        found.withdraw(replica, is_lost)
        self._put(Withdrawn(found.number, replica, is_lost))

    @_guarded
    def learned(self, group: str, replica: int, news: Sequence[ContentNews]) -> None:
        found = self._begun(group)
        self._put(Learned(found.number, replica, found.learn(replica, news)))

    @_guarded
    def ended(self, group: str, replica: int) -> None:
        found = self._begun(group)
        found.balancer.ended(replica)
        self._put(Ended(found.number, replica))

    @_guarded
    def chosen(self, group: str, hashes: Sequence[bytes], session: str | None, choice: RoutingChoice | None) -> None:
        found = self._begun(group)
        name = None if session is None else self._digests.session(session)
        replica, why, num_cached = (NO_REPLICA, "", 0) if choice is None else (choice[0], choice[1].value, choice[2])
        contents = found.choose(hashes, session)
        self._put(Chosen(found.number, contents, len(hashes), name, replica, why, num_cached))
        self._hand_over()

    @property
    def fault(self) -> str:
        """Reason why nothing is being recorded now; empty: it is."""
        return self._fault or self._files.report().fault

    def close(self) -> None:
        """Write what is left, within a bounded time."""
        self._hand_over()
        self._files.close()

    # -- files ----------------------------------------------------------------------------------------------------

    def _begun(self, group: str) -> _Group:
        """The group that something is about to happen to; a file is begun before it, if one is due."""
        self._begin()
        return self._groups[group]

    def _begin(self) -> None:
        files = self._files
        if not files.wants_file():
            return
        self._hand_over()
        gap = files.gap or self._fault
        groups = self._groups.values()
        if sum([each.num_held for each in groups]) > MAX_CONTENTS:
            if not self._fault:
                log.warning("no routes are recorded: %s; requests are served all the same", TOO_LARGE)
            self._fault = TOO_LARGE
            return
        self._fault = ""
        header = RouteHeader(
            ROUTE_SCHEMA_VERSION,
            __version__,
            files.run,
            files.num_files + 1,
            gap,
            self._digests.key_name,
        )
        self._marker = Marker()
        entries = [header, *(each.resumed(self._digests.session) for each in groups)]
        files.begin(self._marker.marked(b"".join([self._encode(each) + b"\n" for each in entries])))

    def _put(self, entry: Entry) -> None:
        if not self._files.is_open or self._fault:
            return
        self._lines += self._encode(entry)
        self._lines += b"\n"
        if len(self._lines) >= MAX_PENDING_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        lines = bytes(self._lines)
        self._lines.clear()
        if lines and self._files.is_open:
            self._files.put(self._marker.marked(lines))
