"""Recording of routes: the inputs of each group's balancer, in order, and its choices.

The files have the format of a device's recording (`lockstep.worker.flight.entries`). After the header comes a `Resumed`
entry for each existing group, so that a file can be read without the files before it. Then comes one entry for each
call; the classes below document them.

Contents are numbered in the order of their first use, and no hash is written. A session is written as a digest under
the recording's key (worker/flight/content.py), never by name. Both are the same in all files of one run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy, bits_of
from lockstep.core.prefix import ContentNews
from lockstep.system import SYSTEM, System
from lockstep.worker.flight.content import Digests
from lockstep.worker.flight.entries import EntryStruct, Runs, runs_of
from lockstep.worker.flight.files import TraceReport
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.writer import RecordingWriter, guarded

log = logging.getLogger(__name__)

ROUTE_SUFFIX = ".lsroutes"
SHARE = 4
"""Size limit of route recordings, in addition to the device's: one part in this many of its limit."""
MAX_PENDING_BYTES = 1 << 14
"""Size of collected entries in bytes from which they are queued for the disk. A choice is queued at once, with the
entries before it."""
DEFECT = "a defect of the recorder ended the recording of routes; the log has the exception"
NO_REPLICA = -1
"""Number in place of the replica if none was available."""
TOO_LARGE = "replicas hold more than {:,} blocks, the maximum at the beginning of a file of routes"
"""Fault of a recorder whose replicas hold too many contents, counted for each replica of all groups."""


class _GroupEntry(EntryStruct, frozen=True):
    group: int
    """Number of the group, in order of opening. A group that is opened again has a new number."""


class Opened(_GroupEntry, frozen=True, tag=33):
    """A group was opened with all its replicas available; it replaces an earlier group with the same key."""

    key: str
    num: int
    policy: str
    max_imbalance: int


class Resumed(_GroupEntry, frozen=True, tag=34):
    """State of a group at the beginning of a file; see `lockstep.core.balancer.BalancerState`."""

    key: str
    policy: str
    max_imbalance: int
    loads: tuple[int, ...]
    there: Runs
    last: int
    contents: tuple[Runs, ...]
    """Numbers of the contents that each replica holds."""
    sessions: tuple[tuple[str, int], ...]


class Admitted(_GroupEntry, frozen=True, tag=35):
    """A replica was made available for requests."""

    replica: int


class Withdrawn(_GroupEntry, frozen=True, tag=36):
    """A replica was withdrawn, so that it gets no requests."""

    replica: int
    is_lost: bool


class Learned(_GroupEntry, frozen=True, tag=37):
    """The contents of a replica changed."""

    replica: int
    news: tuple[Runs, ...]
    """Numbers of contents in alternating groups: added, removed, added, and so on; the first may be empty."""


class Ended(_GroupEntry, frozen=True, tag=38):
    """A request at a replica has ended."""

    replica: int


class Chosen(_GroupEntry, frozen=True, tag=39):
    """A request was routed to a replica."""

    contents: Runs
    """Numbers of the prompt's contents, up to the first one that no replica holds."""
    num_blocks: int
    """Number of blocks of the whole prompt."""
    session: str | None
    replica: int
    """Number of the chosen replica; `NO_REPLICA`: none was available."""
    why: str
    num_cached: int


Entry = Opened | Resumed | Admitted | Withdrawn | Learned | Ended | Chosen


class _Group:
    """A group in the recording: a balancer that gets the group's calls, and the numbers of its contents."""

    def __init__(self, number: int, key: str, balancer: Balancer) -> None:
        self.number = number
        self.key = key
        self.balancer = balancer
        self._numbers: dict[bytes, int] = {}
        """Numbers of the contents that at least one replica holds."""
        self._next = 0

    @property
    def num_held(self) -> int:
        """Number of contents, counted for each replica."""
        return sum([self.balancer.num_held(replica) for replica in range(self.balancer.num_replicas)])

    def choose(self, hashes: Sequence[bytes], session: str | None) -> Runs:
        """Route a request, and return the numbers of its contents up to the first one that no replica holds."""
        numbers: list[int] = []
        for each in hashes:
            number = self._numbers.get(each)
            if number is None:
                break
            numbers.append(number)
        self.balancer.choose(hashes, session)
        return runs_of(numbers)

    def learn(self, replica: int, news: Sequence[ContentNews]) -> tuple[Runs, ...]:
        """Apply changes of contents, and return their numbers in alternating groups: added, removed, and so on."""
        groups: list[list[int]] = [[]]
        for content, is_held in news:
            if is_held is not bool(len(groups) % 2):
                groups.append([])
            if content not in self._numbers:
                self._numbers[content] = self._next
                self._next += 1
            groups[-1].append(self._numbers[content])
        self.balancer.learn(replica, news)
        self._forget(content for content, is_held in news if not is_held)
        return tuple(map(runs_of, groups))

    def withdraw(self, replica: int, is_lost: bool) -> None:
        self.balancer.withdraw(replica, is_lost)
        if is_lost:
            self._forget(tuple(self._numbers))

    def _forget(self, contents: Iterable[bytes]) -> None:
        for each in contents:
            if not self.balancer.is_held(each):
                self._numbers.pop(each, None)

    def resumed(self, name_of: Callable[[str], str]) -> Resumed:
        """State of the group for the beginning of a file."""
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


class RouteRecorder:
    """Records every route. A thread writes the files; a write error is reported once, and requests never wait for it.

    Implements `lockstep.hosts.group.RouteWatcher`: one thread calls it, in order, after each call of a balancer. It
    tracks the balancers from these calls alone, so a later file begins with the state that the earlier files lead to.
    """

    def __init__(self, options: TraceOptions, system: System = SYSTEM) -> None:
        self._digests = Digests(options.secret())
        self._writer = RecordingWriter(options.share(SHARE), ROUTE_SUFFIX, self._digests.key_name, system)
        self._files = self._writer.files
        self._max_contents = 2 * options.max_contents
        self._too_large = TOO_LARGE.format(self._max_contents)
        self._groups: dict[str, _Group] = {}
        self._num_groups = 0
        self._fault = ""
        """Reason why nothing is being recorded although files can be written; empty: there is none."""

    @guarded
    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None:
        """Record that a group was opened with all its replicas, in place of an earlier one with the same key."""
        self._begin()
        self._num_groups += 1
        made = _Group(self._num_groups, group, Balancer(num_replicas, policy, max_imbalance))
        self._groups[group] = made
        self._put(Opened(made.number, group, num_replicas, policy.value, max_imbalance))

    @guarded
    def admitted(self, group: str, replica: int) -> None:
        """Record a call of `Balancer.admit`. The next methods do the same for other calls."""
        found = self._begun(group)
        found.balancer.admit(replica)
        self._put(Admitted(found.number, replica))

    @guarded
    def withdrawn(self, group: str, replica: int, is_lost: bool) -> None:
        found = self._begun(group)
        found.withdraw(replica, is_lost)
        self._put(Withdrawn(found.number, replica, is_lost))

    @guarded
    def learned(self, group: str, replica: int, news: Sequence[ContentNews]) -> None:
        found = self._begun(group)
        self._put(Learned(found.number, replica, found.learn(replica, news)))

    @guarded
    def ended(self, group: str, replica: int) -> None:
        found = self._begun(group)
        found.balancer.ended(replica)
        self._put(Ended(found.number, replica))

    @guarded
    def chosen(self, group: str, hashes: Sequence[bytes], session: str | None, choice: RoutingChoice | None) -> None:
        found = self._begun(group)
        name = None if session is None else self._digests.session(session)
        replica, why, num_cached = (NO_REPLICA, "", 0) if choice is None else (choice[0], choice[1].value, choice[2])
        contents = found.choose(hashes, session)
        self._put(Chosen(found.number, contents, len(hashes), name, replica, why, num_cached))
        self._writer.flush()

    @property
    def fault(self) -> str:
        """Reason why nothing is being recorded now; empty: it is."""
        return self.report().fault

    def report(self) -> TraceReport:
        """State of the recording."""
        report = self._files.report()
        return replace(report, fault=self._fault) if self._fault else report

    def close(self) -> None:
        """Write the queued entries, within a limited time."""
        if self._fault == DEFECT:
            self._files.close()
        else:
            self._writer.close()

    def give_up(self) -> None:
        """End the recording after a defect of the recorder, and log it once. Called within an ``except``."""
        if self._fault != DEFECT:
            log.exception("no routes are recorded from here on; requests are not affected")
        self._fault = DEFECT

    # -- files ----------------------------------------------------------------------------------------------------

    def _begun(self, group: str) -> _Group:
        """Return a group that is about to change, after beginning a file if one is due."""
        self._begin()
        return self._groups[group]

    def _begin(self) -> None:
        if self._fault == DEFECT or not self._files.wants_file():
            return
        if sum([each.num_held for each in self._groups.values()]) > self._max_contents:
            if not self._fault:
                log.warning("no routes are recorded: %s; requests are not affected", self._too_large)
            self._fault = self._too_large
            return
        self._writer.end(goes_on=True)
        self._writer.begin(self._put_state, gap=self._fault)
        self._fault = ""

    def _put_state(self) -> None:
        for group in self._groups.values():
            self._writer.chunk.put(group.resumed(self._digests.session))

    def _put(self, entry: _GroupEntry) -> None:
        if self._files.is_open and not self._fault:
            self._writer.chunk.put(entry)
            if self._writer.chunk.num_bytes >= MAX_PENDING_BYTES:
                self._writer.flush()
