"""`lockstep replay`: simulates a workload with the server's scheduler on a logical clock, or repeats a recording.

This module has the files, clocks and terminal output. The decisions are made in lockstep/replay, which uses none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lockstep.cli import options as flags
from lockstep.cli import replay_options as shared
from lockstep.cli.adapter_flags import adapters_of
from lockstep.cli.flag_groups import SWITCH, Flag, reject_other_options, with_flags
from lockstep.cli.replay_options import open_with_notes, settings_of
from lockstep.cli.writing import OutputFile, check_outputs, expanded, make_folder, write_file
from lockstep.errors import UsageError
from lockstep.option_fields import Range

if TYPE_CHECKING:
    from lockstep.replay.cost_file import Priced
    from lockstep.replay.render.side import Side
    from lockstep.replay.report import Report
    from lockstep.replay.workload import Workload


EXIT_ALL_REFUSED = 1
"""Exit code of a replay in which no request was served."""
_OF_FLEETS = (
    "file", "input_file", "settings", "replicas", "routing", "max_imbalance", "output", "speed", "limit", "dequantize",
    "engine", "cost", "tick_ms", "as_json", "debug",
)  # fmt: skip
"""Parameters that apply to --replicas."""
_FOR_FLEETS = ("routing", "max_imbalance")
"""Parameters that apply only to --replicas."""
_OF_RECORDINGS = (
    "verify",
    "execute",
    "model",
    "lora_modules",
    "threads",
    "isa",
    "allow_gaps",
    "request",
    "as_json",
    "debug",
)
"""Parameters that apply to --verify and --execute."""


@dataclass(frozen=True, slots=True)
class ComparisonFlags:
    """Flags for a second run that is compared with the first, and for latency goals."""

    set_b: Annotated[list[str] | None, Flag(metavar="FIELD=VALUE")] = None
    """Scheduler limit of a second run, which is compared with the first; overrides --set."""
    compare: Annotated[str | None, Flag(metavar="FILE")] = None
    """Second workload or trace, whose replay is compared with that of FILE."""
    slo: Annotated[str, Flag(metavar="GOALS")] = ""
    """Latency goals in ms, e.g. ttft:500,tpot:50; the report counts the requests that meet them."""

    @property
    def has_b(self) -> bool:
        return self.compare is not None or bool(self.set_b)


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Flags for files to write, and for their content."""

    output: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """File for the report as JSON."""
    ticks: Annotated[bool | None, Flag(shown="yes, up to 10,000 ticks")] = None
    """Include every tick and request in the JSON report."""
    html: shared.Html = None
    trace: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """File for a recording of the run in the format of a server's, for --verify and diff."""
    perfetto: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """File for a timeline of all steps and requests, for ui.perfetto.dev."""

    @property
    def files(self) -> Files:
        return Files(self.trace, self.perfetto)


@dataclass(frozen=True, slots=True)
class RecordingFlags:
    """Flags that repeat the decisions or computations of a recording instead of a simulation."""

    verify: Annotated[Path | None, Flag(metavar="TRACE")] = None
    """Recording whose steps, turns, plans and routes are decided again; reports the first difference, if any."""
    execute: Annotated[Path | None, Flag(metavar="TRACE")] = None
    """Recording with content whose tokens are all computed again, with --model."""
    model: Annotated[str | None, Flag(metavar="SOURCE")] = None
    """Model for --execute."""
    lora_modules: Annotated[list[str] | None, Flag(metavar="NAME=PATH")] = None
    """LoRA adapter of the recording, for --execute; may be repeated. Its content identifies it."""
    threads: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """Threads of --execute; None: one for each core."""
    isa: Annotated[str | None, Flag(is_hidden=True)] = None
    """Instruction set of --execute; None: the fastest one of this machine."""
    allow_gaps: Annotated[bool, SWITCH] = False
    """With --verify: report missing or truncated files without failing."""
    request: Annotated[str | None, Flag(metavar="ID")] = None
    """With --verify or --execute: show the steps, waits and tokens of the request with this x-request-id."""
    serve: Annotated[Path | None, Flag(metavar="RECORDING")] = None
    """Serve the answers of this recording without a model; see `lockstep replay --serve --help`."""


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Flags for a replay on several replicas behind a load balancer."""

    replicas: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """Number of replicas behind one load balancer, for a comparison of --routing policies."""
    routing: Annotated[str, Flag(metavar="POLICIES")] = "prefix,round_robin"
    """With --replicas: policies to compare, separated by commas: prefix, session, least_loaded, round_robin."""
    max_imbalance: Annotated[int, Flag(metavar="N"), Range(0)] = 4
    """With --replicas: maximum number of requests that a preferred replica may have above the least loaded one."""


class Files(NamedTuple):
    """Files that are written during a run."""

    trace: Path | None = None
    perfetto: Path | None = None

    def of_b(self) -> Files:
        """Files of the second run of a comparison: ``steps-b.json`` beside ``steps.json``."""
        return Files(*(path and path.with_stem(f"{path.stem}-b") for path in self))

    def named(self) -> tuple[OutputFile, ...]:
        """Files with their names."""
        return (self.trace, "the recording"), (self.perfetto, "the trace")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that both runs of a comparison have."""

    priced: Priced | None
    goals_ms: Mapping[str, float]
    has_ticks: bool | None
    """True if the report includes every tick; None: only up to a maximum number of ticks."""
    has_page: bool


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """Flags of `lockstep replay`."""

    file: Annotated[str | None, typer.Argument(metavar="FILE", help="Workload or trace; its format is detected.")] = (
        None
    )
    input_file: Annotated[
        str | None, typer.Option("--input", metavar="FILE", help="Workload or trace, instead of FILE.")
    ] = None
    settings: shared.Set = None
    comparison: ComparisonFlags = field(default_factory=ComparisonFlags)
    outputs: OutputFlags = field(default_factory=OutputFlags)
    recorded: RecordingFlags = field(default_factory=RecordingFlags)
    fleet: FleetFlags = field(default_factory=FleetFlags)
    reading: shared.ReadFlags = shared.READ_DEFAULTS
    costs: shared.CostFlags = shared.COST_DEFAULTS
    as_json: flags.Json = False
    debug: flags.Debug = False

    def check(self) -> None:
        """Check the flags; UsageError for one that does not apply to a replay of one workload."""
        if self.recorded.model is not None:
            raise UsageError("--model requires --execute TRACE; other replays compute no tokens")
        if self.recorded.request is not None:
            raise UsageError("--request requires --verify TRACE or --execute TRACE")
        if self.recorded.allow_gaps:
            raise UsageError("--allow-gaps requires --verify TRACE; other replays warn about gaps and continue")
        if self.outputs.ticks and self.outputs.output is None and not self.as_json:
            raise UsageError("--ticks requires --output FILE or --json, because it extends the JSON report")


@with_flags
def replay(context: typer.Context, given: ReplayFlags) -> int:
    """Replay a workload with the server's scheduler, on a logical clock: same input, same bytes."""
    recorded, fleet, outputs, comparison = given.recorded, given.fleet, given.outputs, given.comparison
    if recorded.verify is not None or recorded.execute is not None:
        flag = "--verify" if recorded.execute is None else "--execute"
        reject_other_options(context, _OF_RECORDINGS, f"does not apply to {flag}; remove it")
        return replay_trace(recorded, given.as_json)
    if fleet.replicas is not None:
        reject_other_options(context, _OF_FLEETS, "does not apply to --replicas; remove it")
        return replay_fleet(given)
    for_one = [each.name for each in context.command.params if each.name and each.name not in _FOR_FLEETS]
    reject_other_options(context, for_one, "requires --replicas N")
    from lockstep.replay.metrics import parse_goals
    from lockstep.replay.report import GOALS

    output, html = outputs.output, outputs.html
    given.check()
    path = one_file(given.file, given.input_file)
    files, has_b = outputs.files, comparison.has_b
    written = ((output, "the report"), (html, "the page"), *files.named(), *(files.of_b().named() if has_b else ()))
    check_outputs(written, (path, comparison.compare, given.costs.cost))
    has_ticks = False if output is None and not given.as_json else outputs.ticks
    common = Settings(given.costs.priced(), parse_goals(comparison.slo, "--slo", GOALS), has_ticks, html is not None)
    overrides = settings_of(given.settings)
    runs = [_simulate(given.reading.read(path), overrides, common, files)]
    if has_b:
        other = given.reading.read(comparison.compare or path)
        runs.append(_simulate(other, {**overrides, **settings_of(comparison.set_b)}, common, files.of_b()))
    reports = [report for report, _ in runs]
    if html is not None:
        _write_page(html, [side for _, side in runs if side is not None])
    data = _as_bytes(reports)
    if output is not None:
        write_file(output, data, "the report")
    print(data.decode(), end="") if given.as_json else _show(reports)
    return EXIT_ALL_REFUSED if any(each.requests_refused == each.requests for each in reports) else 0


def replay_fleet(given: ReplayFlags) -> int:
    """Replay the same requests on several replicas with each routing policy; returns the exit code."""
    from lockstep.replay.configs import config_for
    from lockstep.replay.fleet import policies_of, run_fleets, to_json
    from lockstep.replay.render.tables import fleet_document
    from lockstep.report.text import show

    fleet, output, costs = given.fleet, given.outputs.output, given.costs
    workload = given.reading.read(one_file(given.file, given.input_file))
    assert fleet.replicas is not None, "a fleet has replicas"
    check_outputs(((output, "the report"),), (costs.cost,))
    policies, config = policies_of(fleet.routing), config_for(workload, settings_of(given.settings))
    start_s = time.perf_counter()
    reports = run_fleets(workload, config, fleet.replicas, policies, costs.model(), fleet.max_imbalance)
    _print_speed(sum(each.requests for each in reports), time.perf_counter() - start_s)
    if output is not None:
        write_file(output, to_json(reports), "the report")
    print(to_json(reports).decode(), end="") if given.as_json else show(fleet_document(reports))
    all_refused = [each for each in reports if each.requests_refused == each.requests]
    for each in all_refused:
        print(f"{each.routing}: all {each.requests:,} requests were refused", file=sys.stderr)
    return EXIT_ALL_REFUSED if all_refused else 0


def one_file(file: str | None, input_file: str | None) -> str:
    """FILE or --input; UsageError if both or neither are given."""
    if (file is None) == (input_file is None):
        raise UsageError("give exactly one file: `lockstep replay FILE`, or --input FILE")
    return file if file is not None else str(input_file)


def _simulate(
    workload: Workload, overrides: Mapping[str, str], settings: Settings, files: Files
) -> tuple[Report, Side | None]:
    from lockstep.replay.configs import config_for, order_note
    from lockstep.replay.cost import CostModel, Extrapolation
    from lockstep.replay.recording import RunRecording
    from lockstep.replay.render.perfetto import PerfettoWriter
    from lockstep.replay.render.side import Side
    from lockstep.replay.report import refusals_in_words, report_of
    from lockstep.replay.simulator import Simulation
    from lockstep.replay.timeline import DEFAULT_MAX_TICKS, MAX_TICKS, TickRecorder

    config = config_for(workload, overrides)
    cost, ranges = settings.priced or (None, {})
    extrapolation = Extrapolation(ranges) if ranges else None
    most_ticks = {True: MAX_TICKS, None: DEFAULT_MAX_TICKS, False: 0}[settings.has_ticks]
    recorder = TickRecorder(most_ticks) if most_ticks else None
    side = Side() if settings.has_page else None
    with ExitStack() as stack:
        writer = recording = None
        for path, what in files.named():
            if path is not None:
                make_folder(path, what)
        if files.perfetto is not None:
            writer = stack.enter_context(PerfettoWriter(files.perfetto, workload.name))
        if files.trace is not None:
            recording = stack.enter_context(RunRecording(files.trace, workload, config, cost or CostModel()))
        watchers = [each for each in (recorder, side, writer, recording, extrapolation) if each is not None]
        on_arrival = None if recording is None else recording.arrived
        simulation = Simulation(workload, config, cost, watchers=watchers, on_arrival=on_arrival)
        start_s = time.perf_counter()
        replay = simulation.run()
        _print_speed(len(replay.outcomes), time.perf_counter() - start_s)
        if writer is not None:
            writer.add_requests(replay.outcomes)
    for path, what in files.named():
        if path is not None:
            print(f"{what.removeprefix('the ')} written to {path}", file=sys.stderr)
    notes = [order_note(workload, overrides), "" if extrapolation is None else extrapolation.note()]
    if settings.has_ticks is None and replay.num_ticks > DEFAULT_MAX_TICKS:
        recorder = None
        notes.append(f"the JSON report has no ticks, because there are {replay.num_ticks:,}; --ticks includes them")
    if all(each.refusal for each in replay.outcomes):
        print(f"{workload.name}: all requests were refused: {refusals_in_words(replay)}", file=sys.stderr)
    report = report_of(replay, settings.goals_ms, recorder, tuple(filter(None, notes)))
    if side is not None:
        side.end(report, replay.outcomes)
    return report, side


def _print_speed(num_requests: int, passed_s: float) -> None:
    from lockstep.bench.replay import peak_memory_bytes

    print(
        f"{num_requests:,} requests in {passed_s:.2f} s: {num_requests / max(passed_s, 1e-9):,.0f} requests/s, "
        f"peak memory {peak_memory_bytes() / 1e6:,.0f} MB",
        file=sys.stderr,
    )


def _write_page(path: Path, sides: Sequence[Side]) -> None:
    from lockstep.replay.render.pages import comparison_page, replay_page

    text = replay_page(sides[0]) if len(sides) == 1 else comparison_page(sides[0], sides[1])
    write_file(path, text.encode(), "the page")


def _as_bytes(reports: Sequence[Report]) -> bytes:
    """One report, or a list of both."""
    from lockstep.replay.report import to_json

    return to_json(reports[0]) if len(reports) == 1 else to_json(tuple(reports))


def _show(reports: Sequence[Report]) -> None:
    from lockstep.replay.render.tables import comparison_document, report_document
    from lockstep.report.text import show

    show(report_document(reports[0]) if len(reports) == 1 else comparison_document(reports[0], reports[1]))


VERSION = 3
"""Version of the JSON form of ``--verify`` and ``--execute``."""


def replay_trace(given: RecordingFlags, as_json: bool) -> int:
    """Repeat the decisions or computations of a recording; exit code 0 if it is complete and identical, otherwise 1."""
    if given.verify is not None and given.execute is not None:
        raise UsageError("--verify and --execute are both given; give one of them")
    if given.execute is not None:
        if given.allow_gaps:
            raise UsageError("--allow-gaps does not apply to --execute, which needs every step; remove it")
        return execute_trace(given.execute.expanduser(), given, as_json)
    assert given.verify is not None, "one of the two is given"
    if given.model is not None:
        raise UsageError("--model does not apply to --verify, which computes no tokens; remove it")
    if given.threads is not None or given.isa is not None:
        raise UsageError("--threads and --isa do not apply to --verify, which computes no tokens; remove them")
    return verify_trace(given.verify.expanduser(), as_json, allows_gaps=given.allow_gaps, request=given.request)


def verify_trace(path: Path, as_json: bool, *, allows_gaps: bool = False, request: str | None = None) -> int:
    from lockstep.replay.request_timeline import RequestTimeline
    from lockstep.replay.verify import verify_recording

    timeline = None if request is None else RequestTimeline(request)
    verdicts = verify_recording(path, timeline)
    facts: dict[str, Any] = {"version": VERSION}
    lines: list[str] = []
    for each in verdicts:
        lines += each.lines()
        facts |= {each.key: each.facts()} if each.key else each.facts()
        if timeline is not None and not each.key:
            lines += timeline.describe()
            facts["request"] = timeline.facts()
    is_in_order, has_only_gaps = (all(each.is_in_order(allows) for each in verdicts) for allows in (allows_gaps, True))
    print(json.dumps(facts, indent=2) if as_json else "\n".join(lines))
    if not is_in_order and has_only_gaps:
        print("if files were deleted on purpose, --allow-gaps accepts the gaps", file=sys.stderr)
    return 0 if is_in_order else 1


def execute_trace(path: Path, given: RecordingFlags, as_json: bool) -> int:
    from lockstep.replay import execute as computing
    from lockstep.replay.execution import describe, facts

    if given.model is None:
        raise UsageError("--execute requires --model SOURCE")
    engines = []
    machine = computing.MachineOptions(given.threads, given.isa)
    adapters = adapters_of(given.lora_modules)
    trace = open_with_notes(path)
    for execution in computing.execute(trace, given.model, request=given.request, machine=machine, adapters=adapters):
        engines.append(facts(execution))
        if not as_json:
            print("\n".join(describe(execution)))
    if as_json:
        print(json.dumps({"version": VERSION, "engines": engines}, indent=2))
    return 0 if all(engine["identical"] for engine in engines) else 1
