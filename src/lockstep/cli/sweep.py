"""`lockstep sweep`: replays a workload with a grid of configs; shows the best and the cheapest that meets goals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as shared
from lockstep.cli.flag_groups import Flag, with_flags
from lockstep.cli.replay_options import settings_of, warn_of_order
from lockstep.cli.writing import check_outputs, expanded, write_file
from lockstep.errors import UsageError
from lockstep.option_fields import Range

if TYPE_CHECKING:
    from lockstep.replay.render.sweep import SweepResult
    from lockstep.replay.sweep import SweepJob, SweepOutcome

EXIT_NONE_MEETS = 1

DEFAULT_OBJECTIVES = ("ttft_p99", "output_tokens_per_s")
DEFAULT_OBJECTIVES_IN_TICKS = ("ttft_p99", "total_ticks")
"""Default objectives if ticks have no duration, so that there are no metrics per second."""
DEFAULT_SLO_PERCENT = 99.0


@dataclass(frozen=True, slots=True)
class SearchFlags:
    """Flags for the goals and objectives of the search, and for its execution."""

    objective: Annotated[
        list[str] | None, Flag(metavar="METRIC", shown="ttft_p99 and output_tokens_per_s, or total_ticks")
    ] = None
    """Metric of the Pareto front; may be repeated; the first two are plotted."""
    slo: Annotated[str, Flag(metavar="GOALS")] = ""
    """Latency goals in ms, e.g. ttft:500,tpot:50; the sweep finds the cheapest config that meets them."""
    slo_percent: Annotated[float | None, Flag(metavar="P", shown="99"), Range(0, 100)] = None
    """Percentage of all arriving requests that must meet the goals."""
    jobs: Annotated[int | None, Flag(metavar="N", shown="one per core"), Range(1)] = None
    """Number of processes."""
    output: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """File for the report as JSON."""


_SEARCH_DEFAULTS = SearchFlags()


@dataclass(frozen=True, slots=True)
class SweepFlags:
    """Flags of `lockstep sweep`."""

    file: Annotated[str, typer.Argument(metavar="FILE", help="Workload or trace.")]
    grid: Annotated[list[str] | None, Flag(metavar="FIELD=VALUES")] = None
    """Scheduler limit and its values, e.g. max_num_seqs=8,16,32; repeat the flag for further fields."""
    settings: shared.Set = None
    search: SearchFlags = _SEARCH_DEFAULTS
    html: shared.Html = None
    reading: shared.ReadFlags = shared.READ_DEFAULTS
    costs: shared.CostFlags = shared.COST_DEFAULTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def sweep(given: SweepFlags) -> None:
    """Replay every combination of a grid of limits; exit code 1 if no combination meets the given goals."""
    from lockstep.executors.machine import available_cores
    from lockstep.replay.configs import combinations, parse_grid
    from lockstep.replay.metrics import check_metric, parse_goals
    from lockstep.replay.render.sweep import facts
    from lockstep.replay.report import GOALS
    from lockstep.replay.sweep import SweepJob

    file, html, search = given.file, given.html, given.search
    objective, slo_percent, output = search.objective, search.slo_percent, search.output
    check_outputs(((output, "the sweep"), (html, "the page")), (file, given.costs.cost))
    for metric in objective or ():
        check_metric(metric)
    goals = parse_goals(search.slo, "--slo", GOALS)
    if slo_percent is not None and not goals:
        raise UsageError("--slo-percent requires goals, e.g. --slo ttft:500")
    all_settings = combinations(parse_grid(given.grid or ()))
    common = settings_of(given.settings)
    twice = [name for name in common if name in all_settings[0]]
    if twice:
        raise UsageError(f"{twice[0]} is given in --set and in --grid; remove one of them")
    workload = given.reading.read(file)
    if "order" not in all_settings[0]:
        warn_of_order((workload, common))
    job = SweepJob(workload, common, given.costs.priced(), goals)
    outcomes = _run(job, all_settings, search.jobs or available_cores())
    percent = DEFAULT_SLO_PERCENT if slo_percent is None else slo_percent
    result = _judged(job, outcomes, objective, percent)
    text = json.dumps(facts(result), indent=2) + "\n"
    if output is not None:
        write_file(output, text.encode(), "the sweep")
    if html is not None:
        _write_page(html, result)
    print(text, end="") if given.as_json else _show(result)
    if goals and result.best is None:
        raise typer.Exit(EXIT_NONE_MEETS)


def _run(job: SweepJob, all_settings: Sequence[dict[str, str]], num_processes: int) -> tuple[SweepOutcome, ...]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from lockstep.replay.sweep import sweep as run_all

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(all_settings))
        return run_all(job, all_settings, num_processes, lambda: progress.advance(task))


def _judged(
    job: SweepJob, outcomes: tuple[SweepOutcome, ...], objectives: Sequence[str] | None, percent: float
) -> SweepResult:
    """Result of a sweep. If no config works, there are no metrics and therefore no objectives."""
    from lockstep.replay.metrics import metric_named
    from lockstep.replay.render.sweep import SweepResult
    from lockstep.replay.sweep import cheapest, front

    names = dict.fromkeys(name for outcome in outcomes for name in outcome.figures)
    is_timed = any(name.startswith("latency_ms.") for name in names)
    objectives = objectives or (DEFAULT_OBJECTIVES if is_timed else DEFAULT_OBJECTIVES_IN_TICKS)
    objectives = tuple(metric_named(each, names) for each in objectives) if names else ()
    return SweepResult(
        name=job.workload.name,
        outcomes=outcomes,
        objectives=objectives,
        is_on_front=front(outcomes, objectives),
        goals_ms=job.goals_ms,
        percent=percent,
        best=cheapest(outcomes, percent / 100) if job.goals_ms else None,
        common=job.common,
    )


def _show(result: SweepResult) -> None:
    from lockstep.replay.render.sweep import sweep_blocks, sweep_notes, verdict
    from lockstep.report.text import show_block

    for block in sweep_blocks(result):
        show_block(block)
    for note in sweep_notes(result):
        print(note)
    if result.goals_ms:
        print(verdict(result))


def _write_page(path: Path, result: SweepResult) -> None:
    from lockstep.replay.render.sweep import sweep_page

    write_file(path, sweep_page(result).encode(), "the page")
