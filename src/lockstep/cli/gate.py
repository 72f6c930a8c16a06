"""`lockstep gate`, `lockstep mirror` and `lockstep mirror-gate`: promote, hold or rollback, from what was mirrored.

Exit codes: 0 promote, 1 rollback, 2 hold; 3 where there is no verdict, whatever went wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.writing import check_places, expanded, write_file
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


@with_flags
def gate(
    files: Files = None,
    input: Input = None,
    policy: PolicyFile = None,
    settings: Set = None,
    owners: Owners = None,
    output: Output = None,
    markdown: Markdown = None,
    junit: JUnit = None,
    html: Html = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Judge a candidate: exit code 0 promote, 1 rollback, 2 hold, 3 bad input."""
    from lockstep.release.curves import plots_of
    from lockstep.release.evidence import gather
    from lockstep.release.gate import judge
    from lockstep.release.store import open_store

    paths = _paths(files, input)
    summary = markdown or _step_summary()
    places = ((output, "the verdict"), (markdown, "the report"), (junit, "the test results"), (html, "the page"))
    check_places(places, (*paths, policy, owners))
    with open_store() as store:
        sources, given = _read(store, paths)
        rules = _policy(policy, settings, owners, given, sources)
        evidence = gather(store, rules.numeric_tolerances)
        verdict = judge(rules, evidence, tuple(sources))
    plots = plots_of(rules, evidence) if html is not None else ()
    _write(verdict, plots, output, summary, junit, html)
    _show(verdict, as_json)
    return verdict.decision.exit_code


@with_flags
def mirror(
    files: Files = None,
    input: Input = None,
    output: Output = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> int:
    """Convert what other tools wrote to one file of observations that the gate reads."""
    from lockstep.release.store import open_store

    paths = _paths(files, input)
    if output is None:
        raise UsageError("--output says where the converted file goes, e.g. --output gate-input.json")
    check_places(((output, "the gate's input"),), paths)
    with open_store() as store:
        sources, given = _read(store, paths)
        write_file(output, store.as_gate_input(given), "the gate's input")
    for source in sources:
        print(f"{source.path}: {source.num_rows:,} records of {source.format}", file=sys.stderr)
    return 0


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


def _policy(
    path: Path | None,
    settings: list[str] | None,
    owners: Path | None,
    given: dict[str, Any] | None,
    sources: list[Source],
) -> Policy:
    from lockstep.release.policy import policy_of, with_settings
    from lockstep.release.triage import read_owners

    layers: list[tuple[str, dict[str, Any] | None]] = [(str(sources[0].path), given)]
    if path is not None:
        layers.append((str(path), _policy_file(path)))
    layers.append(("--set", with_settings(settings or ())))
    if owners is not None:
        layers.append((str(owners), {"owners": read_owners(owners)}))
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


def _write(
    verdict: Verdict,
    plots: Sequence[Plots],
    output: Path | None,
    markdown: Path | None,
    junit: Path | None,
    html: Path | None,
) -> None:
    from lockstep.release.rendering import document_of, to_junit
    from lockstep.release.verdict import to_json

    if output is not None:
        write_file(output, to_json(verdict), "the verdict")
    if junit is not None:
        write_file(junit, to_junit(verdict), "the test results")
    if markdown is not None:
        from lockstep.report.text import to_markdown

        before = markdown.read_bytes() if markdown.exists() else b""
        write_file(markdown, before + to_markdown(document_of(verdict)).encode(), "the report")
    if html is not None:
        from lockstep.report.page import to_html

        write_file(html, to_html(document_of(verdict, plots)).encode(), "the page")


def _show(verdict: Verdict, as_json: bool) -> None:
    from lockstep.release.rendering import document_of
    from lockstep.release.verdict import to_json
    from lockstep.report.text import show

    if as_json:
        sys.stdout.write(to_json(verdict).decode())
    else:
        show(document_of(verdict))
