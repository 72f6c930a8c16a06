"""`lockstep gate`, `lockstep mirror` and `lockstep mirror-gate`: promote, hold or rollback, from what was mirrored.

Exit codes: 0 promote, 1 rollback, 2 hold; 3 where there is no verdict, whatever went wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.writing import Place, check_places, expanded, make_folder, write_file
from lockstep.errors import EvidenceError, UsageError

if TYPE_CHECKING:
    from lockstep.release.policy import Policy
    from lockstep.release.reading import Source
    from lockstep.release.store import Store
    from lockstep.release.verdict import Verdict
    from lockstep.report.document import Plots

MAX_POLICY_BYTES = 1 << 20

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE | BASELINE CANDIDATE]", help="Both sides in one file, or a file of each.", show_default=False
    ),
]
Input = Annotated[Path | None, typer.Option("--input", metavar="FILE", callback=expanded, help="The one FILE.")]
PolicyFile = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", callback=expanded, help="A YAML or JSON file of policy fields."),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="One field of the policy, over all files.")
]
Owners = Annotated[
    Path | None,
    typer.Option("--owners", metavar="FILE", callback=expanded, help="Who looks after a signal: PATTERN OWNER lines."),
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
    """Where the policy comes from, beside the input."""

    policy: PolicyFile = None
    settings: Set = None
    owners: Owners = None


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Where the verdict goes, beside the terminal."""

    output: Output = None
    markdown: Markdown = None
    junit: JUnit = None
    html: Html = None

    def places(self) -> tuple[Place, ...]:
        """Files that are written, and what they are called."""
        verdict, report = (self.output, "the verdict"), (self.markdown, "the report")
        return verdict, report, (self.junit, "the test results"), (self.html, "the page")


_DEFAULT_POLICY = PolicyFlags()
_NO_REPORTS = ReportFlags()


@with_flags
def gate(
    files: Files = None,
    one_file: Input = None,
    policy: PolicyFlags = _DEFAULT_POLICY,
    reports: ReportFlags = _NO_REPORTS,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Judge a candidate: exit code 0 promote, 1 rollback, 2 hold, 3 bad input."""
    return _judge(_paths(files, one_file), policy, reports, as_json)


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

    paths = _paths(files, one_file)
    if output is None:
        raise UsageError("--output says where the converted file goes, e.g. --output gate-input.json")
    check_places(((output, _GATE_INPUT),), paths)
    make_folder(output, _GATE_INPUT)
    with open_store() as store:
        sources, given = _read(store, paths)
        joining = gather(store).joining
        write_gate_input(store, output, given)
    for source in sources:
        print(f"{source.path}: {source.num_rows:,} records of {source.format}", file=sys.stderr)
    print(f"{output}: {joining.num_pairs:,} pairs; lockstep gate {output} judges them", file=sys.stderr)
    return 0


@with_flags
def mirror_gate(
    files: Files = None,
    one_file: Input = None,
    gate_input: Annotated[
        Path | None,
        typer.Option("--gate-input", metavar="FILE", callback=expanded, help="Write the converted file there, too."),
    ] = None,
    policy: PolicyFlags = _DEFAULT_POLICY,
    reports: ReportFlags = _NO_REPORTS,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Convert what other tools wrote, and judge it: exit codes as those of gate."""
    return _judge(_paths(files, one_file), policy, reports, as_json, gate_input)


_GATE_INPUT = "the gate's input"


def _judge(
    paths: list[Path], policy: PolicyFlags, reports: ReportFlags, as_json: bool, gate_input: Path | None = None
) -> int:
    from lockstep.release.curves import plots_of
    from lockstep.release.evidence import gather
    from lockstep.release.gate import judge
    from lockstep.release.mirroring import write_gate_input
    from lockstep.release.store import open_store

    check_places((*reports.places(), (gate_input, _GATE_INPUT)), (*paths, policy.policy, policy.owners))
    with open_store() as store:
        sources, given = _read(store, paths)
        rules = _policy(policy, given, sources)
        evidence = gather(store, rules.numeric_tolerances)
        verdict = judge(rules, evidence, tuple(sources))
        if gate_input is not None:
            make_folder(gate_input, _GATE_INPUT)
            write_gate_input(store, gate_input, given)
    _write(verdict, plots_of(rules, evidence) if reports.html is not None else (), reports)
    _show(verdict, as_json)
    return verdict.decision.exit_code


def _paths(files: list[Path] | None, given: Path | None) -> list[Path]:
    paths = [*(path.expanduser() for path in files or ()), *([given] if given is not None else [])]
    if len(paths) not in (1, 2):
        raise UsageError("name one FILE that holds both sides, or two: BASELINE CANDIDATE")
    return paths


def _read(store: Store, paths: list[Path]) -> tuple[list[Source], dict[str, Any] | None]:
    from lockstep.release.observation import SIDES
    from lockstep.release.reading import read

    if len(paths) == 1:
        source, policy = read(store, paths[0], None)
        return [source], policy
    found = [read(store, path, side) for path, side in zip(paths, SIDES, strict=True)]
    return [source for source, _ in found], None


def _policy(flags: PolicyFlags, given: dict[str, Any] | None, sources: list[Source]) -> Policy:
    from lockstep.release.policy import policy_of, with_settings
    from lockstep.release.triage import read_owners

    layers: list[tuple[str, dict[str, Any] | None]] = [(str(sources[0].path), given)]
    if flags.policy is not None:
        layers.append((str(flags.policy), _policy_file(flags.policy)))
    layers.append(("--set", with_settings(flags.settings or ())))
    if flags.owners is not None:
        layers.append((str(flags.owners), {"owners": read_owners(flags.owners)}))
    return policy_of(*layers)


def _policy_file(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_bytes()[: MAX_POLICY_BYTES + 1]
        if len(text) > MAX_POLICY_BYTES:
            raise EvidenceError(f"{path}: a policy of more than {MAX_POLICY_BYTES >> 20} MiB")
        found = yaml.safe_load(text.decode("utf-8"))
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvidenceError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise EvidenceError(f"{path}: the policy is no object of fields")
    return found.get("policy", found) if isinstance(found.get("policy", found), dict) else found


def _step_summary() -> Path | None:
    """The file that GitHub Actions shows beside a job."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(place) if place else None


def _write(verdict: Verdict, plots: Sequence[Plots], reports: ReportFlags) -> None:
    from lockstep.release.rendering import document_of, to_junit
    from lockstep.release.verdict import to_json

    if reports.output is not None:
        write_file(reports.output, to_json(verdict), "the verdict")
    if reports.junit is not None:
        write_file(reports.junit, to_junit(verdict), "the test results")
    if (markdown := reports.markdown or _step_summary()) is not None:
        from lockstep.report.text import to_markdown

        before = markdown.read_bytes() if markdown.exists() else b""
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
