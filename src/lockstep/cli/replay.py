"""`lockstep replay`: a workload on the real scheduler and a logical clock, or a recording decided or computed again.

Here are files, clocks and the terminal; what decides is in lockstep/replay, which has none of them.
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
from lockstep.cli.flag_groups import SWITCH, Flag, refuse_others, with_flags
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
_FOR_FLEETS = ("routing", "max_imbalance")
_OF_RECORDINGS = ("verify", "execute", "model", "threads", "isa", "allow_gaps", "request", "as_json", "debug")


@dataclass(frozen=True, slots=True)
class ComparisonFlags:
    """A second run beside the first, and what both are judged by."""

    set_b: Annotated[list[str] | None, Flag(metavar="FIELD=VALUE")] = None
    """Run twice, the second time with this too, and compare."""
    compare: Annotated[str | None, Flag(metavar="FILE")] = None
    """Replay this too, and compare."""
    slo: Annotated[str, Flag(metavar="GOALS")] = ""
    """Count requests that meet goals in ms, e.g. ttft:500,tpot:50."""

    @property
    def has_b(self) -> bool:
        return self.compare is not None or bool(self.set_b)


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Files that are written, and what stands in them."""

    output: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """Write the report there as JSON."""
    ticks: Annotated[bool | None, Flag(shown="where there are at most 10,000 ticks")] = None
    """Whether the JSON report has every tick and request."""
    html: shared.Html = None
    trace: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """Record the run there as a server records its own, for --verify and diff."""
    perfetto: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """Write every step and request there, for ui.perfetto.dev."""

    @property
    def files(self) -> Files:
        return Files(self.trace, self.perfetto)


@dataclass(frozen=True, slots=True)
class RecordingFlags:
    """A recording that is decided or computed again, in the place of a replay."""

    verify: Annotated[Path | None, Flag(metavar="TRACE")] = None
    """Decide every step, turn, plan and route of a recording again: identical, or where it differs."""
    execute: Annotated[Path | None, Flag(metavar="TRACE")] = None
    """Compute every token of a recording with content again, with --model."""
    model: Annotated[str | None, Flag(metavar="SOURCE")] = None
    """The model of --execute."""
    threads: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """Threads of --execute; None: one for each core."""
    isa: Annotated[str | None, Flag(is_hidden=True)] = None
    """Instruction set of --execute; None: the fastest one here."""
    allow_gaps: Annotated[bool, SWITCH] = False
    """With --verify: missing or cut files are reported and do not fail it."""
    request: Annotated[str | None, Flag(metavar="ID")] = None
    """Show one request of a recording, by its x-request-id: its steps, waits and tokens."""
    serve: Annotated[Path | None, Flag(metavar="RECORDING")] = None
    """Answer its requests again, as a server without a model; see `lockstep replay --serve --help`."""


@dataclass(frozen=True, slots=True)
class FleetFlags:
    """Several replicas, and who of them gets a request."""

    replicas: Annotated[int | None, Flag(metavar="N"), Range(1)] = None
    """Replay on as many schedulers behind one balancer, and compare --routing policies."""
    routing: Annotated[str, Flag(metavar="POLICIES")] = "prefix,round_robin"
    """With --replicas: prefix, session, least_loaded, round_robin; several by commas."""
    max_imbalance: Annotated[int, Flag(metavar="N"), Range(0)] = 4
    """With --replicas: how many more requests than the least loaded a preferred replica may have."""


class Files(NamedTuple):
    """Files that a run is written to while it goes on."""

    trace: Path | None = None
    perfetto: Path | None = None

    def of_b(self) -> Files:
        """Files of the second run of a comparison: ``steps-b.json`` beside ``steps.json``."""
        return Files(*(path and path.with_stem(f"{path.stem}-b") for path in self))

    def places(self) -> tuple[OutputFile, ...]:
        """Files with their names."""
        return (self.trace, "the recording"), (self.perfetto, "the trace")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of both runs of a comparison."""

    priced: Priced | None
    goals_ms: Mapping[str, float]
    has_ticks: bool | None
    """Whether the report is to hold every tick; None: where they are not too many."""
    has_page: bool


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """Flags of `lockstep replay`."""

    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A workload or a trace; what format it has is seen by itself.")
    ] = None
    input_file: Annotated[str | None, typer.Option("--input", metavar="FILE", help="The same as FILE.")] = None
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
        """UsageError for a flag that a replay of one workload has no use for."""
        if self.recorded.model is not None:
            raise UsageError("--model is what --execute TRACE computes with; a replay computes no token and needs none")
        if self.recorded.request is not None:
            raise UsageError(
                "--request shows one request of a recording, which --verify TRACE or --execute TRACE names"
            )
        if self.recorded.allow_gaps:
            raise UsageError(
                "--allow-gaps is for --verify TRACE; a replay of a recording reports what is missing and goes on"
            )
        if self.outputs.ticks and self.outputs.output is None and not self.as_json:
            raise UsageError("--ticks makes the JSON report longer; say where it goes with --output FILE, or --json")


@with_flags
def replay(context: typer.Context, given: ReplayFlags) -> int:
    """Replay a workload through the scheduler that serves, on a logical clock: same input, same bytes."""
    recorded, fleet, outputs, comparison = given.recorded, given.fleet, given.outputs, given.comparison
    if recorded.verify is not None or recorded.execute is not None:
        way = "--verify" if recorded.execute is None else "--execute"
        refuse_others(
            context, _OF_RECORDINGS, f"does not apply to {way}, which takes a recording as it is; leave it out"
        )
        return replay_trace(recorded, given.as_json)
    if fleet.replicas is not None:
        refuse_others(context, _OF_FLEETS, "does not apply to --replicas, which compares policies; leave it out")
        return replay_fleet(given)
    for_one = [each.name for each in context.command.params if each.name and each.name not in _FOR_FLEETS]
    refuse_others(context, for_one, "is for several replicas; say how many with --replicas N, or leave it out")
    from lockstep.replay.metrics import parse_goals
    from lockstep.replay.report import GOALS

    output, html = outputs.output, outputs.html
    given.check()
    path = one_file(given.file, given.input_file)
    files, has_b = outputs.files, comparison.has_b
    places = ((output, "the report"), (html, "the page"), *files.places(), *(files.of_b().places() if has_b else ()))
    check_outputs(places, (path, comparison.compare, given.costs.cost))
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
    """The same requests on several replicas under each policy."""
    from lockstep.replay.configs import config_for
    from lockstep.replay.fleet import policies_of, run_fleets, to_json
    from lockstep.replay.render.tables import fleet_document
    from lockstep.report.text import show

    fleet, output, costs = given.fleet, given.outputs.output, given.costs
    workload = given.reading.read(one_file(given.file, given.input_file))
    assert fleet.replicas is not None, "there is no fleet without"
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
        print(f"nothing was served with {each.routing}: all {each.requests:,} requests were refused", file=sys.stderr)
    return EXIT_ALL_REFUSED if all_refused else 0


def one_file(file: str | None, input_file: str | None) -> str:
    """FILE or --input; UsageError where it is not exactly one of them."""
    if (file is None) == (input_file is None):
        raise UsageError("name one file: `lockstep replay FILE`, or --input FILE")
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
        for path, what in files.places():
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
    for path, what in files.places():
        if path is not None:
            print(f"{what.removeprefix('the ')} written to {path}", file=sys.stderr)
    notes = [order_note(workload, overrides), "" if extrapolation is None else extrapolation.note()]
    if settings.has_ticks is None and replay.num_ticks > DEFAULT_MAX_TICKS:
        recorder = None
        notes.append(f"ticks are left out of the JSON, since there are {replay.num_ticks:,}; --ticks puts them in")
    if all(each.refusal for each in replay.outcomes):
        print(f"{workload.name}: nothing was served: {refusals_in_words(replay)}", file=sys.stderr)
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
    """Decide or compute a recording again; exit code 0: everything is there and identical, 1: something is not."""
    if given.verify is not None and given.execute is not None:
        raise UsageError("--verify decides a recording again and --execute computes it again; give one of them")
    if given.execute is not None:
        if given.allow_gaps:
            raise UsageError("--execute follows every step and cannot pass over gaps; leave --allow-gaps out")
        return execute_trace(given.execute.expanduser(), given, as_json)
    assert given.verify is not None, "one of the two is given"
    if given.model is not None:
        raise UsageError("--verify needs no model: it decides, and computes nothing; leave --model out")
    if given.threads is not None or given.isa is not None:
        raise UsageError("--threads and --isa are for --execute: --verify computes nothing")
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
    is_in_order, may_be_meant = (all(each.is_in_order(allows) for each in verdicts) for allows in (allows_gaps, True))
    print(json.dumps(facts, indent=2) if as_json else "\n".join(lines))
    if not is_in_order and may_be_meant:
        print("files that were deleted on purpose are accepted with --allow-gaps", file=sys.stderr)
    return 0 if is_in_order else 1


def execute_trace(path: Path, given: RecordingFlags, as_json: bool) -> int:
    from lockstep.replay import execute as computing

    if given.model is None:
        raise UsageError("--execute computes with a model; name it with --model SOURCE")
    engines = []
    machine = computing.MachineOptions(given.threads, given.isa)
    for execution in computing.execute(open_with_notes(path), given.model, request=given.request, machine=machine):
        engines.append(computing.facts(execution))
        if not as_json:
            print("\n".join(computing.describe(execution)))
    if as_json:
        print(json.dumps({"version": VERSION, "engines": engines}, indent=2))
    return 0 if all(engine["identical"] for engine in engines) else 1
