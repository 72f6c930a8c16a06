"""Options that the verbs of replays share, and their values: workloads, recordings, scheduler configs, prices."""

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
        "--set", metavar="FIELD=VALUE", help="A limit of the scheduler; several by commas, or one --set each."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=expanded, help="Write a page with charts there: one HTML file."),
]


@dataclass(frozen=True, slots=True)
class ReadFlags:
    """Changes to a file's requests."""

    speed: Annotated[float, Flag(metavar="X")] = 1.0
    """Divides the gaps between arrivals."""
    limit: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """The first requests only."""
    dequantize: Annotated[int | None, Flag(metavar="SEED")] = None
    """Spread requests that share a stamp up to the next stamp, drawn by this seed."""
    engine: Annotated[int | None, Flag(metavar="N"), Range(0)] = None
    """Whose requests, where a recording has several engines."""

    def options(self) -> ReadOptions:
        """As readers take them; UsageError where a value cannot be."""
        from lockstep.replay.readers import ReadOptions

        return ReadOptions(speed=self.speed, limit=self.limit, dequantize_seed=self.dequantize, engine=self.engine)

    def read(self, path: str | Path) -> Workload:
        """The requests of a file; missing parts are reported on standard error."""
        from lockstep.replay.readers import read_workload

        workload = read_workload(path, self.options())
        print_notes(workload.notes)
        return workload


@dataclass(frozen=True, slots=True)
class CostFlags:
    """Prices of a step."""

    cost: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Durations of steps, as `lockstep calibrate` measured them."""
    tick_ms: Annotated[float | None, Flag(metavar="MS", shown="10, without --cost")] = None
    """Every step takes as long."""

    def priced(self) -> Priced | None:
        """None: neither flag was given. UsageError where both were, or they cannot be."""
        from lockstep.replay.cost_file import Priced, constant_cost, read_priced

        if self.cost is not None and self.tick_ms is not None:
            raise UsageError("--cost and --tick-ms both set the duration of steps; give one of them")
        if self.cost is not None:
            return read_priced(self.cost.expanduser())
        return None if self.tick_ms is None else Priced(constant_cost(self.tick_ms), {})

    def model(self) -> CostModel | None:
        """The prices alone."""
        priced = self.priced()
        return None if priced is None else priced.model


READ_DEFAULTS = ReadFlags()
COST_DEFAULTS = CostFlags()


def settings_of(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse ``--set a=1,b=2 --set c=3``: field to value as text."""
    from lockstep.replay.configs import parse_overrides

    return parse_overrides([part for setting in settings or () for part in setting.replace(",", " ").split()])


def file_settings(path: Path) -> dict[str, str]:
    """The fields that a config file sets. An empty one sets none.

    Raises:
        UsageError: it cannot be read.
        InvalidTextError: a key is no field; the message has the line and the nearest names.
    """
    from lockstep.core.policy import SchedulerConfig

    names = [field.name for field in fields(SchedulerConfig)]
    keys = f"a scheduler's fields: {', '.join(names)}"
    values = read_config(path.expanduser(), names, (), "the config", keys, null="none")
    return {name: str(value) for name, value in values.items()}


def config_of(workload: Workload, overrides: dict[str, str], source: str) -> SchedulerConfig:
    """The config of a replay; an error names its side."""
    from lockstep.replay.configs import config_for

    try:
        return config_for(workload, overrides)
    except (ConfigError, UsageError) as error:
        raise UsageError(f"{source}: {error}") from None


def warn_of_order(*sides: tuple[Workload, Mapping[str, str]]) -> None:
    """Say on standard error in which order requests with priorities are admitted, where that is not plain.

    Args:
        sides: workloads and what is set over their configs.
    """
    from lockstep.replay.configs import order_note

    print_notes(dict.fromkeys(filter(None, (order_note(workload, overrides) for workload, overrides in sides))))


def open_with_notes(path: Path) -> Recording:
    """The recording; warnings about its files go to standard error."""
    from lockstep.replay.trace import open_trace

    trace = open_trace(path)
    print_notes(map(str, trace.findings))
    return trace


def print_notes(notes: Iterable[str]) -> None:
    """Print warnings about a file to standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
