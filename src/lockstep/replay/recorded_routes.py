"""The gateways' recorded routes, decided again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.cluster.route_recorder import (
    NO_REPLICA,
    ROUTE_SCHEMA_VERSION,
    ROUTE_SUFFIX,
    Admitted,
    Chosen,
    Ended,
    Entry,
    Learned,
    Opened,
    Resumed,
    RouteHeader,
    Withdrawn,
)
from lockstep.core.balancer import Balancer, BalancerState, RoutingPolicy
from lockstep.errors import ConfigError, TraceError
from lockstep.hosts.values import MAX_REPLICAS
from lockstep.replay.line_files import Line, lines_of, part_of
from lockstep.replay.trace_integrity import Finding, Part, are_in_order, arranged, is_whole
from lockstep.worker.flight.entries import MAX_RUN, Runs, ids_of

BalancerOf = Callable[[int, RoutingPolicy, int], Balancer]
_NUMBER_BYTES = 8
_UNKNOWN = b""
"""A content that no replica holds."""


class RouteDivergence(NamedTuple):
    """The first route that came out otherwise."""

    path: Path
    line: int
    """Of the route in its file, from 1."""
    group: str
    recorded: str
    decided: str

    def __str__(self) -> str:
        return f"{self.path}: line {self.line}, {self.group}: recorded {self.recorded}, decided {self.decided}"


class RoutesVerdict(NamedTuple):
    """Result of deciding recorded routes again."""

    num_routes: int
    """That were compared, the divergent one included."""
    divergence: RouteDivergence | None
    findings: tuple[Finding, ...] = ()
    """What of the files is not there, or not where it belongs."""

    def is_in_order(self, allows_gaps: bool) -> bool:
        """True if every route came out as recorded, and none is missing; see `trace_integrity.are_in_order`."""
        return self.divergence is None and are_in_order(self.findings, allows_gaps)


def route_files(path: Path) -> tuple[Path, ...]:
    """The recordings of routes in a directory, in order; a file that is one is itself, and others are none."""
    if path.is_dir():
        return tuple(sorted(path.glob(f"*{ROUTE_SUFFIX}")))
    return (path,) if path.suffix == ROUTE_SUFFIX else ()


def verify_routes(paths: Sequence[Path], balancer_of: BalancerOf = Balancer) -> RoutesVerdict:
    """Decide every recorded route again, up to the first that comes out otherwise.

    Raises:
        TraceError: a file is damaged, changed, of a newer version, or no recording of routes.
    """
    found = [part_of(path, RouteHeader, ROUTE_SCHEMA_VERSION, "routes") for path in paths]
    parts, findings = arranged(found, is_alone=len(paths) == 1)
    if not parts:
        raise TraceError(f"{paths[0]}: it is no recording of routes, or was cut in its first moment")
    num_routes = 0
    before: Part | None = None
    groups: dict[int, _Group] = {}
    for part in parts:
        goes_on = before is not None and not part.gap and part.place == (before.run, before.number + 1)
        playing = _Playing(groups if goes_on and before is not None and before.is_whole else None, balancer_of)
        for line in lines_of(part.path):
            if line is None or line.number == 1:
                continue
            divergence = playing.play(line)
            if divergence is not None:
                return RoutesVerdict(num_routes + playing.num_routes, divergence, findings)
        num_routes += playing.num_routes
        before, groups = part, playing.groups
    return RoutesVerdict(num_routes, None, findings)


def describe(verdict: RoutesVerdict) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    is_same = "identical" if verdict.divergence is None else "not identical"
    rest = "" if is_whole(verdict.findings) else ", but the files are not as they were recorded"
    yield f"routing: {verdict.num_routes:,} routes, {is_same}{rest}"
    yield from map(str, verdict.findings)
    if verdict.divergence is not None:
        yield str(verdict.divergence)


def facts(verdict: RoutesVerdict) -> dict[str, Any]:
    """The verdict as an object."""
    divergence = verdict.divergence
    parted = None
    if divergence is not None:
        parted = {**divergence._asdict(), "file": divergence.path.name}
        del parted["path"]
    return {
        "identical": divergence is None,
        "routes": verdict.num_routes,
        "whole": is_whole(verdict.findings),
        "findings": [finding.facts() for finding in verdict.findings],
        "parted": parted,
    }


class _Group(NamedTuple):
    key: str
    balancer: Balancer


class _Playing:
    """One file, line by line.

    Args:
        expected: the groups that the file before it ends with; None: what it begins with is believed.
    """

    def __init__(self, expected: dict[int, _Group] | None, balancer_of: BalancerOf) -> None:
        self.groups: dict[int, _Group] = {}
        self.num_routes = 0
        self._expected = expected
        self._balancer_of = balancer_of
        self._decode: Callable[[bytes], Entry] = msgspec.json.Decoder(Entry).decode

    def play(self, line: Line) -> RouteDivergence | None:
        """Follow a line; the divergence, where it is a route that comes out otherwise."""
        entry = line.decoded(self._decode, "route")
        try:
            return self._follow(line, entry)
        except (ConfigError, IndexError, KeyError, ValueError) as error:
            raise TraceError(f"{line.path}: line {line.number} cannot have happened: {error!r}") from None

    def _follow(self, line: Line, entry: Entry) -> RouteDivergence | None:
        match entry:
            case Opened():
                self._open(entry.group, entry.key, self._made(entry.num, entry.policy, entry.max_imbalance))
                return None
            case Resumed():
                balancer = self._made(len(entry.loads), entry.policy, entry.max_imbalance)
                balancer.restore(_state_of(entry))
                self._open(entry.group, entry.key, balancer)
                return self._resumed_otherwise(line, entry.group)
            case Chosen():
                return self._choose(line, entry)
        balancer = self.groups[entry.group].balancer
        if not 0 <= entry.replica < balancer.num_replicas:
            raise IndexError(f"there is no replica {entry.replica}")
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
        return None

    def _made(self, num: int, policy: str, max_imbalance: int) -> Balancer:
        if num > MAX_REPLICAS:
            raise ValueError(f"a group has at most {MAX_REPLICAS} replicas, not {num}")
        return self._balancer_of(num, RoutingPolicy(policy), max_imbalance)

    def _open(self, number: int, key: str, balancer: Balancer) -> None:
        for other in [other for other, group in self.groups.items() if group.key == key]:
            del self.groups[other]
        self.groups[number] = _Group(key, balancer)

    def _resumed_otherwise(self, line: Line, number: int) -> RouteDivergence | None:
        if self._expected is None:
            return None
        key, balancer = self.groups[number]
        before = self._expected.get(number)
        if before is not None and before.balancer.state() == balancer.state():
            return None
        return RouteDivergence(line.path, line.number, key, "another state", "that which the file before ends with")

    def _choose(self, line: Line, entry: Chosen) -> RouteDivergence | None:
        key, balancer = self.groups[entry.group]
        contents = _contents(entry.contents)
        hashes = [*contents, _UNKNOWN] if entry.num_blocks > len(contents) else contents
        self.num_routes += 1
        decided = balancer.choose(hashes, entry.session)
        fields = (
            (NO_REPLICA, "", 0) if decided is None else (decided.replica, decided.why.value, decided.num_cached_blocks)
        )
        recorded = (entry.replica, entry.why, entry.num_cached)
        if fields == recorded:
            return None
        return RouteDivergence(line.path, line.number, key, _shown(*recorded), _shown(*fields))


def _shown(replica: int, why: str, num_cached: int) -> str:
    if replica == NO_REPLICA:
        return "no replica"
    return f"replica {replica} ({why}{f', {num_cached} blocks cached' if num_cached else ''})"


def _contents(runs: Runs) -> list[bytes]:
    """Contents of numbers, as good as their hashes: a choice depends only on which are the same."""
    if len(runs) % 2 or min(runs, default=0) < 0 or sum(runs[1::2]) > MAX_RUN:
        raise ValueError("these are no numbers of contents")
    return [number.to_bytes(_NUMBER_BYTES, "big") for number in ids_of(runs)]


def _state_of(entry: Resumed) -> BalancerState:
    num = len(entry.loads)
    there = ids_of(entry.there)
    named = (*there, entry.last, *(replica for _, replica in entry.sessions))
    if len(entry.contents) != num or not all(0 <= replica < num for replica in named):
        raise IndexError(f"it names others than its {num} replicas")
    holders: dict[bytes, int] = {}
    for replica, runs in enumerate(entry.contents):
        for content in _contents(runs):
            holders[content] = holders.get(content, 0) | 1 << replica
    return BalancerState(entry.loads, sum(1 << replica for replica in there), entry.last, holders, entry.sessions)
