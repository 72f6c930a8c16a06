"""`lockstep gate`, `lockstep mirror` and `lockstep mirror-gate`: promote, hold or rollback, from what was mirrored.

Exit codes: 0 promote, 1 rollback, 2 hold; 3 where there is no verdict, whatever went wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import Flag, with_flags
from lockstep.cli.writing import OutputFile, check_outputs, expanded, make_folder, write_file
from lockstep.errors import ConfigError, EvidenceError, UsageError

if TYPE_CHECKING:
    from lockstep.release.evidence import Evidence
    from lockstep.release.policy import Layer, Policy
    from lockstep.release.reading import Source
    from lockstep.release.recordings import Recordings
    from lockstep.release.store import Store
    from lockstep.release.verdict import Verdict
    from lockstep.report.document import Plots

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
"""Variable that names the file which GitHub Actions shows beside a job."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE | BASELINE CANDIDATE]",
        help="Both sides in one file, or a file or recording of each.",
        show_default=False,
    ),
]
Input = Annotated[Path | None, typer.Option("--input", metavar="FILE", callback=expanded, help="The one FILE.")]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", callback=expanded, help="A YAML or JSON file of policy fields."),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the policy, e.g. mode=sequential.")
]
Owners = Annotated[
    Path | None,
    typer.Option("--owners", metavar="FILE", callback=expanded, help="Who looks after a signal: PATTERN OWNER lines."),
]
Second = Annotated[
    Path | None,
    typer.Option(
        "--aa",
        metavar="FILE",
        callback=expanded,
        help="A second baseline's answers to the same requests: what differs there is noise.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", callback=expanded, help="Write the verdict as JSON.")
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        metavar="FILE",
        callback=expanded,
        help="Append a report in Markdown.",
        show_default="$GITHUB_STEP_SUMMARY",
    ),
]
JUnit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", callback=expanded, help="Write the signals as JUnit XML.")
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", callback=expanded, help="Write a page, one file.")]


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """Sources of the policy, beside the input."""

    policy: PolicyFile = None
    settings: Set = None
    owners: Owners = None


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Places of the verdict, beside the terminal."""

    output: Output = None
    markdown: Markdown = None
    junit: JUnit = None
    html: Html = None

    def places(self) -> tuple[OutputFile, ...]:
        """Files that are written, and what they are called."""
        verdict, report = (self.output, "the verdict"), (self.markdown, "the report")
        return verdict, report, (self.junit, "the test results"), (self.html, "the page")


_DEFAULT_POLICY = PolicyFlags()
_NO_REPORTS = ReportFlags()


@dataclass(frozen=True, slots=True)
class GateFlags:
    """Flags of `lockstep gate`."""

    files: Files = None
    one_file: Input = None
    policy: PolicyFlags = _DEFAULT_POLICY
    aa: Second = None
    reports: ReportFlags = _NO_REPORTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def gate(given: GateFlags) -> int:
    """Judge a candidate: exit code 0 promote, 1 rollback, 2 hold, 3 bad input."""
    paths = paths_of(given.files, given.one_file)
    return _judge(paths, given.policy, given.reports, given.as_json, second=given.aa)


@with_flags
def mirror(
    files: Files = None,
    one_file: Input = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", callback=expanded, help="Write it there; lines if .jsonl."),
    ] = None,
    debug: flags.Debug = False,
) -> int:
    """Convert what other tools wrote to one file of observations that the gate reads."""
    from lockstep.release.evidence import gather
    from lockstep.release.mirroring import write_gate_input
    from lockstep.release.store import open_store

    paths = paths_of(files, one_file)
    if output is None:
        raise UsageError("--output is required: the path of the converted file, e.g. --output gate-input.json")
    check_outputs(((output, _GATE_INPUT),), paths)
    make_folder(output, _GATE_INPUT)
    with open_store() as store:
        sources, given, _ = _read(store, paths)
        joining = gather(store).joining
        write_gate_input(store, output, given)
    for source in sources:
        print(f"{source.path}: {source.num_rows:,} records of {source.format}", file=sys.stderr)
    print(f"{output}: {joining.num_pairs:,} pairs; lockstep gate {output} judges them", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class MirrorGateFlags:
    """Flags of `lockstep mirror-gate`."""

    files: Files = None
    one_file: Input = None
    gate_input: Annotated[Path | None, Flag(metavar="FILE", call=expanded)] = None
    """Write the converted file there, too."""
    policy: PolicyFlags = _DEFAULT_POLICY
    reports: ReportFlags = _NO_REPORTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def mirror_gate(given: MirrorGateFlags) -> int:
    """Convert what other tools wrote, and judge it: exit codes as those of gate."""
    paths = paths_of(given.files, given.one_file)
    return _judge(paths, given.policy, given.reports, given.as_json, gate_input=given.gate_input)


_GATE_INPUT = "the gate's input"


def _judge(
    paths: list[Path],
    policy: PolicyFlags,
    reports: ReportFlags,
    as_json: bool,
    second: Path | None = None,
    gate_input: Path | None = None,
) -> int:
    from lockstep.release.curves import plots_of

    check_outputs((*reports.places(), (gate_input, _GATE_INPUT)), (*paths, policy.policy, policy.owners, second))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # files of gigabytes go with this process
    verdict, rules, evidence = judge_files(paths, policy, second, gate_input)
    _write(verdict, plots_of(rules, evidence, verdict.series) if reports.html is not None else (), reports)
    _show(verdict, as_json)
    return verdict.decision.exit_code


class Judged(NamedTuple):
    """A verdict with what it is of."""

    verdict: Verdict
    policy: Policy
    evidence: Evidence
    """Its store is closed; its columns stay."""


def judge_files(
    paths: Sequence[Path],
    policy: PolicyFlags = _DEFAULT_POLICY,
    second: Path | None = None,
    gate_input: Path | None = None,
    names: Sequence[Path] | None = None,
) -> Judged:
    """Judge one file with both sides, or a file or recording of each.

    Args:
        second: answers of a second baseline, of the kind of the first one's.
        gate_input: where the converted files go; None: nowhere.
        names: of the files in messages, if they are copies of others.

    Raises:
        EvidenceError: the files, the policy or the owners cannot be read.
        UsageError: a second baseline without a file of the first.
    """
    from lockstep.release.evidence import gather
    from lockstep.release.gate import SecondBaseline, judge
    from lockstep.release.mirroring import write_gate_input
    from lockstep.release.store import open_store

    if second is not None and len(paths) != 2:
        raise UsageError("--aa goes with two files: BASELINE CANDIDATE --aa SECOND_BASELINE")
    with ExitStack() as stores:
        store = stores.enter_context(open_store())
        sources, given, recorded = _read(store, paths, names)
        rules = policy_from(policy, str(sources[0].path), given)
        evidence = gather(store, rules)
        beside = None
        if second is not None:
            second_store = stores.enter_context(open_store())
            source = _read(second_store, (paths[0], second))[0][1]
            beside = SecondBaseline(gather(second_store, rules), source)
        verdict = judge(rules, evidence, tuple(sources), beside)
        if gate_input is not None:
            make_folder(gate_input, _GATE_INPUT)
            write_gate_input(store, gate_input, given)
    if recorded is not None:
        from lockstep.release.decisions import with_decisions

        verdict = with_decisions(verdict, recorded.decisions(), recorded.notes)
    return Judged(verdict, rules, evidence)


def paths_of(files: list[Path] | None, given: Path | None) -> list[Path]:
    """The one or two paths that are named; UsageError for more or none."""
    paths = [*(path.expanduser() for path in files or ()), *([given] if given is not None else [])]
    if len(paths) not in (1, 2):
        raise UsageError("name one FILE that holds both sides, or two: BASELINE CANDIDATE")
    return paths


def _read(
    store: Store, paths: Sequence[Path], names: Sequence[Path] | None = None
) -> tuple[list[Source], dict[str, Any] | None, Recordings | None]:
    from lockstep.release.observation import SIDES
    from lockstep.release.reading import read
    from lockstep.release.recordings import is_recording, read_recordings

    recorded = [is_recording(path) for path in paths]
    if names is not None and any(recorded):
        name = names[recorded.index(True)]
        raise EvidenceError(f"{name}: a recording, which cannot be followed; lockstep gate judges it once it is whole")
    names = names or paths
    if len(paths) == 1:
        if recorded[0]:
            raise EvidenceError(f"{paths[0]}: a folder or recording is one side; give two: BASELINE CANDIDATE")
        source, policy = read(store, paths[0], None, names[0])
        return [source], policy, None
    if any(recorded):
        recordings = read_recordings(store, list(paths))
        return list(recordings.sources), None, recordings
    found = [read(store, *each) for each in zip(paths, SIDES, names, strict=True)]
    return [source for source, _ in found], None, None


def policy_from(policy: PolicyFlags, name: str = "", fields: Mapping[str, Any] | None = None) -> Policy:
    """The policy of the input, of a file and of the command line, later ones over earlier ones.

    Args:
        name: what the input is called.
        fields: the policy in it.
    """
    from lockstep.release.policy import Layer, policy_of, with_settings
    from lockstep.release.triage import read_owners

    layers = [Layer(name, fields)]
    if policy.policy is not None:
        layers.append(_policy_file(policy.policy))
    layers.append(Layer("--set", with_settings(policy.settings or ())))
    if policy.owners is not None:
        layers.append(Layer(str(policy.owners), {"owners": read_owners(policy.owners)}))
    return policy_of(*layers)


def _policy_file(path: Path) -> Layer:
    """The policy of a YAML or JSON file; it may stand under ``policy:``."""
    from lockstep.release.policy import Layer
    from lockstep.yaml_reading import read_plain, read_text

    try:
        found, lines = read_plain(read_text(path, "the policy"), str(path))
    except (ConfigError, UsageError) as error:
        raise EvidenceError(str(error)) from None
    if isinstance(found, dict) and isinstance(found.get("policy"), dict):
        inner = {where.removeprefix("policy."): line for where, line in lines.items() if where.startswith("policy.")}
        return Layer(str(path), found["policy"], inner)
    return Layer(str(path), {} if found is None else found, lines)


def _write(verdict: Verdict, plots: Sequence[Plots], reports: ReportFlags) -> None:
    from lockstep.release.rendering import document_of, to_junit
    from lockstep.release.verdict import to_json

    if reports.output is not None:
        write_file(reports.output, to_json(verdict), "the verdict")
    if reports.junit is not None:
        write_file(reports.junit, to_junit(verdict), "the test results")
    if place := reports.markdown or os.environ.get(STEP_SUMMARY):
        from lockstep.report.text import to_markdown

        markdown = Path(place)
        before = markdown.read_bytes() if markdown.is_file() else b""
        write_file(markdown, before + to_markdown(document_of(verdict)).encode(), "the report")
    if reports.html is not None:
        from lockstep.report.page import to_html

        write_file(reports.html, to_html(document_of(verdict, plots)).encode(), "the page")


def _show(verdict: Verdict, as_json: bool) -> None:
    from lockstep.release.rendering import document_of
    from lockstep.release.verdict import to_json
    from lockstep.report.text import show

    try:
        if as_json:
            sys.stdout.write(to_json(verdict).decode())
        else:
            show(document_of(verdict))
        sys.stdout.flush()
    except BrokenPipeError:  # who read it went away; the exit code is the verdict all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
