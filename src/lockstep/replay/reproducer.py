"""From a long workload to a few of its requests that still show a divergence of the same kind.

Only what arrived until the divergence counts, and who was unfinished then is asked first; those who ended before join
only when it takes them. Then requests are left out one after another (`causes.minimise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.causes import minimise
from lockstep.replay.cost import CostModel
from lockstep.replay.divergence import Divergence, compare
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import Workload, WorkloadRequest

MAX_WORK = 4_000_000
"""What probes may cost before the search is content with what it has: half a minute or so. A count, not a time, because
the same input has to give the same reproducer everywhere."""


MORE_STEPS = 256
"""So many steps later than the whole, a part may show it: fewer requests may take longer."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configs under one cost model."""

    a: SchedulerConfig
    b: SchedulerConfig
    cost: CostModel | None


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A small workload that shows a divergence, and that divergence."""

    workload: Workload
    divergence: Divergence
    is_minimal: bool
    """Whether it was seen that no single request can be left out."""
    num_probes: int


class Search:
    """The probes of one reproducer.

    Args:
        requests: those that arrived until the divergence.
        pairs: every one of them must show it: the two configs, and if only some of their fields are the cause, the
            first config with and without those.
    """

    def __init__(
        self, workload: Workload, requests: Sequence[WorkloadRequest], pairs: Sequence[Pair], wanted: Divergence
    ) -> None:
        self._workload = workload
        self._requests = requests
        self._pairs = pairs
        self._wanted = wanted
        self._work = 0
        self.num_probes = 0

    def run(self, unfinished: Sequence[int]) -> Reproducer:
        """The smallest that was found.

        Args:
            unfinished: indices of the requests that had not ended when it came to the divergence.
        """
        start = self._enough(sorted(unfinished))
        least = minimise(start, self.shows, self._may_ask)
        found = self._probe(least.items, self._pairs[0])
        assert found is not None, "all that arrived show it, and so does what minimising leaves"
        return Reproducer(self.part(least.items), found, least.is_minimal, self.num_probes)

    def part(self, indices: Sequence[int]) -> Workload:
        """Some of the requests, their arrivals from the first one on."""
        chosen = [self._requests[index] for index in indices]
        first = chosen[0].arrival if chosen else 0
        return replace(
            self._workload,
            requests=tuple(replace(request, arrival=request.arrival - first) for request in chosen),
        )

    def shows(self, indices: tuple[int, ...]) -> bool:
        """Whether these requests alone show a divergence of the same kind, by the same cause."""
        self.num_probes += 1
        return bool(indices) and all(self._probe(indices, pair) is not None for pair in self._pairs)

    def _may_ask(self) -> bool:
        return self._work < MAX_WORK

    def _probe(self, indices: Sequence[int], pair: Pair) -> Divergence | None:
        part = self.part(indices)
        max_steps = self._wanted.num_equal_steps + MORE_STEPS
        comparison = compare(Simulation(part, pair.a, pair.cost), Simulation(part, pair.b, pair.cost), max_steps)
        self._work += comparison.work
        found = comparison.divergence
        return found if found is not None and found.change is self._wanted.change else None

    def _enough(self, unfinished: Sequence[int]) -> tuple[int, ...]:
        """Those unfinished, with as many of the others, latest first, as it takes: none, then ever more."""
        others = sorted(set(range(len(self._requests))).difference(unfinished), reverse=True)
        count = 0
        while True:
            chosen = tuple(sorted([*unfinished, *others[:count]]))
            if count >= len(others) or self.shows(chosen):
                return chosen
            count = max(8, len(unfinished), 4 * count)
