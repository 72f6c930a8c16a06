"""Waiting queue: defines the order of admission, and limits how much may wait."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from lockstep.core.policy import SchedulerConfig
from lockstep.core.sequence import Sequence
from lockstep.errors import QueueFullError

_Key = tuple[int, int]
_Line = tuple[bool, int | str]
"""Key of a line: whether its requests are bulk, and their priority or tenant."""


class TenantLedger:
    """Tokens served per tenant, for the fair order.

    A tenant that is new or returns starts at the lowest count among those with unfinished requests. So it neither
    catches up on time without requests nor is charged for what it got long ago.
    """

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._served: OrderedDict[str, int] = OrderedDict()
        """Tokens served by tenant, in the order of the last request."""
        self._unfinished: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str) -> int:
        return self._served[tenant]

    def arrive(self, tenant: str) -> None:
        """Record a new request of the tenant."""
        if tenant not in self._unfinished:
            floor = min((self._served[other] for other in self._unfinished), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._served.move_to_end(tenant)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Record the end of a request of the tenant."""
        self._unfinished[tenant] -= 1
        if self._unfinished[tenant] == 0:
            del self._unfinished[tenant]
            idle = len(self._served) - len(self._unfinished)
            if idle > self._max_tenants:
                del self._served[next(name for name in self._served if name not in self._unfinished)]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Add tokens that the tenant was served."""
        self._served[tenant] += num_tokens

    def items(self) -> Iterable[tuple[str, int]]:
        """Tokens served by tenant, longest absent first."""
        return self._served.items()

    def restore(self, served: Iterable[tuple[str, int]], unfinished: Iterable[str]) -> None:
        """Restore the result of `items`, and the tenant of each unfinished request."""
        self._served = OrderedDict(served)
        for tenant in unfinished:
            self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1


class WaitingQueue:
    """The bounded queue. It consists of a few first-in-first-out lines (a single one, or one per priority or tenant)
    and a rule that selects the next line, so that no step sorts and removal is O(1)."""

    def __init__(self, config: SchedulerConfig, ledger: TenantLedger) -> None:
        self._config = config
        self._ledger = ledger
        self._lines: OrderedDict[_Line, OrderedDict[int, Sequence]] = OrderedDict()
        self.num_tokens = 0
        self.num_changes = 0
        """Number of additions and removals since the start."""
        self.num_bulk = 0
        """Number of bulk requests."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def check_room(self, num_prompt_tokens: int) -> None:
        """Check that a request may be added.

        Raises:
            QueueFullError: too many requests or tokens wait already.
        """
        config = self._config
        if self._size >= config.max_num_queued_reqs:
            raise QueueFullError(f"{self._size} requests wait already, the maximum; try again later")
        if self._size and self.num_tokens + num_prompt_tokens > config.max_num_queued_tokens:
            raise QueueFullError(
                f"{self.num_tokens} prompt tokens wait already and this request has {num_prompt_tokens}, but at most "
                f"{config.max_num_queued_tokens} may; try again later"
            )

    def add(self, seq: Sequence) -> None:
        self._lines.setdefault(self._line_of(seq), OrderedDict())[seq.seq_id] = seq
        self._count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        key = self._line_of(seq)
        line = self._lines[key]
        del line[seq.seq_id]
        if not line:
            del self._lines[key]
        self._count(seq, -1)

    def _count(self, seq: Sequence, change: int) -> None:
        self._size += change
        self.num_bulk += change * seq.request.is_bulk
        self.num_tokens += change * seq.num_prompt
        self.num_changes += 1

    def effective_priority(self, seq: Sequence, step: int) -> int:
        """The priority that decides admission: in the priority order, it increases with waiting."""
        if self._config.order == "priority":
            return self._config.aged_priority(seq.request.priority, step - seq.arrival_step)
        return seq.request.priority

    def sequences(self) -> list[Sequence]:
        """All requests, line by line."""
        return [seq for line in self._lines.values() for seq in line.values()]

    def in_order(self, step: int, *, is_bulk: bool) -> Iterator[Sequence]:
        """Yield all bulk requests, or all others, in order of admission. The queue must not change meanwhile; tenants
        may be charged."""
        key = self._key_at(step)
        heads = []
        for (line_is_bulk, _), line in self._lines.items():
            if line_is_bulk != is_bulk:
                continue
            rest = iter(line.values())
            seq = next(rest)
            heads.append((key(seq), seq, rest))
        heapq.heapify(heads)
        while heads:
            _, seq, rest = heads[0]
            yield seq
            following = next(rest, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (key(following), following, rest))

    def _line_of(self, seq: Sequence) -> _Line:
        order, request = self._config.order, seq.request
        if order == "fcfs":
            return request.is_bulk, 0
        return request.is_bulk, request.priority if order == "priority" else request.tenant

    def _key_at(self, step: int) -> Callable[[Sequence], _Key]:
        order = self._config.order
        if order == "fcfs":
            return lambda seq: (0, seq.seq_id)
        if order == "priority":
            return lambda seq: (self.effective_priority(seq, step), seq.seq_id)
        return lambda seq: (self._ledger.served(seq.request.tenant), seq.seq_id)
