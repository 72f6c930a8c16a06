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

from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy, bits_of
from lockstep.core.prefix import ContentNews
from lockstep.system import SYSTEM, System
from lockstep.worker.flight.content import Digests
from lockstep.worker.flight.entries import EntryStruct, Runs, runs_of
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.writer import RecordingWriter, guarded

log = logging.getLogger(__name__)

ROUTE_SUFFIX = ".lsroutes"
SHARE = 4
"""Routes get one part in so many of the bytes that a recording may take, in addition."""
MAX_PENDING_BYTES = 1 << 14
"""Entries that are handed over together; a choice is handed over at once, with the inputs before it."""
MAX_CONTENTS = 1 << 19
"""Contents that the beginning of a file writes down, of all groups together, replica by replica."""
DEFECT = "the recorder of routes has a defect, which the log tells"
NO_REPLICA = -1
"""The replica of a request where none was there."""
TOO_LARGE = f"replicas hold more than {MAX_CONTENTS:,} blocks, more than the beginning of a file of routes can have"


class _GroupEntry(EntryStruct, frozen=True):
    group: int
    """Groups are numbered as they are opened; one that is opened again has another number."""


class Opened(_GroupEntry, frozen=True, tag=33):
    """A group of replicas, all of them there; in the place of one of its key, if there is one."""

    key: str
    num: int
    policy: str
    max_imbalance: int


class Resumed(_GroupEntry, frozen=True, tag=34):
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


class Admitted(_GroupEntry, frozen=True, tag=35):
    """A replica gets requests."""

    replica: int


class Withdrawn(_GroupEntry, frozen=True, tag=36):
    """A replica gets no requests."""

    replica: int
    is_lost: bool


class Learned(_GroupEntry, frozen=True, tag=37):
    """News of a replica's contents."""

    replica: int
    news: tuple[Runs, ...]
    """What can be found from now on, what no longer can, what can, and so on."""


class Ended(_GroupEntry, frozen=True, tag=38):
    """A request that a replica was given is open no longer."""

    replica: int


class Chosen(_GroupEntry, frozen=True, tag=39):
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


class RouteRecorder:
    """Records every route. A thread writes the files; a write error is reported once, and requests never wait for it.

    Implements `lockstep.hosts.group.RouteWatcher`: one thread calls it, in order, after each call of a balancer. It
    tracks the balancers from these calls alone, so a later file begins with the state that the earlier files lead to.
    """

    def __init__(self, options: TraceOptions, system: System = SYSTEM) -> None:
        self._digests = Digests(options.secret())
        self._writer = RecordingWriter(options.share(SHARE), ROUTE_SUFFIX, self._digests.key_name, system)
        self._files = self._writer.files
        self._groups: dict[str, _Group] = {}
        self._num_groups = 0
        self._fault = ""
        """Why nothing is being recorded, though files can be written."""

    @guarded
    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None:
        """A group is there, with all its replicas, in the place of the one that had its key."""
        self._begin()
        self._num_groups += 1
        made = _Group(self._num_groups, group, Balancer(num_replicas, policy, max_imbalance))
        self._groups[group] = made
        self._put(Opened(made.number, group, num_replicas, policy.value, max_imbalance))

    @guarded
    def admitted(self, group: str, replica: int) -> None:
        """Follow `Balancer.admit`; likewise the others."""
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
        return self._fault or self._files.report().fault

    def close(self) -> None:
        """Write what is left, within a bounded time."""
        if self._fault == DEFECT:
            self._files.close()
        else:
            self._writer.close()

    def give_up(self) -> None:
        """A defect of ours: log it once, and record nothing any more. Within an ``except``."""
        if self._fault != DEFECT:
            log.exception("no routes are recorded from here on; requests are served all the same")
        self._fault = DEFECT

    # -- files ----------------------------------------------------------------------------------------------------

    def _begun(self, group: str) -> _Group:
        """The group that something is about to happen to; a file is begun before it, if one is due."""
        self._begin()
        return self._groups[group]

    def _begin(self) -> None:
        if self._fault == DEFECT or not self._files.wants_file():
            return
        if sum([each.num_held for each in self._groups.values()]) > MAX_CONTENTS:
            if not self._fault:
                log.warning("no routes are recorded: %s; requests are served all the same", TOO_LARGE)
            self._fault = TOO_LARGE
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
