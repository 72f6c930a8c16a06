"""The release's files: one version, a changelog by version, and a workflow that does what it claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.version import __version__
from tools.release import CHANGELOG, faults, main, sections

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW)["jobs"]
OLD = "## 0.1.0 (2026-01-31)\n\n- first\n"


def steps() -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in JOBS.items() for step in job["steps"]]


def test_the_newest_section_of_the_changelog_is_of_this_version() -> None:
    assert faults(CHANGELOG.read_text(), __version__) == []
    assert sections(CHANGELOG.read_text())[0].text


@pytest.mark.parametrize(
    ("changelog", "version", "tag", "fault"),
    [
        (OLD, "0.2.0", None, "the newest section of CHANGELOG.md has 0.1.0, but the package has 0.2.0"),
        ("# Changelog\n", "0.1.0", None, "has no version"),
        (f"## 0.2.0 (unreleased)\n\n- more\n\n{OLD}", "0.2.0", "v0.2.0", "has 0.2.0 as unreleased; write its date"),
        (OLD, "0.1.0", "0.1.0", "the tag is '0.1.0', but the package has 0.1.0; the tag must be v0.1.0"),
        (f"## 0.1.0 (unreleased)\n\n- again\n\n{OLD}", "0.1.0", None, "has 0.1.0 among the older versions"),
    ],
)
def test_a_version_that_cannot_be_released_is_reported(
    changelog: str, version: str, tag: str | None, fault: str
) -> None:
    [told] = faults(changelog, version, tag)
    assert fault in told


def test_a_released_version_has_its_notes() -> None:
    newest, older = sections(f"# Changelog\n\n## 0.2.0 (2026-03-01)\n\n- more\n- and more\n\n{OLD}")
    assert (newest.version, newest.text) == ("0.2.0", "- more\n- and more")
    assert (older.day, older.text) == ("2026-01-31", "- first")
    assert faults(OLD, "0.1.0", "v0.1.0") == []


def test_the_command_prints_the_notes_and_refuses_a_tag_of_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["notes"]) == 0
    assert capsys.readouterr().out.startswith(sections(CHANGELOG.read_text())[0].text)
    assert main(["check", "--tag", "v99.0.0"]) == 1
    assert "the tag must be v" in capsys.readouterr().err


def test_actions_are_named_by_commit_and_only_two_jobs_may_write() -> None:
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
    assert yaml.safe_load(WORKFLOW)["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert granted == {
        "image": {"contents": "read", "id-token": "write"},
        "publish": {"id-token": "write"},
        "announce": {"contents": "write"},
    }


def test_nothing_is_published_before_it_was_tested_or_without_a_tag() -> None:
    def before(name: str) -> set[str]:
        needs = JOBS[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    assert before("publish") == {"check", "wheels", "plain", "install", "image"}
    assert "github.event_name == 'push'" in JOBS["publish"]["if"]
    for name, step in steps():
        if re.search(r"--push|cosign sign|docker login", step.get("run", "")):
            assert step["if"] == "github.event_name == 'push'", name


def test_scripts_take_what_others_may_choose_from_the_environment_only() -> None:
    """A tag's name that was written into a script would be run as part of it."""
    assert [name for name, step in steps() if "${{" in step.get("run", "")] == []


def test_files_and_modules_that_its_commands_name_are_here() -> None:
    commands = "\n".join(step.get("run", "") for _, step in steps())
    files = set(re.findall(r"(?<![\w/.-])((?:requirements|deploy|\.ci)/[\w./]+)", commands))
    modules = set(re.findall(r"-m (tools\.\w+)", commands))
    assert {"requirements/runtime.txt", "requirements/release.txt", "deploy/Dockerfile", ".ci/run"} <= files
    assert [name for name in files if not (ROOT / name).exists()] == []
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []
    assert re.search(r"^dist:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_header_of_the_workflow_lists_every_job() -> None:
    head = WORKFLOW.partition("\nname: release")[0].partition("# What was run")[2]
    assert set(re.findall(r"^#   (\w+) ", head, re.MULTILINE)) == set(JOBS)


def test_the_version_is_written_in_one_place() -> None:
    """Beside the changelog, which tells of it, and the names that recordings and snapshots have of their maker."""
    assert 'path = "src/lockstep/version.py"' in (ROOT / "pyproject.toml").read_text()
    places = [
        path.relative_to(ROOT).as_posix()
        for folder, pattern in (("src", "*.py"), ("deploy", "*"), (".github", "*.yml"), ("tools", "*.py"))
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and f'"{__version__}"' in path.read_text(errors="replace")
    ]
    assert places == ["src/lockstep/version.py"]
