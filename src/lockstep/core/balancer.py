"""Balancer: chooses a model's replica for each request, by open requests, sessions and hashes, never by tokens.

It is as pure as the scheduler: the same calls in the same order give the same choices. Sets of replicas are bits of
integers, so that a choice among a thousand costs little more than one among two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from lockstep.core.prefix import ContentNews
from lockstep.errors import ConfigError

MAX_SESSIONS = 1 << 16
"""Maximum number of sessions whose replica is stored. Beyond it, the least recently used one is removed."""


class RoutingPolicy(Enum):
    """Preference among replicas. Each policy falls back on those below it."""

    PREFIX = "prefix"
    """The last replica of the session, else the one that holds the longest prefix of the prompt."""
    SESSION = "session"
    """The last replica of the session."""
    LEAST_LOADED = "least_loaded"
    """The replica with the fewest open requests; among equal ones, the next in rotation."""
    ROUND_ROBIN = "round_robin"
    """The next replica in rotation, regardless of its load."""


class Why(Enum):
    """Reason of a choice."""

    SESSION = "session"
    PREFIX = "prefix"
    LOAD = "load"
    TURN = "turn"


class RoutingChoice(NamedTuple):
    """The chosen replica for a request."""

    replica: int
    why: Why
    num_cached_blocks: int
    """Number of prefix blocks of the prompt that the replica holds; 0 if the choice did not depend on them."""


def bits_of(bits: int) -> list[int]:
    """The replicas in a set of bits."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


class BalancerState(NamedTuple):
    """State that a balancer's choices depend on, except its policy and its limit of imbalance."""

    loads: tuple[int, ...]
    there: int
    """Bits of the replicas that receive requests. The holders of contents have the same form."""
    last: int
    holders: Mapping[bytes, int]
    sessions: tuple[tuple[str, int], ...]
    """Sessions and their replicas, least recently used first."""


class Balancer:
    """Balances requests over replicas 0 to num_replicas - 1 of one model, in the order of their definition. Initially
    all of them receive requests.

    Args:
        max_imbalance: maximum number of open requests that a preferred replica may have more than the least loaded one.
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
        """Replicas that receive requests, by number of open requests; no entry is empty."""
        self._least = 0
        """Open requests of the least loaded replica; 0 if no replica receives requests."""
        self._last = num_replicas - 1
        """The last chosen replica, after which the rotation continues."""
        self._holders: dict[bytes, int] = {}
        """Replicas that hold a content; no entry is empty."""
        self._num_held = [0] * num_replicas
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, hashes: Sequence[bytes] = (), session: str | None = None) -> RoutingChoice | None:
        """Choose the replica of a request and count one more open request for it; None: no replica receives requests.

        Args:
            hashes: hashes of the prompt's full blocks (core/prefix.py).
            session: name of the conversation that the request belongs to.
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
        """Record that a request of a replica has ended."""
        self._move(replica, -1)

    def learn(self, replica: int, news: Iterable[ContentNews]) -> None:
        """Apply the changes of contents that a replica reports, in order."""
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
        """Send no more requests to a replica. It drains or, if it is lost, holds no content and has no open requests
        any more."""
        if self._there >> replica & 1:
            self._take(replica)
            self._there ^= 1 << replica
        if is_lost:
            self._loads[replica] = 0
            self.learn(replica, [(each, False) for each, holders in self._holders.items() if holders >> replica & 1])

    def admit(self, replica: int) -> None:
        """Send requests again to a replica that was withdrawn."""
        if not self._there >> replica & 1:
            self._there |= 1 << replica
            self._put(replica)

    def is_held(self, content: bytes) -> bool:
        """True if any replica has reported that it holds the content."""
        return content in self._holders

    def state(self) -> BalancerState:
        """A copy of the state that choices depend on. After `restore`, another balancer makes the same choices."""
        sessions = tuple([(name, replica) for name, replica in self._sessions.items()])
        return BalancerState(tuple(self._loads), self._there, self._last, dict(self._holders), sessions)

    def restore(self, state: BalancerState) -> None:
        """Restore the state of a balancer with the same number of replicas."""
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
        """Number of contents of prompt blocks that a replica holds, according to its reports."""
        return self._num_held[replica]

    def is_there(self, replica: int) -> bool:
        """True if the replica receives requests."""
        return bool(self._there >> replica & 1)

    # -- the choice -----------------------------------------------------------------------------------------------

    def _chosen(self, hashes: Sequence[bytes], session: str | None) -> RoutingChoice:
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            return RoutingChoice(self._next_of(self._there), Why.TURN, 0)
        if self.policy is not RoutingPolicy.LEAST_LOADED:
            allowed = self._allowed()
            if session is not None:
                before = self._sessions.get(session)
                if before is not None and allowed >> before & 1:
                    return RoutingChoice(before, Why.SESSION, self._depth(hashes, 1 << before)[1])
            if self.policy is RoutingPolicy.PREFIX:
                candidates, depth = self._depth(hashes, allowed)
                if depth:
                    return RoutingChoice(self._least_of(candidates), Why.PREFIX, depth)
        return RoutingChoice(self._next_of(self._with_load[self._least]), Why.LOAD, 0)

    def _allowed(self) -> int:
        """Replicas within the limit of imbalance of the least loaded one."""
        found, most = 0, self._least + self.max_imbalance
        if self.max_imbalance < len(self._with_load):
            for load in range(self._least, most + 1):
                found |= self._with_load.get(load, 0)
        else:
            for load, replicas in self._with_load.items():
                found |= replicas if load <= most else 0
        return found

    def _depth(self, hashes: Sequence[bytes], among: int) -> tuple[int, int]:
        """Replicas that hold the longest prefix of a chain, and its number of blocks."""
        get, depth = self._holders.get, 0
        for each in hashes:
            left = among & get(each, 0)
            if not left:
                break
            among = left
            depth += 1
        return among, depth

    def _least_of(self, candidates: int) -> int:
        """The next in rotation among the least loaded of the candidates, which are within the limit of imbalance."""
        load = self._least
        while not (found := candidates & self._with_load.get(load, 0)):
            load += 1
        return self._next_of(found)

    def _next_of(self, candidates: int) -> int:
        """The first candidate after the last chosen one, or else the first of all."""
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
