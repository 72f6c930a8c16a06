"""Verification of recorded routes: runs the gateways' balancers again on their recorded inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.cluster.route_recorder import (
    NO_REPLICA,
    ROUTE_SUFFIX,
    Admitted,
    Chosen,
    Ended,
    Entry,
    Learned,
    Opened,
    Resumed,
    Withdrawn,
)
from lockstep.core.balancer import Balancer, BalancerState, RoutingPolicy
from lockstep.errors import ConfigError, TraceError
from lockstep.hosts.values import MAX_REPLICAS
from lockstep.replay.trace import CutFile, read_entries, read_parts
from lockstep.replay.trace_integrity import Part
from lockstep.replay.verify_report import Verification, verification_of
from lockstep.worker.flight.chunks import EntryDecoder
from lockstep.worker.flight.entries import End, Header, Runs, check_runs, ids_of

BalancerOf = Callable[[int, RoutingPolicy, int], Balancer]
ROUTES: EntryDecoder[Header | End | Entry] = msgspec.msgpack.Decoder(list[Header | End | Entry])
"""Decoder of a recording of a gateway's routes."""
_NUMBER_BYTES = 8
_UNKNOWN = b""
"""A content that no replica has."""


class RouteDivergence(NamedTuple):
    """First route that differs from the recorded one."""

    path: Path
    number: int
    """Number of the entry in its file; the header is 1."""
    group: str
    recorded: str
    decided: str

    def lines(self) -> Iterator[str]:
        """The divergence as text."""
        yield (f"{self.path}: entry {self.number}, {self.group}: recorded {self.recorded}, decided {self.decided}")

    def facts(self) -> dict[str, Any]:
        """The divergence as an object."""
        return {
            "entry": self.number,
            "group": self.group,
            "recorded": self.recorded,
            "decided": self.decided,
            "file": self.path.name,
        }


def verify_routes(path: Path, balancer_of: BalancerOf = Balancer) -> Verification[RouteDivergence]:
    """Compute every recorded route of a directory or a file again, up to the first difference.

    Raises:
        TraceError: a file is damaged or changed, has another schema, or is not a recording of routes.
    """
    parts, findings = read_parts(path, ROUTE_SUFFIX, ROUTES)
    return verification_of("routing", "routes", _compared(parts, balancer_of), findings)


def _compared(parts: Iterable[Part], balancer_of: BalancerOf) -> Iterator[RouteDivergence | None]:
    """Divergence of each route; None: equal."""
    before: Part | None = None
    groups: dict[int, _Group] = {}
    for part in parts:
        is_next = before is not None and before.is_whole and part.place == (before.run, before.number + 1)
        playing = _Playback(part.path, groups if is_next and not part.gap else None, balancer_of)
        for number, entry in enumerate(read_entries(part.path, ROUTES), 1):
            if not isinstance(entry, Header | End | CutFile):
                yield from playing.play(number, entry)
        before, groups = part, playing.groups


class _Group(NamedTuple):
    key: str
    balancer: Balancer


class _Playback:
    """Playback of one file, entry by entry.

    Args:
        expected: groups at the end of the previous file; None: there is none, so the initial groups are not compared.
    """

    def __init__(self, path: Path, expected: dict[int, _Group] | None, balancer_of: BalancerOf) -> None:
        self.groups: dict[int, _Group] = {}
        self._path = path
        self._expected = expected
        self._balancer_of = balancer_of

    def play(self, number: int, entry: Entry) -> Iterator[RouteDivergence | None]:
        """Process an entry; yields the divergence of a route, or None if it is equal."""
        try:
            match entry:
                case Opened():
                    self._open(entry.group, entry.key, self._made(entry.num, entry.policy, entry.max_imbalance))
                case Resumed():
                    balancer = self._made(len(entry.loads), entry.policy, entry.max_imbalance)
                    balancer.restore(_state_of(entry))
                    self._open(entry.group, entry.key, balancer)
                    yield from self._check_resumed(number, entry.group)
                case Chosen():
                    yield self._choose(number, entry)
                case _:
                    self._apply(entry)
        except (ConfigError, IndexError, KeyError, ValueError) as error:
            raise TraceError(f"{self._path}: entry {number} is impossible: {error!r}") from None

    def _apply(self, entry: Admitted | Withdrawn | Ended | Learned) -> None:
        balancer = self.groups[entry.group].balancer
        if not 0 <= entry.replica < balancer.num_replicas:
            raise IndexError(f"unknown replica {entry.replica}")
        match entry:
            case Admitted():
                balancer.admit(entry.replica)
            case Withdrawn():
                balancer.withdraw(entry.replica, entry.is_lost)
            case Ended():
                balancer.ended(entry.replica)
            case Learned():
                for turn, runs in enumerate(entry.news):
                    balancer.learn(entry.replica, [(content, not turn % 2) for content in _contents(runs)])

    def _made(self, num: int, policy: str, max_imbalance: int) -> Balancer:
        if num > MAX_REPLICAS:
            raise ValueError(f"a group has at most {MAX_REPLICAS} replicas, not {num}")
        return self._balancer_of(num, RoutingPolicy(policy), max_imbalance)

    def _open(self, number: int, key: str, balancer: Balancer) -> None:
        for other in [other for other, group in self.groups.items() if group.key == key]:
            del self.groups[other]
        self.groups[number] = _Group(key, balancer)

    def _check_resumed(self, number: int, group: int) -> Iterator[RouteDivergence]:
        if self._expected is None:
            return
        key, balancer = self.groups[group]
        before = self._expected.get(group)
        if before is None or before.balancer.state() != balancer.state():
            yield RouteDivergence(self._path, number, key, "another state", "the last state of the previous file")

    def _choose(self, number: int, entry: Chosen) -> RouteDivergence | None:
        key, balancer = self.groups[entry.group]
        contents = _contents(entry.contents)
        hashes = [*contents, _UNKNOWN] if entry.num_blocks > len(contents) else contents
        decided = balancer.choose(hashes, entry.session)
        fields = (
            (NO_REPLICA, "", 0) if decided is None else (decided.replica, decided.why.value, decided.num_cached_blocks)
        )
        recorded = (entry.replica, entry.why, entry.num_cached)
        if fields == recorded:
            return None
        return RouteDivergence(self._path, number, key, _shown(*recorded), _shown(*fields))


def _shown(replica: int, why: str, num_cached: int) -> str:
    if replica == NO_REPLICA:
        return "no replica"
    return f"replica {replica} ({why}{f', {num_cached} blocks cached' if num_cached else ''})"


def _contents(runs: Runs) -> list[bytes]:
    """Contents of numbers, which replace their hashes: a choice depends only on which are equal."""
    check_runs(runs)
    return [number.to_bytes(_NUMBER_BYTES, "big") for number in ids_of(runs)]


def _state_of(entry: Resumed) -> BalancerState:
    num = len(entry.loads)
    there = ids_of(entry.there)
    named = (*there, entry.last, *(replica for _, replica in entry.sessions))
    if len(entry.contents) != num or not all(0 <= replica < num for replica in named):
        raise IndexError(f"it names replicas outside of its {num}")
    holders: dict[bytes, int] = {}
    for replica, runs in enumerate(entry.contents):
        for content in _contents(runs):
            holders[content] = holders.get(content, 0) | 1 << replica
    return BalancerState(entry.loads, sum(1 << replica for replica in there), entry.last, holders, entry.sessions)
