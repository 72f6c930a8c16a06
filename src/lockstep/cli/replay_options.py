"""The options of `lockstep replay`, and those that its relatives share with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.replay_trace import tell
from lockstep.cli.writing import expanded
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.replay.cost import CostModel
    from lockstep.replay.cost_file import Priced
    from lockstep.replay.readers import ReadOptions
    from lockstep.replay.workload import Workload as Read

Workload = Annotated[
    str | None, typer.Argument(metavar="FILE", help="A workload or a trace; what format it has is seen by itself.")
]
Input = Annotated[str | None, typer.Option("--input", metavar="FILE", help="The same as FILE.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="A limit of the scheduler; several by commas, or one --set each."
    ),
]
SetB = Annotated[
    list[str] | None,
    typer.Option("--set-b", metavar="FIELD=VALUE", help="Run twice, the second time with this too, and compare."),
]
Compare = Annotated[str | None, typer.Option(metavar="FILE", help="Replay this too, and compare.")]
Slo = Annotated[str, typer.Option(metavar="GOALS", help="Count requests that meet goals in ms, e.g. ttft:500,tpot:50.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", callback=expanded, help="Write the report there as JSON.")]
Ticks = Annotated[
    bool | None,
    typer.Option(
        "--ticks/--no-ticks",
        help="Whether the JSON report has every tick and request.",
        show_default="where there are at most 10,000 ticks",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=expanded, help="Write a page with charts there: one HTML file."),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        callback=expanded,
        help="Record the run there as a server records its own, for --verify and diff.",
    ),
]
Perfetto = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=expanded, help="Write every step and request there, for ui.perfetto.dev."),
]
Verify = Annotated[
    Path | None,
    typer.Option(metavar="TRACE", help="Decide every step of a recording again: identical, or where it differs."),
]
Execute = Annotated[
    Path | None,
    typer.Option(metavar="TRACE", help="Compute every token of a recording with content again, with --model."),
]
AllowGaps = Annotated[
    bool,
    typer.Option("--allow-gaps", help="With --verify: files that are missing or cut are told, and are no fault."),
]
Model = Annotated[str | None, typer.Option(metavar="SOURCE", help="The model of --execute.")]


@dataclass(frozen=True, slots=True)
class ReadFlags:
    """What is made of a file's requests."""

    speed: Annotated[float, typer.Option(metavar="X", help="Divides the gaps between arrivals.")] = 1.0
    limit: Annotated[int | None, typer.Option(metavar="N", help="The first requests only.", min=1)] = None
    dequantize: Annotated[
        int | None,
        typer.Option(
            metavar="SEED", help="Spread requests that share a stamp up to the next stamp, drawn by this seed."
        ),
    ] = None
    engine: Annotated[
        int | None, typer.Option(metavar="N", help="Whose requests, where a recording has several engines.", min=0)
    ] = None

    def options(self) -> ReadOptions:
        """As readers take them; UsageError where a value cannot be."""
        from lockstep.replay.readers import ReadOptions

        return ReadOptions(speed=self.speed, limit=self.limit, dequantize_seed=self.dequantize, engine=self.engine)

    def read(self, path: str | Path) -> Read:
        """The requests of a file; what of it is not there is said on standard error."""
        from lockstep.replay.readers import read_workload

        workload = read_workload(path, self.options())
        tell(workload.notes)
        return workload


@dataclass(frozen=True, slots=True)
class CostFlags:
    """How long a step takes."""

    cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="How long steps take, as `lockstep calibrate` says.")
    ] = None
    tick_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Every step takes as long.", show_default="10, without --cost")
    ] = None

    def priced(self) -> Priced | None:
        """None: neither flag was given. UsageError where both were, or they cannot be."""
        from lockstep.replay.cost_file import Priced, constant_cost, read_priced

        if self.cost is not None and self.tick_ms is not None:
            raise UsageError("--cost says how long steps take, and so does --tick-ms; give one of them")
        if self.cost is not None:
            return read_priced(self.cost.expanduser())
        return None if self.tick_ms is None else Priced(constant_cost(self.tick_ms), {})

    def model(self) -> CostModel | None:
        """The prices alone."""
        priced = self.priced()
        return None if priced is None else priced.model
