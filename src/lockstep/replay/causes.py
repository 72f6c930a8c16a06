"""Causes of a difference: which fields of two configs decide it, and the fewest items that still show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError

Item = TypeVar("Item")
EXPLAINED = 0.9
"""Of the way from A's metric to B's: a config that brings it as far, or beyond, explains it."""
MAX_EVALUATIONS = 200
"""Replays of one bisection; configs that were replayed are not again."""
Evaluate = Callable[[SchedulerConfig], float]


@dataclass(frozen=True, slots=True)
class Cause:
    """What taking over fields showed."""

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
    may_ask: Callable[[], bool] = lambda: True,
) -> Cause:
    """Which of the differing fields make ``a`` behave as ``b``.

    Args:
        suffices: whether a config between the two behaves as ``b``; ``b`` itself is taken to.
        may_ask: whether ``suffices`` may be asked once more.
    """
    names = differing_fields(a, b)
    if len(names) == 1:
        return Cause(names, ())

    def shows(some: tuple[str, ...]) -> bool:
        config = taken_over(a, b, some)
        return config is not None and bool(some) and suffices(config)

    alone = tuple(name for name in names if may_ask() and shows((name,)))
    if alone or not names:
        return Cause(alone, ())
    return Cause((), minimise(names, shows, may_ask).items)


@dataclass(frozen=True, slots=True)
class Minimum(Generic[Item]):
    """What minimising found."""

    items: tuple[Item, ...]
    """In their old order; they show it."""
    is_minimal: bool
    """Whether it was seen that none of them can be left out alone; False: asking had to stop before."""
    num_probes: int


def minimise(
    items: Sequence[Item], shows: Callable[[tuple[Item, ...]], bool], may_ask: Callable[[], bool] = lambda: True
) -> Minimum[Item]:
    """Leave out what is not needed, in ever smaller pieces, until no single item can be left out.

    The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 2002)
    that asks for complements only: what we look for needs many items together as a rule (a full pool, a full batch), so
    that a small part alone shows it rarely.

    Args:
        items: all; they are taken to show it.
        shows: whether some of the items, in their order, still show it; always the same answer to the same items.
        may_ask: whether ``shows`` may be asked once more; without a bound it is asked, in the worst case, about as
            often as the square of the number of items.
    """
    kept = tuple(items)
    num_probes = 0
    size = max(1, len(kept) // 2)
    start = num_useless = 0
    while kept and num_useless * size < len(kept):
        if not may_ask():
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
    """What one field does."""

    name: str
    value_a: object
    value_b: object
    alone: float | None
    """The metric of A with this field of B; None: such a config cannot work."""
    all_but: float | None
    """The metric of B with this field of A."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """What it came to."""

    metric_a: float
    metric_b: float
    effects: tuple[FieldEffect, ...]
    """In the order of the fields' definition."""
    cause: Cause
    """Empty when the metric is the same, or nothing was found within the bound."""
    num_replays: int

    def share(self, metric: float | None) -> float | None:
        """How far a value is on the way from A's to B's; None when there is no way."""
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

    def may_ask() -> bool:
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
        cause = find_cause(a, b, lambda config: _explains(metric_of(config), metric_a, metric_b), may_ask)
    return Bisection(metric_a, metric_b, tuple(effects), cause, len(known))


def _explains(metric: float, metric_a: float, metric_b: float) -> bool:
    return (metric - metric_a) / (metric_b - metric_a) >= EXPLAINED
