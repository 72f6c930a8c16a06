"""The options of `lockstep replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Cost = Annotated[Path | None, typer.Option(metavar="FILE", help="How long steps take, as `lockstep calibrate` says.")]
TickMs = Annotated[
    float | None, typer.Option(metavar="MS", help="Every step takes as long.", show_default="10, without --cost")
]
Speed = Annotated[float, typer.Option(metavar="X", help="Divides the gaps between arrivals.")]
Limit = Annotated[int | None, typer.Option(metavar="N", help="The first requests only.", min=1)]
Dequantize = Annotated[
    int | None,
    typer.Option(metavar="SEED", help="Spread requests that share a stamp up to the next stamp, drawn by this seed."),
]
Engine = Annotated[
    int | None, typer.Option(metavar="N", help="Whose requests, where a recording has several engines.", min=0)
]
Slo = Annotated[str, typer.Option(metavar="GOALS", help="Count requests that meet goals in ms, e.g. ttft:500,tpot:50.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there as JSON.")]
Ticks = Annotated[bool, typer.Option("--ticks", help="Every tick and request become part of the JSON report.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a timeline there: one HTML file.")]
Perfetto = Annotated[
    Path | None,
    typer.Option(
        "--perfetto", "--trace", metavar="FILE", help="Write every step and request there, for ui.perfetto.dev."
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(metavar="TRACE", help="Decide every step of a recording again: identical, or where it differs."),
]
Execute = Annotated[
    Path | None,
    typer.Option(metavar="TRACE", help="Compute every token of a recording with content again, with --model."),
]
Model = Annotated[str | None, typer.Option(metavar="SOURCE", help="The model of --execute.")]
