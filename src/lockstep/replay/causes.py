"""Causes of a difference: the fields of two configs that decide it, and the fewest requests that still show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError
from lockstep.replay.cost import CostModel
from lockstep.replay.divergence import Divergence, SimulatedSide, compare
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import Workload, WorkloadRequest

Item = TypeVar("Item")
EXPLAINED = 0.9
"""Of the way from A's metric to B's: a config that brings it as far, or beyond, explains it."""
MAX_WORK = 4_000_000
"""Bound of the probes of one reproducer, as ``Comparison.work``: half a minute or so. A count, not a time, because the
same input has to give the same reproducer everywhere."""
MORE_STEPS = 256
"""So many steps later than the whole, a part may show it: fewer requests may take longer."""
MAX_EVALUATIONS = 200
"""Replays of one bisection; configs that were replayed are not again."""
Evaluate = Callable[[SchedulerConfig], float]


@dataclass(frozen=True, slots=True)
class Cause:
    """Fields that make one config behave as another."""

    alone: tuple[str, ...]
    """Fields each of which suffices alone."""
    together: tuple[str, ...]
    """When none does: a set that suffices, and from which no field can be left out. Empty: nothing was found."""

    @property
    def names(self) -> tuple[str, ...]:
        """A smallest set that was found to suffice."""
        return self.alone[:1] or self.together


def differing_fields(a: SchedulerConfig, b: SchedulerConfig) -> tuple[str, ...]:
    """Names of the fields that differ, in the order of their definition."""
    return tuple(field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name))


def taken_over(a: SchedulerConfig, b: SchedulerConfig, names: Iterable[str]) -> SchedulerConfig | None:
    """``a`` with some fields of ``b``; None when they cannot work together."""
    try:
        return replace(a, **{name: getattr(b, name) for name in names})
    except ConfigError:
        return None


def find_cause(
    a: SchedulerConfig,
    b: SchedulerConfig,
    suffices: Callable[[SchedulerConfig], bool],
    may_probe: Callable[[], bool] = lambda: True,
) -> Cause:
    """Find the differing fields that make ``a`` behave as ``b``.

    Args:
        suffices: whether a config between the two behaves as ``b``; ``b`` itself is assumed to.
        may_probe: whether ``suffices`` may be called once more.
    """
    names = differing_fields(a, b)
    if len(names) == 1:
        return Cause(names, ())

    def shows(some: tuple[str, ...]) -> bool:
        config = taken_over(a, b, some)
        return config is not None and bool(some) and suffices(config)

    alone = tuple(name for name in names if may_probe() and shows((name,)))
    if alone or not names:
        return Cause(alone, ())
    return Cause((), minimise(names, shows, may_probe).items)


@dataclass(frozen=True, slots=True)
class Minimum(Generic[Item]):
    """Result of minimising."""

    items: tuple[Item, ...]
    """In their old order; they show it."""
    is_minimal: bool
    """Whether it is certain that none of them can be left out alone; False: the probes ended before."""
    num_probes: int


def minimise(
    items: Sequence[Item], shows: Callable[[tuple[Item, ...]], bool], may_probe: Callable[[], bool] = lambda: True
) -> Minimum[Item]:
    """Leave out what is not needed, in ever smaller pieces, until no single item can be left out.

    The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 2002)
    with complements only: the behaviour usually needs many items together (a full pool, a full batch), so that a small
    part alone rarely shows it.

    Args:
        items: all items; together they are assumed to show it.
        shows: whether some of the items, in their order, still show it; the same items always give the same result.
        may_probe: whether ``shows`` may be called once more; without a bound the number of calls is, in the worst case,
            about the square of the number of items.
    """
    kept = tuple(items)
    num_probes = 0
    size = max(1, len(kept) // 2)
    start = num_useless = 0
    while kept and num_useless * size < len(kept):
        if not may_probe():
            return Minimum(kept, False, num_probes)
        num_probes += 1
        rest = kept[:start] + kept[start + size :]
        if shows(rest):
            kept, num_useless = rest, 0
        else:
            start, num_useless = start + size, num_useless + 1
        if start >= len(kept):
            start = 0
        if num_useless * size >= len(kept) and size > 1:
            size, start, num_useless = max(1, min(size, len(kept)) // 2), 0, 0
    return Minimum(kept, True, num_probes)


@dataclass(frozen=True, slots=True)
class FieldEffect:
    """Effect of one field on a metric."""

    name: str
    value_a: object
    value_b: object
    alone: float | None
    """The metric of A with this field of B; None: such a config cannot work."""
    all_but: float | None
    """The metric of B with this field of A."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of bisecting the fields of two configs."""

    metric_a: float
    metric_b: float
    effects: tuple[FieldEffect, ...]
    """In the order of the fields' definition."""
    cause: Cause
    """Empty when the metric is the same, or nothing was found within the bound."""
    num_replays: int

    def share(self, metric: float | None) -> float | None:
        """Share of the way from A's value to B's; None when there is no way."""
        if metric is None or self.metric_a == self.metric_b:
            return None
        return (metric - self.metric_a) / (self.metric_b - self.metric_a)


def bisect_fields(a: SchedulerConfig, b: SchedulerConfig, evaluate: Evaluate) -> Bisection:
    """Take each differing field over alone, and all but each; and if no field suffices alone, look for a set that does.

    Args:
        evaluate: the metric of a replay with a config; the same config always has the same.
    """
    known: dict[SchedulerConfig, float] = {}

    def metric_of(config: SchedulerConfig) -> float:
        if config not in known:
            known[config] = evaluate(config)
        return known[config]

    def may_probe() -> bool:
        return len(known) < MAX_EVALUATIONS

    metric_a, metric_b = metric_of(a), metric_of(b)
    effects = []
    for name in differing_fields(a, b):
        alone, all_but = taken_over(a, b, (name,)), taken_over(b, a, (name,))
        effects.append(
            FieldEffect(
                name,
                getattr(a, name),
                getattr(b, name),
                None if alone is None else metric_of(alone),
                None if all_but is None else metric_of(all_but),
            )
        )
    cause = Cause((), ())
    if metric_a != metric_b:
        cause = find_cause(a, b, lambda config: _explains(metric_of(config), metric_a, metric_b), may_probe)
    return Bisection(metric_a, metric_b, tuple(effects), cause, len(known))


def _explains(metric: float, metric_a: float, metric_b: float) -> bool:
    return (metric - metric_a) / (metric_b - metric_a) >= EXPLAINED


@dataclass(frozen=True, slots=True)
class Pair:
    """Two configs under one cost model."""

    a: SchedulerConfig
    b: SchedulerConfig
    cost: CostModel | None

    def side(self, workload: Workload, config: SchedulerConfig) -> SimulatedSide:
        return SimulatedSide(Simulation(workload, config, self.cost))


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A small workload that shows a divergence, and that divergence."""

    workload: Workload
    divergence: Divergence
    is_minimal: bool
    """Whether it was seen that no single request can be left out."""
    num_probes: int


class ReproducerSearch:
    """Search for few requests that still show a divergence of the same kind.

    Only those that arrived until the divergence count. The ones unfinished then are tried first; those that ended
    before join only when it takes them. Then requests are left out one after another (`minimise`).

    Args:
        requests: those that arrived until the divergence.
        pairs: every one of them must show it: the two configs, and if only some of their fields are the cause, the
            first config with and without those.
    """

    def __init__(
        self, workload: Workload, requests: Sequence[WorkloadRequest], pairs: Sequence[Pair], divergence: Divergence
    ) -> None:
        self._workload = workload
        self._requests = requests
        self._pairs = pairs
        self._divergence = divergence
        self._work = 0
        self.num_probes = 0

    def run(self, unfinished: Sequence[int]) -> Reproducer:
        """The smallest that was found.

        Args:
            unfinished: indices of the requests that had not ended when it came to the divergence.
        """
        start = self._enough(sorted(unfinished))
        least = minimise(start, self.shows, self._may_probe)
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
        """True if these requests alone show a divergence of the same kind, by the same cause."""
        self.num_probes += 1
        return bool(indices) and all(self._probe(indices, pair) is not None for pair in self._pairs)

    def _may_probe(self) -> bool:
        return self._work < MAX_WORK

    def _probe(self, indices: Sequence[int], pair: Pair) -> Divergence | None:
        part = self.part(indices)
        max_steps = self._divergence.num_equal_steps + MORE_STEPS
        comparison = compare(pair.side(part, pair.a), pair.side(part, pair.b), max_steps)
        self._work += comparison.work
        found = comparison.divergence
        return found if found is not None and found.change is self._divergence.change else None

    def _enough(self, unfinished: Sequence[int]) -> tuple[int, ...]:
        """Those unfinished, with as many of the others, latest first, as it takes: none, then ever more."""
        others = sorted(set(range(len(self._requests))).difference(unfinished), reverse=True)
        count = 0
        while True:
            chosen = tuple(sorted([*unfinished, *others[:count]]))
            if count >= len(others) or self.shows(chosen):
                return chosen
            count = max(8, len(unfinished), 4 * count)
