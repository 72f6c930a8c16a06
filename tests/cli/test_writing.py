"""Outputs of commands: folders are made, and what cannot or must not be written is told before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.writing import check_outputs, write_file
from lockstep.errors import UsageError

WORKLOAD = {
    "config": {"block_size": 16, "num_blocks": 20, "max_num_seqs": 2},
    "requests": [{"id": str(number), "prompt_tokens": 30, "max_output_tokens": 20} for number in range(4)],
}
COST = {"constant_ps": 10**9, "prefill_token_ps": 10**6, "decode_seq_ps": 0, "context_token_ps": 0}
LIMITS = "max_num_seqs: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with one input of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "load.json").write_text(json.dumps(WORKLOAD))
    (tmp_path / "other.json").write_text(json.dumps(WORKLOAD))
    (tmp_path / "cost.json").write_text(json.dumps(COST))
    (tmp_path / "a.yaml").write_text(LIMITS)
    (tmp_path / "b.yaml").write_text("max_num_seqs: 2\n")
    return tmp_path


def error_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line of a command that ends with 2 before it did anything."""
    assert invoke(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("lockstep: error: ")


@pytest.mark.parametrize(
    "command",
    [
        ["replay", "load.json", "--output", "new/deep/out"],
        ["replay", "load.json", "--html", "new/deep/out"],
        ["replay", "load.json", "--trace", "new/deep/out"],
        ["replay", "load.json", "--perfetto", "new/deep/out"],
        ["diff", "load.json", "--set-b", "max_num_seqs=1", "--html", "new/deep/out"],
        ["diff", "load.json", "--set-b", "max_num_seqs=1", "--reproducer", "new/deep/out"],
        ["sweep", "load.json", "--grid", "max_num_seqs=1,2", "--jobs", "1", "--output", "new/deep/out"],
        ["sweep", "load.json", "--grid", "max_num_seqs=1,2", "--jobs", "1", "--html", "new/deep/out"],
    ],
    ids=lambda command: f"{command[0]} {command[-2]}",
)
def test_folders_of_outputs_are_made(command: list[str], folder: Path) -> None:
    assert invoke(command) in (0, 1)
    assert (folder / "new/deep/out").stat().st_size


@pytest.mark.parametrize("option", ["--output", "--html", "--trace", "--perfetto"])
def test_a_place_that_can_hold_no_file_is_one_line(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "there").mkdir()
    command = ["replay", "load.json", option]
    error = error_of([*command, "there"], capsys)
    assert error.endswith(" cannot be written there: it is a directory; give a file in it")
    error = error_of([*command, "a.yaml/x/report.json"], capsys)
    assert error.endswith(
        f" cannot be written there: {folder / 'a.yaml'} is not a directory; give a file in a directory"
    )
    assert "File name too long" in error_of([*command, "x" * 300], capsys)


def link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def hard_link(place: Path, target: Path) -> None:
    os.link(target, place)


@pytest.mark.parametrize("alias", [None, link, hard_link])
@pytest.mark.parametrize(
    "command",
    [
        *(["replay", "load.json", option, "load.json"] for option in ("--output", "--html", "--trace", "--perfetto")),
        ["replay", "--input", "load.json", "--output", "load.json"],
        ["replay", "load.json", "--compare", "other.json", "--output", "other.json"],
        ["replay", "load.json", "--cost", "cost.json", "--html", "cost.json"],
        ["diff", "load.json", "other.json", "--html", "other.json"],
        ["diff", "load.json", "--set-b", "max_num_seqs=1", "--reproducer", "load.json"],
        ["diff", "a.yaml", "b.yaml", "--workload", "load.json", "--reproducer", "load.json"],
        ["diff", "a.yaml", "b.yaml", "--workload", "load.json", "--html", "b.yaml"],
        ["diff", "load.json", "other.json", "--cost", "cost.json", "--html", "cost.json"],
        ["sweep", "load.json", "--grid", "max_num_seqs=1,2", "--output", "load.json"],
        ["sweep", "load.json", "--grid", "max_num_seqs=1,2", "--html", "load.json"],
        ["sweep", "load.json", "--grid", "max_num_seqs=1,2", "--cost", "cost.json", "--html", "cost.json"],
    ],
    ids=" ".join,
)
def test_output_cannot_overwrite_an_input(
    command: list[str],
    alias: Callable[[Path, Path], None] | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By whatever name."""
    target = folder / command[-1]
    before = target.read_bytes()
    place = target
    if alias is not None:
        alias(place := folder / "alias.json", target)
    error = error_of([*command[:-1], str(place)], capsys)
    assert error.endswith(f" cannot be written there: {command[-1]} is an input; give another file")
    assert target.read_bytes() == before


def test_no_output_takes_the_place_of_a_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor of a file in its directory."""
    file = folder / "flight/run.lstrace"
    assert invoke(["replay", "load.json", "--trace", str(file), "--set", "max_num_seqs=1"]) == 0
    capsys.readouterr()
    before = file.read_bytes()
    for command in (
        ["calibrate", "flight", "-o"],
        ["calibrate", str(file), "-o"],
        ["replay", "flight", "--trace"],
        ["diff", "flight", str(file), "--html"],
    ):
        assert "is an input; give another file" in error_of([*command, str(file)], capsys)
    assert file.read_bytes() == before
    assert invoke(["calibrate", "flight", "-o", "new/cost.json"]) == 0
    assert json.loads((folder / "new/cost.json").read_text())["constant_ps"]


def test_two_outputs_have_two_places(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", "load.json", "--output", "out", "--html", "./out"]
    assert (
        error_of(command, capsys)
        == "out: the page cannot be written there: the report has the same path; give another file"
    )
    check_outputs([(Path(os.devnull), "the report"), (Path(os.devnull), "the page")])


def test_home_is_home_where_no_shell_saw_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert invoke(["replay", "load.json", "--output=~/new/report.json"]) == 0
    assert (folder / "home/new/report.json").exists()
    assert not (folder / "~").exists()


def test_error_while_writing_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="the report cannot be written there: "):
        write_file(tmp_path / "file" / "report.json", b"", "the report")
