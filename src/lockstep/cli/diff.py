"""`lockstep diff` finds the first step at which two configs or workloads differ, and the reason. `lockstep bisect`
finds the fields of a config that change a metric."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as shared
from lockstep.cli.flag_groups import Flag, reject_other_options, with_flags
from lockstep.cli.replay_options import config_of, file_settings, open_with_notes, settings_of, warn_of_order
from lockstep.cli.writing import check_outputs, expanded, write_file
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lockstep.core.policy import SchedulerConfig
    from lockstep.replay.cost import CostModel
    from lockstep.replay.diff import Diff
    from lockstep.replay.render.side import Side
    from lockstep.replay.workload import Workload
    from lockstep.report.document import Finding


EXIT_DIVERGED = 1
_OF_RECORDINGS = ("a", "b", "engine", "html", "as_json", "debug")
"""Parameters that apply to a comparison of two recordings."""


class Sides(NamedTuple):
    """Both sides of a comparison."""

    workload: Workload
    a: SchedulerConfig
    b: SchedulerConfig
    other: Workload | None
    """Workload of B; None: the same as A's."""


@dataclass(frozen=True, slots=True)
class DiffFlags:
    """Flags of `lockstep diff`."""

    a: Annotated[
        str, typer.Argument(metavar="A", help="Workload or trace; with --workload: YAML or JSON file of limits.")
    ]
    b: Annotated[str | None, typer.Argument(metavar="B", help="Second such file; not needed with --set-b.")] = None
    workload: Annotated[str | None, Flag(metavar="FILE")] = None
    """Workload on which the configs A and B are compared."""
    settings: shared.Set = None
    set_b: Annotated[list[str] | None, Flag(metavar="FIELD=VALUE")] = None
    """Scheduler limit of B only; overrides --set."""
    reproducer: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """Workload file for the smallest set of requests that shows the difference."""
    html: shared.Html = None
    reading: shared.ReadFlags = shared.READ_DEFAULTS
    costs: shared.CostFlags = shared.COST_DEFAULTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def diff(context: typer.Context, given: DiffFlags) -> None:
    """Show the first step that A and B decide differently, and why; exit code 1 if there is one."""
    from lockstep.replay.diff import diff_configs, diff_workloads
    from lockstep.replay.render.difference import configs_line, facts, finding_of
    from lockstep.replay.workload import ArrivalUnit
    from lockstep.report.text import show_block

    reproducer, html, costs = given.reproducer, given.html, given.costs
    check_outputs(((reproducer, "the reproducer"), (html, "the page")), (given.a, given.b, given.workload, costs.cost))
    if given.b is not None and given.workload is None and _are_recordings(Path(given.a), Path(given.b)):
        why = "does not apply to a comparison of two recordings; remove it"
        reject_other_options(context, _OF_RECORDINGS, why)
        _diff_recordings(Path(given.a), Path(given.b), given.reading.engine, html, given.as_json)
        return
    sides = _sides(given)
    if reproducer is not None and sides.other is not None:
        raise UsageError("--reproducer requires one workload for both sides; A and B are different workloads")
    cost = costs.model()
    if sides.other is None:
        found = diff_configs(sides.workload, sides.a, sides.b, cost)
    else:
        found = diff_workloads(sides.workload, sides.a, sides.other, sides.b, cost)
    is_timed = cost is not None or sides.workload.unit is ArrivalUnit.PS
    finding = finding_of(found, sides.a, sides.b, is_timed=is_timed)
    if given.as_json:
        print(json.dumps(facts(found, sides.a, sides.b), indent=2))
    else:
        print(f"{sides.workload.name}: {found.num_requests:,} request{'s' * (found.num_requests != 1)}")
        print(configs_line(found, sides.a, sides.b))
        show_block(finding)
    if html is not None:
        _write_page(html, sides, cost, found, finding)
    if reproducer is not None:
        _write_reproducer(reproducer, found, sides, costs)
    if found.divergence is not None:
        raise typer.Exit(EXIT_DIVERGED)


def _set_b(fields: Iterable[str], b: SchedulerConfig) -> Iterator[str]:
    """Command-line options that set B's values of the fields, for a workload with A's config."""
    for name in fields:
        value = getattr(b, name)
        yield "--set-b"
        yield f"{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"


def _are_recordings(a: Path, b: Path) -> bool:
    from lockstep.replay.readers.reading import is_recording

    return is_recording(a.expanduser()) and is_recording(b.expanduser())


def _diff_recordings(a: Path, b: Path, engine: int | None, html: Path | None, as_json: bool) -> None:
    from lockstep.replay.diff import diff_traces
    from lockstep.replay.render.difference import VERSION, engine_facts, finding_of_engine
    from lockstep.replay.render.pages import recordings_page
    from lockstep.report.text import show_block

    found = diff_traces(open_with_notes(a.expanduser()), open_with_notes(b.expanduser()), engine)
    engines = [finding_of_engine(each) for each in found]
    if as_json:
        print(json.dumps({"version": VERSION, "engines": [engine_facts(each) for each in found]}, indent=2))
    else:
        for (number, _, _, its, _), finding in zip(found, engines, strict=True):
            show_block(finding)
            if its.fields and its.b is not None:
                words = ["lockstep", "diff", str(a), "--engine", str(number), *_set_b(its.fields, its.b.config)]
                print(f"to find the decisive field and the smallest set of requests: {shlex.join(words)}")
    if html is not None:
        write_file(html, recordings_page(str(a), str(b), engines).encode(), "the page")
    if any(each.diff.divergence is not None for each in found):
        raise typer.Exit(EXIT_DIVERGED)


def _sides(given: DiffFlags) -> Sides:
    a, b, workload, reading = given.a, given.b, given.workload, given.reading
    common, own = settings_of(given.settings), settings_of(given.set_b)
    if workload is not None:
        if b is None:
            raise UsageError("--workload requires two configs: `lockstep diff A.yaml B.yaml --workload FILE`")
        file, other = reading.read(workload), None
        fields_a, fields_b = {**file_settings(Path(a)), **common}, {**file_settings(Path(b)), **common, **own}
    else:
        file, other = reading.read(a), None if b is None else reading.read(b)
        fields_a, fields_b = common, {**common, **own}
        if other is None and not own:
            raise UsageError(
                "A has nothing to be compared with: give a second file, --set-b FIELD=VALUE, or two configs with "
                "--workload FILE"
            )
    source_a, source_b = ("--set", "--set-b") if workload is None or b is None else (a, b)
    config_a, config_b = config_of(file, fields_a, source_a), config_of(other or file, fields_b, source_b)
    warn_of_order((file, fields_a), (other or file, fields_b))
    return Sides(file, config_a, config_b, other)


def _write_page(path: Path, sides: Sides, cost: CostModel | None, found: Diff, finding: Finding) -> None:
    """Simulate both sides to their end, and write the page. The search for a difference stops at the difference."""
    from lockstep.replay.render.charts import Mark
    from lockstep.replay.render.pages import comparison_page

    divergence = found.divergence
    mark = None if divergence is None else Mark("first difference", divergence.a.tick, divergence.a.start_ps)
    a = _side(sides.workload, sides.a, cost)
    b = _side(sides.other or sides.workload, sides.b, cost)
    write_file(path, comparison_page(a, b, finding, mark).encode(), "the page")


def _side(workload: Workload, config: SchedulerConfig, cost: CostModel | None) -> Side:
    from lockstep.replay.render.side import Side
    from lockstep.replay.report import report_of
    from lockstep.replay.simulator import Simulation

    side = Side()
    replay = Simulation(workload, config, cost, watchers=[side]).run()
    side.end(report_of(replay), replay.outcomes)
    return side


def _write_reproducer(path: Path, found: Diff, sides: Sides, costs: shared.CostFlags) -> None:
    from lockstep.replay.readers.workload_json import dump_workload

    if found.reproducer is None:
        print(f"no reproducer is written to {path}: the decisions of A and B are the same", file=sys.stderr)
        return
    words = ["lockstep", "diff", str(path), *_set_b(found.fields, sides.b)]
    words += ["--cost", str(costs.cost)] if costs.cost is not None else []
    words += ["--tick-ms", f"{costs.tick_ms:g}"] if costs.tick_ms is not None else []
    document = dump_workload(found.reproducer.workload, sides.a)
    write_file(path, document, "the reproducer", f"; to see the difference: {shlex.join(words)}")


@dataclass(frozen=True, slots=True)
class BisectFlags:
    """Flags of `lockstep bisect`."""

    file: Annotated[str, typer.Argument(metavar="FILE", help="Workload or trace.")]
    config_a: Annotated[Path, typer.Option("--from", metavar="A.yaml", help="Scheduler limits of A, as YAML or JSON.")]
    config_b: Annotated[Path, typer.Option("--to", metavar="B.yaml", help="Scheduler limits of B, as YAML or JSON.")]
    metric: str = "ttft_p99"
    """Metric of the report: ttft_p99, output_tokens_per_s, preemptions ..."""
    settings: shared.Set = None
    reading: shared.ReadFlags = shared.READ_DEFAULTS
    costs: shared.CostFlags = shared.COST_DEFAULTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def bisect(given: BisectFlags) -> None:
    """Change each differing field alone, and all but each, and show which fields change the metric."""
    from lockstep.replay.causes import bisect_fields
    from lockstep.replay.metrics import check_metric, metric_named, numbers_of
    from lockstep.replay.render.difference import bisection_facts, conclusion, effects_table
    from lockstep.replay.report import report_of
    from lockstep.replay.simulator import Simulation
    from lockstep.report.text import show_block

    metric, config_a, config_b = given.metric, given.config_a, given.config_b
    check_metric(metric)
    workload = given.reading.read(given.file)
    workload = replace(workload, requests=tuple(workload.requests))
    common, cost = settings_of(given.settings), given.costs.model()
    fields_a, fields_b = {**file_settings(config_a), **common}, {**file_settings(config_b), **common}
    a, b = config_of(workload, fields_a, str(config_a)), config_of(workload, fields_b, str(config_b))
    warn_of_order((workload, fields_a), (workload, fields_b))

    def metric_of(config: SchedulerConfig) -> float:
        numbers = numbers_of(report_of(Simulation(workload, config, cost).run()))
        return numbers[metric_named(metric, numbers)]

    found = bisect_fields(a, b, metric_of)
    if given.as_json:
        print(json.dumps(bisection_facts(found, metric), indent=2))
    else:
        print(f"{workload.name}: {metric} is {found.metric_a:,g} with A and {found.metric_b:,g} with B")
        if found.effects:
            print()
            show_block(effects_table(found))
            print()
        print(conclusion(found, metric))
