"""Options that the verbs of replays share: workloads, recordings, scheduler configs, costs of steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.config_file import read_config
from lockstep.cli.flag_groups import Flag
from lockstep.cli.writing import expanded
from lockstep.errors import ConfigError, UsageError
from lockstep.option_fields import Range

if TYPE_CHECKING:
    from lockstep.core.policy import SchedulerConfig
    from lockstep.replay.cost import CostModel
    from lockstep.replay.cost_file import Priced
    from lockstep.replay.readers import ReadOptions
    from lockstep.replay.trace import Trace as Recording
    from lockstep.replay.workload import Workload


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Scheduler limit; may be repeated, or contain several with commas."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=expanded, help="File for a report with charts, as a single HTML page."),
]


@dataclass(frozen=True, slots=True)
class ReadFlags:
    """Flags that select and change the requests of a file."""

    speed: Annotated[float, Flag(metavar="X")] = 1.0
    """Speed-up of arrivals: the gaps between them are divided by this number."""
    limit: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """Maximum number of requests; later ones are ignored."""
    dequantize: Annotated[int | None, Flag(metavar="SEED")] = None
    """Seed that spreads requests with the same timestamp randomly up to the next timestamp; None: no spreading."""
    engine: Annotated[int | None, Flag(metavar="N"), Range(0)] = None
    """Engine whose requests are read, if a recording has several."""

    def options(self) -> ReadOptions:
        """Options of the readers; UsageError if a value is invalid."""
        from lockstep.replay.readers import ReadOptions

        return ReadOptions(speed=self.speed, limit=self.limit, dequantize_seed=self.dequantize, engine=self.engine)

    def read(self, path: str | Path) -> Workload:
        """Read the requests of a file; prints warnings about missing parts to standard error."""
        from lockstep.replay.readers import read_workload

        workload = read_workload(path, self.options())
        print_notes(workload.notes)
        return workload


@dataclass(frozen=True, slots=True)
class CostFlags:
    """Flags for the durations of steps."""

    cost: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Cost model of step durations, written by `lockstep calibrate`."""
    tick_ms: Annotated[float | None, Flag(metavar="MS", shown="10, without --cost")] = None
    """Constant duration of a step in milliseconds."""

    def priced(self) -> Priced | None:
        """Cost model with its valid ranges; None if no flag is given. UsageError if both are, or one is invalid."""
        from lockstep.replay.cost_file import Priced, constant_cost, read_priced

        if self.cost is not None and self.tick_ms is not None:
            raise UsageError("--cost and --tick-ms both set the duration of steps; give one of them")
        if self.cost is not None:
            return read_priced(self.cost.expanduser())
        return None if self.tick_ms is None else Priced(constant_cost(self.tick_ms), {})

    def model(self) -> CostModel | None:
        """Cost model without its valid ranges; None if no flag is given."""
        priced = self.priced()
        return None if priced is None else priced.model


READ_DEFAULTS = ReadFlags()
COST_DEFAULTS = CostFlags()


def settings_of(settings: Sequence[str] | None) -> dict[str, str]:
    """Values of ``--set a=1,b=2 --set c=3`` as texts, by field."""
    from lockstep.replay.configs import parse_overrides

    return parse_overrides([part for setting in settings or () for part in setting.replace(",", " ").split()])


def file_settings(path: Path) -> dict[str, str]:
    """Values of a config file as texts, by field; empty for an empty file.

    Raises:
        UsageError: the file cannot be read.
        InvalidTextError: a key is not a field; the message has the line and similar names.
    """
    from lockstep.core.policy import SchedulerConfig

    names = [field.name for field in fields(SchedulerConfig)]
    keys = f"a scheduler's fields: {', '.join(names)}"
    values = read_config(path.expanduser(), names, (), "the config", keys, null="none")
    return {name: str(value) for name, value in values.items()}


def config_of(workload: Workload, overrides: dict[str, str], source: str) -> SchedulerConfig:
    """Config of a replay; UsageError, with the ``source`` of the values, if they are invalid."""
    from lockstep.replay.configs import config_for

    try:
        return config_for(workload, overrides)
    except (ConfigError, UsageError) as error:
        raise UsageError(f"{source}: {error}") from None


def warn_of_order(*sides: tuple[Workload, Mapping[str, str]]) -> None:
    """Warn on standard error if the admission order of requests with priorities is not explicit.

    Args:
        sides: workloads, each with the values that override its config.
    """
    from lockstep.replay.configs import order_note

    print_notes(dict.fromkeys(filter(None, (order_note(workload, overrides) for workload, overrides in sides))))


def open_with_notes(path: Path) -> Recording:
    """Open a recording; prints warnings about its files to standard error."""
    from lockstep.replay.trace import open_trace

    trace = open_trace(path)
    print_notes(map(str, trace.findings))
    return trace


def print_notes(notes: Iterable[str]) -> None:
    """Print warnings about a file to standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
