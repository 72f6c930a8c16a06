"""Causes of a difference: finds the fields of two configs that decide it, and few requests that reproduce it."""

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
"""Minimum share of the difference between A's metric and B's that a config must produce to explain it."""
MAX_WORK = 4_000_000
"""Maximum work of the probes for one reproducer, in units of ``Comparison.work``, about half a minute. It is a count
and not a time, because the same input must give the same reproducer everywhere."""
MORE_STEPS = 256
"""Maximum steps after the original divergence within which a part must show it; fewer requests may take longer."""
MAX_EVALUATIONS = 200
"""Maximum replays of one bisection. Each config is replayed once."""
Evaluate = Callable[[SchedulerConfig], float]


@dataclass(frozen=True, slots=True)
class Cause:
    """Config fields that make one config behave like another."""

    alone: tuple[str, ...]
    """Fields that suffice individually."""
    together: tuple[str, ...]
    """If no field suffices alone: a sufficient set from which no field can be left out. Empty: none was found."""

    @property
    def names(self) -> tuple[str, ...]:
        """Smallest sufficient set that was found."""
        return self.alone[:1] or self.together


def differing_fields(a: SchedulerConfig, b: SchedulerConfig) -> tuple[str, ...]:
    """Names of the fields that differ, in the order of their definition."""
    return tuple(field.name for field in fields(a) if getattr(a, field.name) != getattr(b, field.name))


def taken_over(a: SchedulerConfig, b: SchedulerConfig, names: Iterable[str]) -> SchedulerConfig | None:
    """``a`` with some fields of ``b``; None: they are invalid together."""
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
    """Find the differing fields that make ``a`` behave like ``b``.

    Args:
        suffices: returns True if a config between the two behaves like ``b``; assumed to be True for ``b``.
        may_probe: returns True if ``suffices`` may be called once more.
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
    """Result of a minimisation."""

    items: tuple[Item, ...]
    """Items that still show the behaviour, in their original order."""
    is_minimal: bool
    """True if no single item can be left out; False: the limit of probes was reached before this was certain."""
    num_probes: int


def minimise(
    items: Sequence[Item], shows: Callable[[tuple[Item, ...]], bool], may_probe: Callable[[], bool] = lambda: True
) -> Minimum[Item]:
    """Leave out unneeded items, in ever smaller pieces, until no single item can be left out.

    The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 2002)
    with complements only: the behaviour usually needs many items together (a full pool, a full batch), so a small part
    alone rarely shows it.

    Args:
        items: all items; together they are assumed to show the behaviour.
        shows: returns True if some of the items, in their order, still show it. It must be deterministic.
        may_probe: returns True if ``shows`` may be called once more. Without a bound, the number of calls is at worst
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
    """Metric of A with this field of B; None: such a config is invalid."""
    all_but: float | None
    """Metric of B with this field of A; None: such a config is invalid."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of the bisection of two configs' fields."""

    metric_a: float
    metric_b: float
    effects: tuple[FieldEffect, ...]
    """Effects in the order of the fields' definition."""
    cause: Cause
    """Fields that explain the difference. Empty: the metric is the same, or the search reached its limit."""
    num_replays: int

    def share(self, metric: float | None) -> float | None:
        """Share of the difference from A's value to B's; None: the values are equal."""
        if metric is None or self.metric_a == self.metric_b:
            return None
        return (metric - self.metric_a) / (self.metric_b - self.metric_a)


def bisect_fields(a: SchedulerConfig, b: SchedulerConfig, evaluate: Evaluate) -> Bisection:
    """Apply each differing field alone, and all but each. If no field suffices alone, find a set that does.

    Args:
        evaluate: returns the metric of a replay with a config. It must be deterministic.
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
    """Two configs with one cost model."""

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
    """True if no single request can be left out, as tests of each showed."""
    num_probes: int


class ReproducerSearch:
    """Search for few requests that still reproduce a divergence of the same kind.

    Only requests that arrived before the divergence count. Those unfinished at the divergence are tried first; ended
    ones are added only as needed. Then requests are left out one by one (`minimise`).

    Args:
        requests: the requests that arrived before the divergence.
        pairs: pairs of configs, each of which must show it: the two configs, and if only some fields are the cause, the
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
        """Smallest reproducer found.

        Args:
            unfinished: indices of the requests that had not ended at the divergence.
        """
        start = self._enough(sorted(unfinished))
        least = minimise(start, self.shows, self._may_probe)
        found = self._probe(least.items, self._pairs[0])
        assert found is not None, "all arrived requests show it, and so does their minimum"
        return Reproducer(self.part(least.items), found, least.is_minimal, self.num_probes)

    def part(self, indices: Sequence[int]) -> Workload:
        """Workload of some of the requests, with arrivals relative to the first of them."""
        chosen = [self._requests[index] for index in indices]
        first = chosen[0].arrival if chosen else 0
        return replace(
            self._workload,
            requests=tuple(replace(request, arrival=request.arrival - first) for request in chosen),
        )

    def shows(self, indices: tuple[int, ...]) -> bool:
        """True if these requests alone show a divergence of the same kind with the same cause."""
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
        """The unfinished requests, with as many of the other requests, latest first, as the divergence needs."""
        others = sorted(set(range(len(self._requests))).difference(unfinished), reverse=True)
        count = 0
        while True:
            chosen = tuple(sorted([*unfinished, *others[:count]]))
            if count >= len(others) or self.shows(chosen):
                return chosen
            count = max(8, len(unfinished), 4 * count)
