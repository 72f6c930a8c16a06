"""`lockstep diff`: the first step that two configs or workloads decide differently, why, and on how few requests."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as asked
from lockstep.cli.replay import cost_model
from lockstep.cli.replay_configs import config_of, file_settings, settings_of
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.core.policy import SchedulerConfig
    from lockstep.replay.diff import Diff
    from lockstep.replay.readers import ReadOptions
    from lockstep.replay.workload import Workload

EXIT_DIVERGED = 1

First = Annotated[
    str, typer.Argument(metavar="A", help="A workload or trace; with --workload, a YAML or JSON file of limits.")
]
Second = Annotated[str | None, typer.Argument(metavar="B", help="Another of the same kind; none with --set-b.")]
WorkloadFile = Annotated[
    str | None, typer.Option("--workload", metavar="FILE", help="Compare the configs A and B on this.")
]
ReproducerFile = Annotated[
    Path | None,
    typer.Option("--reproducer", metavar="FILE", help="Write the few requests that still show it, as a workload."),
]
SetB = Annotated[
    list[str] | None, typer.Option("--set-b", metavar="FIELD=VALUE", help="A limit of B only, over those of --set.")
]


class Sides(NamedTuple):
    """What is compared."""

    workload: Workload
    a: SchedulerConfig
    b: SchedulerConfig
    other: Workload | None
    """B's workload, when it has its own."""


def diff(
    a: First,
    b: Second = None,
    workload: WorkloadFile = None,
    settings: asked.Set = None,
    settings_b: SetB = None,
    cost: asked.Cost = None,
    tick_ms: asked.TickMs = None,
    speed: asked.Speed = 1.0,
    limit: asked.Limit = None,
    dequantize: asked.Dequantize = None,
    engine: asked.Engine = None,
    reproducer: ReproducerFile = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Tell the first step that A and B decide differently, and why; exit code 1 if there is one."""
    from lockstep.cli.diff_text import facts, print_diff
    from lockstep.replay.diff import diff_configs, diff_workloads
    from lockstep.replay.readers import ReadOptions

    if b is not None and workload is None and _are_recordings(Path(a), Path(b)):
        if settings or settings_b or reproducer is not None:
            raise UsageError("two recordings are compared as they are, without --set, --set-b and --reproducer")
        _diff_recordings(Path(a), Path(b), as_json)
        return
    reading = ReadOptions(speed=speed, limit=limit, dequantize_seed=dequantize, engine=engine)
    sides = _sides(a, b, workload, settings, settings_b, reading)
    model = cost_model(cost, tick_ms)
    if sides.other is None:
        found = diff_configs(sides.workload, sides.a, sides.b, model)
    else:
        found = diff_workloads(sides.workload, sides.a, sides.other, sides.b, model)
    if as_json:
        print(json.dumps(facts(found, sides.a, sides.b), indent=2))
    else:
        print_diff(found, sides.a, sides.b, sides.workload.name)
    sys.stdout.flush()
    if reproducer is not None and found.divergence is not None:
        _write_reproducer(reproducer, found, sides, cost, tick_ms)
    if found.divergence is not None:
        raise typer.Exit(EXIT_DIVERGED)


def _are_recordings(a: Path, b: Path) -> bool:
    from lockstep.replay.readers.reading import is_recording

    return is_recording(a.expanduser()) and is_recording(b.expanduser())


def _diff_recordings(a: Path, b: Path, as_json: bool) -> None:
    from lockstep.cli.diff_text import VERSION, engine_facts, print_engine
    from lockstep.replay.trace import open_trace
    from lockstep.replay.trace_diff import diff_traces

    engines = diff_traces(open_trace(a.expanduser()), open_trace(b.expanduser()))
    if as_json:
        print(json.dumps({"version": VERSION, "engines": [engine_facts(each) for each in engines]}, indent=2))
    else:
        for each in engines:
            print_engine(each)
    if any(each.difference is not None for each in engines):
        raise typer.Exit(EXIT_DIVERGED)


def _sides(
    a: str,
    b: str | None,
    workload: str | None,
    settings: list[str] | None,
    settings_b: list[str] | None,
    reading: ReadOptions,
) -> Sides:
    from lockstep.replay.readers import read_workload

    common, own = settings_of(settings), settings_of(settings_b)
    if workload is not None:
        if b is None:
            raise UsageError("--workload compares two configs: `lockstep diff A.yaml B.yaml --workload FILE`")
        file = read_workload(workload, reading)
        config_a = config_of(file, {**file_settings(Path(a)), **common}, a)
        return Sides(file, config_a, config_of(file, {**file_settings(Path(b)), **common, **own}, b), None)
    file = read_workload(a, reading)
    config_a = config_of(file, common, "--set")
    if b is not None:
        other = read_workload(b, reading)
        return Sides(file, config_a, config_of(other, {**common, **own}, "--set-b"), other)
    if not own:
        raise UsageError(
            "there is nothing to compare: give a second file, --set-b FIELD=VALUE, or two configs and --workload FILE"
        )
    return Sides(file, config_a, config_of(file, {**common, **own}, "--set-b"), None)


def _write_reproducer(path: Path, found: Diff, sides: Sides, cost: Path | None, tick_ms: float | None) -> None:
    from lockstep.replay.writing import workload_document

    if found.reproducer is None:
        raise UsageError("--reproducer is for two configs on one workload; here each side has its own")
    try:
        path.write_bytes(workload_document(found.reproducer.workload, sides.a))
    except OSError as error:
        raise UsageError(f"{path}: the reproducer cannot be written there: {error.strerror}") from None
    words = ["lockstep", "diff", str(path)]
    for name in found.fields:
        value = getattr(sides.b, name)
        words += ["--set-b", f"{name}={str(value).lower() if value is None or value in (True, False) else value}"]
    words += ["--cost", str(cost)] if cost is not None else []
    words += ["--tick-ms", f"{tick_ms:g}"] if tick_ms is not None else []
    print(f"reproducer written to {path}; it shows with: {shlex.join(words)}", file=sys.stderr)
