"""`lockstep bisect`: which of the fields that two configs differ in makes a metric what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as asked
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.replay_configs import config_of, file_settings, settings_of, tell_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.core.policy import SchedulerConfig
    from lockstep.replay.bisect import Bisection
    from lockstep.replay.render.tables import Table

VERSION = 1
"""Of the JSON form."""

File = Annotated[str, typer.Argument(metavar="FILE", help="A workload or a trace.")]
From = Annotated[Path, typer.Option("--from", metavar="A.yaml", help="Limits of A, as YAML or JSON.")]
To = Annotated[Path, typer.Option("--to", metavar="B.yaml", help="Limits of B.")]
Metric = Annotated[str, typer.Option(help="A figure of the report: ttft_p99, output_tokens_per_s, preemptions ...")]


@with_flags
def bisect(
    file: File,
    config_a: From,
    config_b: To,
    metric: Metric = "ttft_p99",
    settings: asked.Set = None,
    *,
    reading: asked.ReadFlags,
    costs: asked.CostFlags,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Take over each differing field alone, and all but each, and tell which of them makes the metric."""
    from lockstep.replay.bisect import bisect_fields
    from lockstep.replay.metrics import check_metric, metric_named, numbers_of
    from lockstep.replay.render.terminal import show_table
    from lockstep.replay.report import report_of
    from lockstep.replay.simulator import Simulation

    check_metric(metric)
    workload = reading.read(file)
    workload = replace(workload, requests=tuple(workload.requests))
    common, cost = settings_of(settings), costs.model()
    fields_a, fields_b = {**file_settings(config_a), **common}, {**file_settings(config_b), **common}
    a, b = config_of(workload, fields_a, str(config_a)), config_of(workload, fields_b, str(config_b))
    tell_order((workload, fields_a), (workload, fields_b))

    def metric_of(config: SchedulerConfig) -> float:
        numbers = numbers_of(report_of(Simulation(workload, config, cost).run()))
        return numbers[metric_named(metric, numbers)]

    found = bisect_fields(a, b, metric_of)
    if as_json:
        print(json.dumps(_facts(found, metric), indent=2))
    else:
        print(f"{workload.name}: {metric} is {found.metric_a:,g} with A and {found.metric_b:,g} with B")
        if found.effects:
            print()
            show_table(_table(found))
            print()
        print(_conclusion(found, metric))


def _table(found: Bisection) -> Table:
    from lockstep.replay.render.tables import Table

    table = Table("Effects", ("field", "A", "B", "A with it", "of the way", "B without it", "of the way"), num_words=3)
    table.rows.extend(_rows(found))
    return table


def _rows(found: Bisection) -> Iterator[tuple[str, ...]]:
    for effect in found.effects:
        cells = [effect.name, str(effect.value_a), str(effect.value_b)]
        for metric in (effect.alone, effect.all_but):
            share = found.share(metric)
            cells += [
                "cannot work" if metric is None else f"{metric:,g}",
                "" if share is None else f"{round(100 * share)}%",
            ]
        yield tuple(cells)


def _conclusion(found: Bisection, metric: str) -> str:
    alone, together = found.cause.alone, found.cause.together
    if not found.effects:
        return "A and B are the same config"
    if found.metric_a == found.metric_b:
        return f"{metric} is the same with A and B: there is nothing to explain"
    if len(alone) == 1:
        return f"{alone[0]} makes {metric}: taken over alone, it brings A to B's value"
    if alone:
        return f"each of {', '.join(alone)} alone brings {metric} from A's value to B's"
    if together:
        return f"no field alone makes {metric}; {' and '.join(together)} together do, and none of them can be left out"
    return f"what makes {metric} was not found within the bound of the search"


def _facts(found: Bisection, metric: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "metric": metric,
        "a": found.metric_a,
        "b": found.metric_b,
        "fields": [
            {
                "name": effect.name,
                "values": [effect.value_a, effect.value_b],
                "alone": effect.alone,
                "all_but": effect.all_but,
            }
            for effect in found.effects
        ],
        "decided_by": {"alone": list(found.cause.alone), "together": list(found.cause.together)},
        "conclusion": _conclusion(found, metric),
        "replays": found.num_replays,
    }
