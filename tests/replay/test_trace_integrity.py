"""Files that are removed, swapped, duplicated, emptied or cut are detected; actions of a recorder are no faults."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.main import invoke
from lockstep.cli.replay import verify_trace
from lockstep.cluster.plan_recorder import PLAN_SUFFIX, PlanRecorder
from lockstep.cluster.planner import Observed, PlanPolicy, plan
from lockstep.errors import TraceError
from lockstep.replay.live import workload_of
from lockstep.replay.plans import verify_plans
from lockstep.replay.readers import read_workload
from lockstep.replay.trace import files_in, open_trace
from lockstep.replay.trace_integrity import Kind, Part, arranged
from lockstep.replay.verify import verify
from lockstep.worker.flight.options import TraceOptions
from tests.replay.recordings import files_of, mark_as_killed
from tests.replay.rotations import run_flight
from tests.waiting import until

NUM_FILES = 7
"""Minimum number of files of the damaged recording."""
Files = list[Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a recording of one run with its manifest, by name."""
    folder = tmp_path_factory.mktemp("whole")
    run_flight(folder, 3, num_requests=30, file_bytes=1000)
    assert len(files_of(folder)) >= NUM_FILES
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(whole: dict[str, bytes], tmp_path: Path) -> Path:
    folder = tmp_path / "flight"
    folder.mkdir()
    for name, data in whole.items():
        (folder / name).write_bytes(data)
    return folder


def kinds(folder: Path) -> list[str]:
    found = verify(open_trace(folder))
    assert found.is_identical, found.diverged
    return [each.kind.value for each in found.findings]


def swap(a: Path, b: Path) -> None:
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def cut(path: Path, num_bytes: int) -> Path:
    path.write_bytes(path.read_bytes()[:num_bytes])
    return path


def take_away(*paths: Path) -> None:
    for path in paths:
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Files], object], list[str]]] = {
    "a file in the middle is removed": (lambda f: f[2].unlink(), ["missing"]),
    "two beside each other are": (lambda f: take_away(f[2], f[3]), ["missing"]),
    "two apart are": (lambda f: take_away(f[2], f[4]), ["missing", "missing"]),
    "the newest is removed": (lambda f: f[-1].unlink(), ["missing"]),
    "two are swapped": (lambda f: swap(f[1], f[4]), ["misplaced", "misplaced"]),
    "the first and the last are": (lambda f: swap(f[0], f[-1]), ["misplaced", "misplaced"]),
    "one is there twice": (lambda f: (f[0].parent / "copy.lstrace").write_bytes(f[2].read_bytes()), ["repeated"]),
    "one lies over another": (lambda f: f[3].write_bytes(f[2].read_bytes()), ["repeated", "missing"]),
    "one is emptied": (lambda f: f[2].write_bytes(b""), ["empty"]),
    "the oldest is emptied": (lambda f: f[0].write_bytes(b""), ["empty"]),
    "the newest is emptied": (lambda f: f[-1].write_bytes(b""), ["empty"]),
    "one is cut": (lambda f: cut(f[2], f[2].stat().st_size - 100), ["cut"]),
    "one lacks its last byte": (lambda f: cut(f[2], f[2].stat().st_size - 1), ["cut"]),
    "one has but three bytes": (lambda f: cut(f[2], 3), ["empty"]),
    "one is cut and the next gone": (
        lambda f: cut(f[2], f[2].stat().st_size - 100).parent.joinpath(f[3].name).unlink(),
        ["cut", "missing"],
    ),
    "one is cut and the next empty": (
        lambda f: cut(f[2], f[2].stat().st_size - 100).with_name(f[3].name).write_bytes(b""),
        ["cut", "empty"],
    ),
}
HOLES = {"missing", "empty", "cut"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_recording_is_reported_and_fails_verification(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    do, expected = DAMAGE[damage]
    do(files_of(folder))
    assert verify_trace(folder, as_json=False) == 1
    said = capsys.readouterr()
    first, *told = said.out.splitlines()
    assert first.endswith(", identical, but the files differ from the recorded ones")
    assert len(told) >= len(expected)
    is_hole = HOLES.issuperset(expected)
    assert ("--allow-gaps" in said.err) == is_hole
    assert verify_trace(folder, as_json=True, allows_gaps=True) == (0 if is_hole else 1)
    held = json.loads(capsys.readouterr().out)
    assert (held["identical"], held["whole"]) == (True, False)
    assert [each["kind"] for each in held["findings"]] == expected
    assert list(read_workload(folder).notes) == told[: len(expected)]


def test_the_commands_report_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files_of(folder)
    for index in (2, 4):
        paths[index].unlink()
    assert invoke(["replay", "--verify", str(folder)]) == 1
    assert f"{paths[2].name} is missing between {paths[1].name} and {paths[3].name}" in capsys.readouterr().out
    assert invoke(["replay", "--verify", str(folder), "--allow-gaps"]) == 0
    capsys.readouterr()
    assert invoke(["replay", str(folder)]) == 0
    assert f"note: {paths[2].name} is missing between " in capsys.readouterr().err
    assert invoke(["calibrate", str(folder), "-o", str(folder / "cost.json")]) == 0
    assert capsys.readouterr().err.count("note: ") == 2


def test_deleted_oldest_files_are_missing_and_allowed_by_allow_gaps(folder: Path) -> None:
    """Files that the recorder deletes are listed as deleted; see tests/worker/flight."""
    assert kinds(folder) == []
    paths = files_of(folder)
    ends = [1, 2, len(paths) // 2, len(paths) - 1]
    for begin, end in pairwise([0, *ends]):
        take_away(*paths[begin:end])
        assert verify_trace(folder, as_json=False) == 1
        assert verify_trace(folder, as_json=False, allows_gaps=True) == 0


def test_a_single_file_of_any_name_is_verified_alone(folder: Path, tmp_path: Path) -> None:
    for path in files_of(folder):
        renamed = tmp_path / "one-000009.lstrace"
        renamed.write_bytes(path.read_bytes())
        assert kinds(renamed) == []


@pytest.mark.parametrize("gone", [[2], [2, 3], [1, 4]])
def test_the_number_of_missing_steps_is_exact(folder: Path, gone: list[int], whole: dict[str, bytes]) -> None:
    paths = files_of(folder)
    alone = {index: verify(open_trace(paths[index])) for index in gone}
    for index in gone:
        paths[index].unlink()
    losses = [each.loss for each in verify(open_trace(folder)).findings]
    assert sum(loss.steps[0] for loss in losses if loss) == sum(each.counts["steps"] for each in alone.values())
    assert sum(loss.num_turns for loss in losses if loss) == sum(each.counts["turns"] for each in alone.values())


def test_a_cut_file_is_reported_with_its_byte_and_the_missing_steps(folder: Path) -> None:
    path = files_of(folder)[2]
    all_steps = verify(open_trace(folder)).counts["steps"]
    size = cut(path, path.stat().st_size - 100).stat().st_size
    found = verify(open_trace(folder))
    [finding] = found.findings
    assert (finding.kind, finding.file, finding.byte) == (Kind.CUT, path.name, size)
    assert finding.loss is not None
    assert finding.loss.steps == {0: all_steps - found.counts["steps"]}
    assert f"{path.name} ends early at byte {size}" in str(finding)
    assert f"{finding.loss.steps[0]} steps of engine 0" in str(finding)


def test_the_newest_file_may_be_cut_by_a_kill(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files_of(folder)[-1]
    cut(path, path.stat().st_size - 10)
    assert kinds(folder) == ["cut"], "the manifest has its length"
    mark_as_killed(path)
    assert kinds(folder) == ["open"]
    assert verify_trace(folder, as_json=False) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith(", identical")
    assert f"{path.name} ends early at byte {path.stat().st_size}; it was read up to there" in said[1]


def test_swapped_files_are_read_in_the_order_of_their_headers(folder: Path, whole: dict[str, bytes]) -> None:
    before = list(workload_of(open_trace(folder)).requests)
    paths = files_of(folder)
    swap(paths[1], paths[3])
    (folder / "again.lstrace").write_bytes(paths[2].read_bytes())
    assert list(workload_of(open_trace(folder)).requests) == before


def test_verbs_that_need_every_step_refuse_a_gap(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", "--execute", str(folder), "--model", "stub://alpha"]) == 0
    assert invoke(["diff", str(folder), str(folder)]) == 0
    missing = files_of(folder)[2]
    missing.unlink()
    for command in (
        ["replay", "--execute", str(folder), "--model", "stub://alpha"],
        ["diff", str(folder), str(folder)],
    ):
        capsys.readouterr()
        assert invoke(command) == 2
        assert f"error: {folder}: {missing.name} is missing between " in capsys.readouterr().err


def test_allow_gaps_requires_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", str(folder), "--allow-gaps"]) == 2
    assert "--verify" in capsys.readouterr().err
    assert invoke(["replay", "--execute", str(folder), "--allow-gaps", "--model", "stub://alpha"]) == 2


def test_two_simulated_runs_in_one_directory_are_not_repetitions(tmp_path: Path) -> None:
    workload = Path(__file__).parents[2] / "examples" / "workload.json"
    for name in ("a", "run-000003"):
        assert invoke(["replay", str(workload), "--trace", str(tmp_path / f"{name}.lstrace")]) == 0
    assert kinds(tmp_path) == []
    assert verify(open_trace(tmp_path)).counts["engines"] == 2
    cut(tmp_path / "a.lstrace", 300)
    assert kinds(tmp_path) == ["empty"], "all of it is one block, which is read whole or not at all"


def test_engines_are_counted_once_whatever_is_missing(folder: Path) -> None:
    files_of(folder)[2].unlink()
    assert verify(open_trace(folder)).counts["engines"] == 1


def test_missing_plans_are_detected(tmp_path: Path) -> None:
    """Files of the planner, beside those of the device. Each plan is written before the next one: a writer that falls
    behind puts many plans into one file, and deletes the first files to keep within the limit."""
    recorder = PlanRecorder(TraceOptions(str(tmp_path), 16 << 12, num_files=1 << 12))
    observed, policy = Observed((), 1000), PlanPolicy()

    def num_written() -> int:
        return sum(path.stat().st_size for path in files_in(tmp_path, PLAN_SUFFIX))

    while len(files_in(tmp_path, PLAN_SUFFIX)) < 4:
        num_before = num_written()
        recorder.planned(observed, 1.0, policy, plan(observed, 1.0, policy))
        until(lambda: num_written() > num_before, "the plan is written")  # noqa: B023 - called at once
    recorder.close()
    paths = files_in(tmp_path, PLAN_SUFFIX)
    assert verify_plans(tmp_path).findings == ()
    paths[1].unlink()
    verdict = verify_plans(tmp_path)
    assert [(each.kind, each.file) for each in verdict.findings] == [(Kind.MISSING, paths[1].name)]
    assert not verdict.is_in_order(allows_gaps=False)
    assert verdict.is_in_order(allows_gaps=True)
    paths[2].write_bytes(b"")
    assert [each.kind for each in verify_plans(tmp_path).findings] == [Kind.MISSING, Kind.EMPTY]
    for path in files_in(tmp_path, PLAN_SUFFIX):
        path.write_bytes(b"")
    with pytest.raises(TraceError, match="ends before the first entry"):
        verify_plans(tmp_path)


RUNS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.booleans()), min_size=1, max_size=3)
"""First number, number of files, and True if the last one is cut."""


def parts_of(runs: list[tuple[int, int, bool]], gaps: random.Random) -> list[Part]:
    """Files as recorders leave them: the first run may lack its oldest files, and a file may follow a gap, before which
    one may be cut."""
    parts: list[Part] = []
    for index, (first, count, is_open) in enumerate(runs):
        first = 1 if index else first
        name = f"2026010{index}-120000-7"
        behind_gap = [gaps.random() < 0.3 for _ in range(count + 1)]
        for offset in range(count):
            is_last = offset == count - 1
            is_whole = not is_open if is_last else not behind_gap[offset + 1] or gaps.random() < 0.5
            gap = "No space left on device" if behind_gap[offset] else ""
            path = Path(f"{name}-{first + offset:06}.lstrace")
            parts.append(Part(path, name, first + offset, 100, gap, is_whole, is_whole and not is_last))
    return parts


@given(runs=RUNS, seed=st.integers(0, 1 << 20))
def test_actions_of_a_recorder_are_not_faults(runs: list[tuple[int, int, bool]], seed: int) -> None:
    parts = parts_of(runs, random.Random(seed))
    ordered, findings = arranged(parts)
    assert list(ordered) == parts
    assert not [each for each in findings if each.kind.is_fault]


@given(runs=RUNS, seed=st.integers(0, 1 << 20), data=st.data())
def test_every_removed_file_but_the_oldest_is_reported_missing(
    runs: list[tuple[int, int, bool]], seed: int, data: st.DataObject
) -> None:
    """Except if the previous one was killed with it: then nothing shows that there was another file."""
    parts = parts_of(runs, random.Random(seed))
    index = data.draw(st.integers(0, len(parts) - 1))
    left = parts[:index] + parts[index + 1 :]
    ordered, findings = arranged(left)
    assert list(ordered) == left
    run, number = parts[index].place
    is_known = (index > 0 and parts[index - 1].run == run and parts[index - 1].goes_on) or (
        index > 0 and index + 1 < len(parts) and parts[index + 1].run == run
    )
    missing = [each.file for each in findings if each.kind is Kind.MISSING]
    assert missing == ([parts[index].path.name] if is_known else []), (run, number)


@given(runs=RUNS, seed=st.integers(0, 1 << 20))
def test_files_are_ordered_by_their_headers_and_used_once(runs: list[tuple[int, int, bool]], seed: int) -> None:
    draw = random.Random(seed)
    parts = parts_of(runs, draw)
    names = [part.path for part in parts]
    draw.shuffle(names)
    moved = sorted((part._replace(path=path) for part, path in zip(parts, names, strict=True)), key=lambda p: p.path)
    ordered, findings = arranged(moved)
    of_run = {run: [part.number for part in ordered if part.run == run] for run in {part.run for part in parts}}
    assert of_run == {run: [part.number for part in parts if part.run == run] for run in of_run}
    faults = [each for each in findings if each.kind.is_fault]
    assert {each.kind for each in faults} <= {Kind.MISPLACED}
    assert {each.file for each in faults} == {p.path.name for p in moved if p.named != p.place}
