"""`lockstep replay`: a workload on the real scheduler and a logical clock. Here are files, clocks and the terminal;
what decides is in lockstep/replay and knows none of them."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.cli import options as flags
from lockstep.cli import replay_options as asked
from lockstep.cli.replay_configs import settings_of
from lockstep.cli.replay_trace import replay_trace
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.replay.cache_oracle import UnlimitedCache
    from lockstep.replay.cost import CostModel
    from lockstep.replay.report import Report
    from lockstep.replay.workload import Workload

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that `ru_maxrss` counts."""


class Shown(NamedTuple):
    """Files beside the report that a run is shown in."""

    html: Path | None = None
    perfetto: Path | None = None

    def of_b(self) -> Shown:
        """Those of the second run of a comparison: ``page-b.html`` beside ``page.html``."""
        return Shown(*(path and path.with_stem(f"{path.stem}-b") for path in self))


def replay(
    file: asked.Workload = None,
    input_file: asked.Input = None,
    settings: asked.Set = None,
    settings_b: asked.SetB = None,
    compare: asked.Compare = None,
    cost: asked.Cost = None,
    tick_ms: asked.TickMs = None,
    speed: asked.Speed = 1.0,
    limit: asked.Limit = None,
    dequantize: asked.Dequantize = None,
    engine: asked.Engine = None,
    slo: asked.Slo = "",
    output: asked.Output = None,
    html: asked.Html = None,
    perfetto: asked.Perfetto = None,
    ticks: asked.Ticks = False,
    verify: asked.Verify = None,
    execute: asked.Execute = None,
    model: asked.Model = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Replay a workload through the scheduler that serves, on a logical clock: same input, same bytes."""
    if verify is not None or execute is not None:
        return replay_trace(verify, execute, model)
    from lockstep.replay.goals import parse_goals
    from lockstep.replay.readers import ReadOptions, read_workload
    from lockstep.replay.report import GOALS

    path = one_file(file, input_file)
    goals = parse_goals(slo, "--slo", GOALS)
    overrides = settings_of(settings)
    overrides_b = {**overrides, **settings_of(settings_b)}
    reading = ReadOptions(speed=speed, limit=limit, dequantize_seed=dequantize, engine=engine)
    costs = cost_model(cost, tick_ms)
    shown = Shown(html, perfetto)
    reports = [_simulate(read_workload(path, reading), overrides, costs, goals, ticks, shown)]
    if compare is not None or settings_b:
        other = read_workload(compare or path, reading)
        reports.append(_simulate(other, overrides_b, costs, goals, ticks, shown.of_b()))
    data = _as_bytes(reports)
    if output is not None:
        _write(output, data)
    print(data.decode(), end="") if as_json else _show(reports)
    return 0


def one_file(file: str | None, input_file: str | None) -> str:
    """FILE or --input; UsageError where it is not exactly one of them."""
    if (file is None) == (input_file is None):
        raise UsageError("name one file: `lockstep replay FILE`, or --input FILE")
    return file if file is not None else str(input_file)


def cost_model(path: Path | None, tick_ms: float | None) -> CostModel | None:
    """What --cost or --tick-ms say; None: neither."""
    from lockstep.replay.cost_file import constant_cost, read_cost

    if path is not None and tick_ms is not None:
        raise UsageError("--cost says how long steps take, and so does --tick-ms; give one of them")
    if path is not None:
        return read_cost(path)
    return None if tick_ms is None else constant_cost(tick_ms)


def _simulate(
    workload: Workload,
    overrides: Mapping[str, str],
    cost: CostModel | None,
    goals_ms: Mapping[str, float],
    has_ticks: bool,
    shown: Shown,
) -> Report:
    from lockstep.replay.cache_oracle import UnlimitedCache
    from lockstep.replay.configs import config_for
    from lockstep.replay.records import TickRecorder
    from lockstep.replay.render.html import HtmlPage
    from lockstep.replay.render.perfetto import PerfettoWriter
    from lockstep.replay.report import report_of
    from lockstep.replay.simulator import Simulation

    recorder, ceiling = TickRecorder() if has_ticks else None, UnlimitedCache()
    workload = replace(workload, requests=ceiling.passing(workload.requests))
    page = HtmlPage() if shown.html is not None else None
    with ExitStack() as stack:
        writer = None
        if shown.perfetto is not None:
            writer = stack.enter_context(PerfettoWriter(shown.perfetto, workload.name))
        watchers = [each for each in (recorder, page, writer) if each is not None]
        simulation = Simulation(workload, config_for(workload, overrides), cost, watchers=watchers)
        start_s = time.perf_counter()
        replay = simulation.run()
        _tell_speed(len(replay.outcomes), time.perf_counter() - start_s)
        _tell_ceiling(ceiling, workload.content_size)
        if writer is not None:
            writer.add_requests(replay.outcomes)
    report = report_of(replay, goals_ms, recorder)
    if page is not None and shown.html is not None:
        page.write(shown.html, report, replay.outcomes)
        print(f"page written to {shown.html}", file=sys.stderr)
    return report


def _tell_speed(num_requests: int, passed_s: float) -> None:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    print(
        f"{num_requests:,} requests in {passed_s:.2f} s: {num_requests / max(passed_s, 1e-9):,.0f} requests/s, "
        f"peak memory {peak_bytes / 1e6:,.0f} MB",
        file=sys.stderr,
    )


def _tell_ceiling(ceiling: UnlimitedCache, content_size: int) -> None:
    hits, blocks = ceiling.num_hits, ceiling.num_blocks
    if ceiling.is_exceeded:
        print("too many different blocks to say what a cache without bounds would hit", file=sys.stderr)
    elif blocks:
        print(
            f"a cache without bounds would hit {hits / blocks:.2%} of the prompts' blocks "
            f"({hits:,} of {blocks:,}, {content_size} tokens each)",
            file=sys.stderr,
        )


def _as_bytes(reports: Sequence[Report]) -> bytes:
    """One report, or a list of both."""
    from lockstep.replay.report import to_json

    return to_json(reports[0]) if len(reports) == 1 else to_json(tuple(reports))


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path}: the report cannot be written there: {error.strerror}") from None
    print(f"report written to {path}", file=sys.stderr)


def _show(reports: Sequence[Report]) -> None:
    from lockstep.replay.render.terminal import show_comparison, show_report

    show_report(reports[0]) if len(reports) == 1 else show_comparison(reports[0], reports[1])
