"""Which fields of two configs decide: what happens when some of them are taken over from the one to the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError
from lockstep.replay.minimise import minimise


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
