"""Balancer: chooses a model's replica for each request, by open requests, sessions and hashes, never by tokens.

It is as pure as the scheduler: the same calls in the same order give the same choices. Sets of replicas are bits of
whole numbers, so that a choice among a thousand costs little more than one among two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from lockstep.core.prefix import ContentNews
from lockstep.errors import ConfigError

MAX_SESSIONS = 1 << 16
"""Sessions whose replica is remembered; beyond, the one that came last the longest ago is forgotten."""


class RoutingPolicy(Enum):
    """Preference among replicas; each falls back on those below it."""

    PREFIX = "prefix"
    """The replica that had the session last, else one that holds the longest beginning of the prompt."""
    SESSION = "session"
    """The replica that had the session last."""
    LEAST_LOADED = "least_loaded"
    """The fewest open requests; of equal ones the next in turn."""
    ROUND_ROBIN = "round_robin"
    """The next in turn, whatever it has to do."""


class Why(Enum):
    """Reason of a choice."""

    SESSION = "session"
    PREFIX = "prefix"
    LOAD = "load"
    TURN = "turn"


class Choice(NamedTuple):
    """A replica for a request."""

    replica: int
    why: Why
    num_cached_blocks: int
    """Blocks of the prompt's beginning that the replica holds; 0 where the choice did not depend on them."""


def bits_of(bits: int) -> list[int]:
    """The replicas that a whole number stands for."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


class BalancerState(NamedTuple):
    """All that a balancer's choices depend on, but for its policy and its guard."""

    loads: tuple[int, ...]
    there: int
    """Bits of the replicas that are given requests; likewise the contents' holders."""
    last: int
    holders: Mapping[bytes, int]
    sessions: tuple[tuple[str, int], ...]
    """The one that came last the longest ago first."""


class Balancer:
    """Replicas 0 to num_replicas - 1 of one model, in the order of their definition; all are there at first.

    Args:
        max_imbalance: how many more open requests than the least loaded one a preferred replica may have.
    """

    def __init__(self, num_replicas: int, policy: RoutingPolicy = RoutingPolicy.PREFIX, max_imbalance: int = 4) -> None:
        if num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}; at least 1 is needed")
        if max_imbalance < 0:
            raise ConfigError(f"max_imbalance is {max_imbalance}; 0 lets no preferred replica have more than others")
        self.num_replicas: Final = num_replicas
        self.policy: Final = policy
        self.max_imbalance: Final = max_imbalance
        self._loads = [0] * num_replicas
        self._there = (1 << num_replicas) - 1
        self._with_load: dict[int, int] = {0: self._there}
        """Replicas that are there, by open requests; no entry is empty."""
        self._least = 0
        """Open requests of the least loaded; 0 where none is there."""
        self._last = num_replicas - 1
        """The one that was chosen last, after which a turn begins."""
        self._holders: dict[bytes, int] = {}
        """Replicas that hold a content; no entry is empty."""
        self._num_held = [0] * num_replicas
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, hashes: Sequence[bytes] = (), session: str | None = None) -> Choice | None:
        """Replica of a request, which has one open request more from now on; None: none is there.

        Args:
            hashes: of the prompt's full blocks (core/prefix.py).
            session: name of the conversation that the request is part of.
        """
        if not self._there:
            return None
        choice = self._chosen(hashes, session)
        self._last = choice.replica
        self._move(choice.replica, 1)
        if session is not None:
            self._sessions[session] = choice.replica
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice

    def ended(self, replica: int) -> None:
        """A request that was given to a replica is open no longer."""
        self._move(replica, -1)

    def learn(self, replica: int, news: Iterable[ContentNews]) -> None:
        """Apply the changes of contents that a replica reports, in the order in which they happened."""
        bit, holders, num_held = 1 << replica, self._holders, self._num_held[replica]
        for content, is_held in news:
            before = holders.get(content, 0)
            num_held += is_held - (before >> replica & 1)
            if is_held:
                holders[content] = before | bit
            elif before & ~bit:
                holders[content] = before & ~bit
            else:
                holders.pop(content, None)
        self._num_held[replica] = num_held

    def withdraw(self, replica: int, is_lost: bool = False) -> None:
        """Give a replica nothing more: it drains or, if it is lost, holds nothing and has no open request any more."""
        if self._there >> replica & 1:
            self._take(replica)
            self._there ^= 1 << replica
        if is_lost:
            self._loads[replica] = 0
            self.learn(replica, [(each, False) for each, holders in self._holders.items() if holders >> replica & 1])

    def admit(self, replica: int) -> None:
        """Let a replica that was withdrawn have requests again."""
        if not self._there >> replica & 1:
            self._there |= 1 << replica
            self._put(replica)

    def is_held(self, content: bytes) -> bool:
        """True if any replica has reported that it holds a content."""
        return content in self._holders

    def state(self) -> BalancerState:
        """A copy of what choices depend on; `restore` makes another balancer choose as this one."""
        sessions = tuple([(name, replica) for name, replica in self._sessions.items()])
        return BalancerState(tuple(self._loads), self._there, self._last, dict(self._holders), sessions)

    def restore(self, state: BalancerState) -> None:
        """Take over the state of a balancer of as many replicas."""
        self._loads = list(state.loads)
        self._there, self._last = state.there, state.last
        self._with_load = {}
        self._least = 0
        self._num_held = [0] * self.num_replicas
        self._holders = dict(state.holders)
        self._sessions = OrderedDict(state.sessions)
        for replica in range(self.num_replicas):
            if state.there >> replica & 1:
                self._put(replica)
        for holders in self._holders.values():
            for replica in bits_of(holders):
                self._num_held[replica] += 1

    def load(self, replica: int) -> int:
        """Open requests of a replica."""
        return self._loads[replica]

    def num_held(self, replica: int) -> int:
        """Contents of prompt blocks that a replica holds, according to its reports."""
        return self._num_held[replica]

    def is_there(self, replica: int) -> bool:
        """True if requests are given to it."""
        return bool(self._there >> replica & 1)

    # -- the choice -----------------------------------------------------------------------------------------------

    def _chosen(self, hashes: Sequence[bytes], session: str | None) -> Choice:
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            return Choice(self._next_of(self._there), Why.TURN, 0)
        if self.policy is not RoutingPolicy.LEAST_LOADED:
            allowed = self._allowed()
            if session is not None:
                before = self._sessions.get(session)
                if before is not None and allowed >> before & 1:
                    return Choice(before, Why.SESSION, self._depth(hashes, 1 << before)[1])
            if self.policy is RoutingPolicy.PREFIX:
                candidates, depth = self._depth(hashes, allowed)
                if depth:
                    return Choice(self._least_of(candidates), Why.PREFIX, depth)
        return Choice(self._next_of(self._with_load[self._least]), Why.LOAD, 0)

    def _allowed(self) -> int:
        """Replicas within the guard of the least loaded one."""
        found, most = 0, self._least + self.max_imbalance
        if self.max_imbalance < len(self._with_load):
            for load in range(self._least, most + 1):
                found |= self._with_load.get(load, 0)
        else:
            for load, replicas in self._with_load.items():
                found |= replicas if load <= most else 0
        return found

    def _depth(self, hashes: Sequence[bytes], among: int) -> tuple[int, int]:
        """Replicas that hold the longest beginning of a chain, and how many blocks that is."""
        get, depth = self._holders.get, 0
        for each in hashes:
            left = among & get(each, 0)
            if not left:
                break
            among = left
            depth += 1
        return among, depth

    def _least_of(self, candidates: int) -> int:
        """The next in turn among the least loaded of some that are within the guard."""
        load = self._least
        while not (found := candidates & self._with_load.get(load, 0)):
            load += 1
        return self._next_of(found)

    def _next_of(self, candidates: int) -> int:
        """The first candidate after the one that was chosen last, or else the first of all."""
        after = candidates >> (self._last + 1) << (self._last + 1)
        found = after or candidates
        return (found & -found).bit_length() - 1

    # -- open requests --------------------------------------------------------------------------------------------

    def _move(self, replica: int, change: int) -> None:
        if not self._there >> replica & 1:
            self._loads[replica] += change
            return
        self._take(replica)
        self._loads[replica] += change
        self._put(replica)

    def _take(self, replica: int) -> None:
        load = self._loads[replica]
        left = self._with_load[load] ^ (1 << replica)
        if left:
            self._with_load[load] = left
            return
        del self._with_load[load]
        if load == self._least:
            self._least = min(self._with_load, default=0)

    def _put(self, replica: int) -> None:
        load = self._loads[replica]
        self._with_load[load] = self._with_load.get(load, 0) | 1 << replica
        if load < self._least or len(self._with_load) == 1:
            self._least = load
