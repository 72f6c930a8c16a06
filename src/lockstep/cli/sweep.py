"""`lockstep sweep`: a grid of configs on one workload, what is best in it, and the cheapest that meets goals."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as asked
from lockstep.cli.replay import cost_model
from lockstep.cli.replay_configs import settings_of
from lockstep.cli.tables import new_table, print_table
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.replay.sweep import Outcome

EXIT_NONE_MEETS = 1
VERSION = 1
"""Of the JSON form."""

File = Annotated[str, typer.Argument(metavar="FILE", help="A workload or a trace.")]
Grid = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="FIELD=VALUES", help="Values by commas, e.g. max_num_seqs=8,16,32; one per field."),
]
Objective = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="METRIC",
        help="What the front is about; the first two are plotted.",
        show_default="ttft_p99 and output_tokens_per_s",
    ),
]
Slo = Annotated[
    str, typer.Option(metavar="GOALS", help="Find the cheapest config that meets these, in ms: ttft:500,tpot:50.")
]
SloPercent = Annotated[
    float, typer.Option(metavar="P", min=0, max=100, help="Requests that must meet the goals, of all that arrive.")
]
Jobs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes.", show_default="one per core")]
DEFAULT_OBJECTIVES = ("ttft_p99", "output_tokens_per_s")
DEFAULT_SLO_PERCENT = 99.0


def sweep(
    file: File,
    grid: Grid = None,
    settings: asked.Set = None,
    objective: Objective = None,
    slo: Slo = "",
    slo_percent: SloPercent = DEFAULT_SLO_PERCENT,
    jobs: Jobs = None,
    cost: asked.Cost = None,
    tick_ms: asked.TickMs = None,
    speed: asked.Speed = 1.0,
    limit: asked.Limit = None,
    dequantize: asked.Dequantize = None,
    engine: asked.Engine = None,
    output: asked.Output = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Replay every combination of a grid of limits; exit code 1 if goals are given and none meets them."""
    from lockstep.replay import sweep as sweeping
    from lockstep.replay.goals import parse_goals
    from lockstep.replay.grid import combinations, parse_grid
    from lockstep.replay.readers import ReadOptions, read_workload
    from lockstep.replay.report import GOALS

    goals = parse_goals(slo, "--slo", GOALS)
    all_settings = combinations(parse_grid(grid or ()))
    common = settings_of(settings)
    twice = [name for name in common if name in all_settings[0]]
    if twice:
        raise UsageError(f"{twice[0]} is given by --set and by --grid; say it once")
    workload = read_workload(file, ReadOptions(speed=speed, limit=limit, dequantize_seed=dequantize, engine=engine))
    job = sweeping.Job(workload, common, cost_model(cost, tick_ms), goals)
    outcomes = _run(job, all_settings, jobs or len(os.sched_getaffinity(0)))
    objectives = _objectives(objective or DEFAULT_OBJECTIVES, outcomes)
    is_front = sweeping.front(outcomes, objectives)
    best = sweeping.cheapest(outcomes, slo_percent / 100) if goals else None
    facts = _facts(workload.name, outcomes, objectives, is_front, goals, slo_percent, best)
    text = json.dumps(facts, indent=2) + "\n"
    if output is not None:
        _write(output, text)
    if as_json:
        print(text, end="")
    else:
        _print(outcomes, objectives, is_front)
        print(_verdict(outcomes, best, goals, slo_percent), end="")
    sys.stdout.flush()
    if goals and best is None:
        raise typer.Exit(EXIT_NONE_MEETS)


def _run(job: Any, all_settings: Sequence[dict[str, str]], num_processes: int) -> tuple[Outcome, ...]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from lockstep.replay.sweep import sweep as run_all

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(all_settings))
        return run_all(job, all_settings, num_processes, lambda: progress.advance(task))


def _objectives(wanted: Sequence[str], outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Paths of the metrics; a grid in which nothing works has none."""
    from lockstep.replay.metrics import metric_named

    names = dict.fromkeys(name for outcome in outcomes for name in outcome.figures)
    return tuple(metric_named(each, names) for each in wanted) if names else ()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: the sweep cannot be written there: {error.strerror}") from None


SHOWN = ("output_tokens_per_s", "kv_occupancy", "preemptions", "requests_refused")
"""Figures that the table has beside times and objectives."""


def _print(outcomes: Sequence[Outcome], objectives: Sequence[str], is_front: Sequence[bool]) -> None:
    from lockstep.cli.scatter import Point, scatter
    from lockstep.replay.metrics import SHORT_FORMS, short_name

    names = list(dict.fromkeys((*objectives, *_shown(outcomes))))
    table = new_table("", *outcomes[0].settings)
    for name in names:
        table.add_column(short_name(name), justify="right")
    for outcome, is_best in zip(outcomes, is_front, strict=True):
        figures = [f"{outcome.figures[name]:,g}" if name in outcome.figures else "" for name in names]
        table.add_row("*" if is_best else "", *outcome.settings.values(), *figures)
    print_table(table)
    if any(name.startswith("latency_") for name in names):
        print(f"times in {'ms' if any(name.startswith(SHORT_FORMS[0]) for name in names) else 'ticks'}")
    for outcome in outcomes:
        if outcome.refusal:
            print(f"{_said(outcome)} cannot work: {outcome.refusal}")
    if len(objectives) > 1:
        x, y = objectives[:2]
        points = [
            Point(outcome.figures[x], outcome.figures[y], "*" if is_best else "o")
            for outcome, is_best in sorted(zip(outcomes, is_front, strict=True), key=lambda pair: not pair[1])
            if x in outcome.figures and y in outcome.figures
        ]
        print("\n".join(["", *scatter(points, short_name(x), short_name(y))]))
        print("* is on the Pareto front: no other is as good in everything and better in something")


def _shown(outcomes: Sequence[Outcome]) -> list[str]:
    from lockstep.replay.metrics import SHORT_FORMS

    figures = next((outcome.figures for outcome in outcomes if outcome.figures), {})
    form = next((form for form in SHORT_FORMS if f"{form}.ttft.p50" in figures), SHORT_FORMS[0])
    times = [f"{form}.{measure}.{kind}" for measure in ("ttft", "tpot") for kind in ("p50", "p99")]
    return [name for name in (*times, *SHOWN, "goodput.ratio") if name in figures]


def _said(outcome: Outcome) -> str:
    return ", ".join(f"{name}={value}" for name, value in outcome.settings.items())


def _verdict(outcomes: Sequence[Outcome], best: int | None, goals: dict[str, float], percent: float) -> str:
    if not goals:
        return ""
    what = ", ".join(f"{name} of {limit:g} ms" for name, limit in goals.items())
    if best is None:
        return f"no config meets {what} for {percent:g} % of the requests\n"
    share = outcomes[best].good_share or 0.0
    return f"cheapest that meets {what}: {_said(outcomes[best])} ({100 * share:.6g} % of the requests meet it)\n"


def _facts(
    name: str,
    outcomes: Sequence[Outcome],
    objectives: Sequence[str],
    is_front: Sequence[bool],
    goals: dict[str, float],
    percent: float,
    best: int | None,
) -> dict[str, Any]:
    from lockstep.replay.metrics import MORE_IS_BETTER

    return {
        "version": VERSION,
        "name": name,
        "objectives": [{"name": each, "better": "more" if each in MORE_IS_BETTER else "less"} for each in objectives],
        "goals_ms": goals,
        "slo_percent": percent if goals else None,
        "cheapest": None if best is None else outcomes[best].settings,
        "rows": [
            {"set": each.settings, "is_on_front": is_best, "refusal": each.refusal or None, "figures": each.figures}
            for each, is_best in zip(outcomes, is_front, strict=True)
        ],
    }
