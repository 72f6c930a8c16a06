"""`lockstep gate`, `lockstep mirror` and `lockstep mirror-gate`: promote, hold or rollback, from what was mirrored.

Exit codes: 0 promote, 1 rollback, 2 hold; 3 where there is no verdict, whatever went wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import Flag, with_flags
from lockstep.cli.writing import OutputFile, check_outputs, expanded, make_folder, write_file
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.release.judging import PolicySources
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
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the policy, e.g. mode=sequential.")
]
File = Annotated[Path | None, Flag(metavar="FILE", call=expanded)]


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """Sources of the policy, beside the input."""

    policy: File = None
    """A YAML or JSON file of policy fields."""
    settings: Set = None
    owners: File = None
    """Who looks after a signal: PATTERN OWNER lines."""

    def sources(self) -> PolicySources:
        """As the judging of files takes them."""
        from lockstep.release.judging import PolicySources

        return PolicySources(self.policy, tuple(self.settings or ()), self.owners)


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Places of the verdict, beside the terminal."""

    output: File = None
    """Write the verdict as JSON."""
    markdown: Annotated[Path | None, Flag(metavar="FILE", call=expanded, shown=f"${STEP_SUMMARY}")] = None
    """Append a report in Markdown."""
    junit: File = None
    """Write the signals as JUnit XML."""
    html: File = None
    """Write a page, one file."""

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
    aa: File = None
    """A second baseline's answers to the same requests: what differs there is noise."""
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
    from lockstep.release.judging import convert_files

    paths = paths_of(files, one_file)
    if output is None:
        raise UsageError("--output is required: the path of the converted file, e.g. --output gate-input.json")
    check_outputs(((output, _GATE_INPUT),), paths)
    make_folder(output, _GATE_INPUT)
    sources, num_pairs = convert_files(paths, output)
    for source in sources:
        print(f"{source.path}: {source.num_rows:,} records of {source.format}", file=sys.stderr)
    print(f"{output}: {num_pairs:,} pairs; lockstep gate {output} judges them", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class MirrorGateFlags:
    """Flags of `lockstep mirror-gate`."""

    files: Files = None
    one_file: Input = None
    gate_input: File = None
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
    from lockstep.release.judging import judge_files

    check_outputs((*reports.places(), (gate_input, _GATE_INPUT)), (*paths, policy.policy, policy.owners, second))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # files of gigabytes go with this process
    if gate_input is not None:
        make_folder(gate_input, _GATE_INPUT)
    verdict, rules, evidence = judge_files(paths, policy.sources(), second, gate_input)
    _write(verdict, plots_of(rules, evidence, verdict.series) if reports.html is not None else (), reports)
    _show(verdict, as_json)
    return verdict.decision.exit_code


def paths_of(files: list[Path] | None, given: Path | None) -> list[Path]:
    """The one or two paths that are named; UsageError for more or none."""
    paths = [*(path.expanduser() for path in files or ()), *([given] if given is not None else [])]
    if len(paths) not in (1, 2):
        raise UsageError("name one FILE that holds both sides, or two: BASELINE CANDIDATE")
    return paths


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
