"""`lockstep gate`, `lockstep mirror` and `lockstep mirror-gate`: promote, hold or rollback, from mirrored traffic.

Exit codes: 0 promote, 1 rollback, 2 hold, 3 any error that prevents a verdict.
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
"""Environment variable with the path of the file that GitHub Actions shows as a job's summary."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE | BASELINE CANDIDATE]",
        help="One file with both sides, or a file or recording per side.",
        show_default=False,
    ),
]
Input = Annotated[Path | None, typer.Option("--input", metavar="FILE", callback=expanded, help="FILE, as an option.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Field of the policy, e.g. mode=sequential.")
]
File = Annotated[Path | None, Flag(metavar="FILE", call=expanded)]


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """Flags for sources of the policy in addition to the input."""

    policy: File = None
    """YAML or JSON file of policy fields."""
    settings: Set = None
    owners: File = None
    """File with the owners of signals, in lines of PATTERN OWNER."""

    def sources(self) -> PolicySources:
        """Sources of the policy in the form of the `judging` module."""
        from lockstep.release.judging import PolicySources

        return PolicySources(self.policy, tuple(self.settings or ()), self.owners)


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Flags for files with the verdict, in addition to the output on the terminal."""

    output: File = None
    """File for the verdict as JSON."""
    markdown: Annotated[Path | None, Flag(metavar="FILE", call=expanded, shown=f"${STEP_SUMMARY}")] = None
    """File to which a report in Markdown is appended."""
    junit: File = None
    """File for the signals as JUnit XML."""
    html: File = None
    """File for a report as a single HTML page."""

    def files(self) -> tuple[OutputFile, ...]:
        """Files to write, with their names in messages."""
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
    """Answers of a second baseline to the same requests; its differences from the first are noise."""
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
        typer.Option("--output", metavar="FILE", callback=expanded, help="Converted file: JSONL if .jsonl, else JSON."),
    ] = None,
    debug: flags.Debug = False,
) -> int:
    """Convert files of other tools to one file of observations for the gate."""
    from lockstep.release.judging import convert_files

    paths = paths_of(files, one_file)
    if output is None:
        raise UsageError("--output is required; give the path of the converted file, e.g. --output gate-input.json")
    check_outputs(((output, _GATE_INPUT),), paths)
    make_folder(output, _GATE_INPUT)
    sources, num_pairs = convert_files(paths, output)
    for source in sources:
        print(f"{source.path}: {source.num_rows:,} records of {source.format}", file=sys.stderr)
    print(f"{output}: {num_pairs:,} pairs; to judge them: lockstep gate {output}", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class MirrorGateFlags:
    """Flags of `lockstep mirror-gate`."""

    files: Files = None
    one_file: Input = None
    gate_input: File = None
    """File for the converted observations."""
    policy: PolicyFlags = _DEFAULT_POLICY
    reports: ReportFlags = _NO_REPORTS
    as_json: flags.Json = False
    debug: flags.Debug = False


@with_flags
def mirror_gate(given: MirrorGateFlags) -> int:
    """Convert files of other tools and judge them; the exit codes are those of gate."""
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

    check_outputs((*reports.files(), (gate_input, _GATE_INPUT)), (*paths, policy.policy, policy.owners, second))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that temporary files of gigabytes are removed
    if gate_input is not None:
        make_folder(gate_input, _GATE_INPUT)
    verdict, rules, evidence = judge_files(paths, policy.sources(), second, gate_input)
    _write(verdict, plots_of(rules, evidence, verdict.series) if reports.html is not None else (), reports)
    _show(verdict, as_json)
    return verdict.decision.exit_code


def paths_of(files: list[Path] | None, given: Path | None) -> list[Path]:
    """The one or two given paths; UsageError for more or none."""
    paths = [*(path.expanduser() for path in files or ()), *([given] if given is not None else [])]
    if len(paths) not in (1, 2):
        raise UsageError(f"{len(paths)} files are given; give one FILE with both sides, or two: BASELINE CANDIDATE")
    return paths


def _write(verdict: Verdict, plots: Sequence[Plots], reports: ReportFlags) -> None:
    from lockstep.release.rendering import document_of, to_junit
    from lockstep.release.verdict import to_json

    if reports.output is not None:
        write_file(reports.output, to_json(verdict), "the verdict")
    if reports.junit is not None:
        write_file(reports.junit, to_junit(verdict), "the test results")
    if path := reports.markdown or os.environ.get(STEP_SUMMARY):
        from lockstep.report.text import to_markdown

        markdown = Path(path)
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
    except BrokenPipeError:  # the reader has closed its pipe; the exit code still reports the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
