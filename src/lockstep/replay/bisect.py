"""Which of the fields that two configs differ in makes a metric what it is. Decides on values; running is the caller's.

A config *explains* the metric when it brings it at least ``EXPLAINED`` of the way from A's value to B's, or beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.policy import SchedulerConfig
from lockstep.replay.causes import Cause, differing_fields, find_cause, taken_over

EXPLAINED = 0.9
"""Of the way from A to B."""
MAX_EVALUATIONS = 200
"""Replays of one bisection; configs that were replayed are not again."""

Evaluate = Callable[[SchedulerConfig], float]


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
