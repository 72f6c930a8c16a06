"""Every verb that reads a recording's folder refuses it if any file differs from its manifest."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.replay import verify_trace
from lockstep.cluster.plan_recorder import PLAN_SUFFIX, PlanRecorder
from lockstep.cluster.planner import Observed, PlanPolicy, plan
from lockstep.cluster.route_recorder import ROUTE_SUFFIX, RouteRecorder
from lockstep.errors import LockstepError, TraceError
from lockstep.replay.folder_integrity import folder_findings
from lockstep.replay.trace import files_in, open_trace
from lockstep.replay.trace_integrity import Finding, Kind
from lockstep.replay.verify import verify, verify_recording
from lockstep.worker.flight.content import write_text
from lockstep.worker.flight.entries import SUFFIX
from lockstep.worker.flight.folder import TEXT_SUFFIX, FolderManifest, State, manifest_files, read_manifest
from lockstep.worker.messages import TokenizerPayload
from tests.replay.recordings import mark_as_killed
from tests.replay.rotations import many_files, run_flight
from tests.replay.routing import History

SUFFIXES = (SUFFIX, PLAN_SUFFIX, ROUTE_SUFFIX, TEXT_SUFFIX)


def record_all(folder: Path, seed: int) -> None:
    """Record two files or more of each kind."""
    run_flight(folder, seed, num_requests=20, file_bytes=1000)
    write_text(FolderManifest(folder), TokenizerPayload("{}", f"template {seed}", None, None, ()))
    # Large enough that no file fills up between two looks: the fourth would take the place of the first.
    plans = PlanRecorder(many_files(folder, 16 << 16))
    observed, policy = Observed((), 1000), PlanPolicy()
    while len(files_in(folder, PLAN_SUFFIX)) < 3:
        plans.planned(observed, 1.0, policy, plan(observed, 1.0, policy))
    plans.close()
    routes = History(RouteRecorder(many_files(folder, 4 << 22)), seed)
    while len(files_in(folder, ROUTE_SUFFIX)) < 3:
        routes.live(40)
    routes.recorder.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    record_all(folder, 3)
    for suffix in SUFFIXES:
        assert len(list(folder.glob(f"*{suffix}"))) > 1, suffix
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "flight"))


def flip(path: Path, at: int | None = None, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= bits
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def exchange(path: Path) -> None:
    other = sorted(path.parent.glob(f"*{path.suffix}"))[1]
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def add(path: Path) -> None:
    """Add a copy of the newest file with the name of the next one."""
    last = sorted(path.parent.glob(f"*{path.suffix}"))[-1]
    stem = f"{last.stem[:-6]}{int(last.stem[-6:]) + 1:06}" if path.suffix != TEXT_SUFFIX else "0" * 16
    path.with_stem(stem).write_bytes(path.read_bytes())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "changed": flip,
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
    "added": add,
    "exchanged": exchange,
}
VERBS: dict[str, tuple[Callable[[Path, Path], list[str]], tuple[int, ...]]] = {
    "verify": (lambda whole, folder: ["replay", "--verify", str(folder)], (1, 2)),
    "execute": (lambda whole, folder: ["replay", "--execute", str(folder), "--model", "stub://alpha"], (2,)),
    "serve": (lambda whole, folder: ["replay", "--serve", str(folder), "--port", "1"], (2,)),
    "diff": (lambda whole, folder: ["diff", str(whole), str(folder)], (2,)),
    "gate": (lambda whole, folder: ["gate", str(whole), str(folder)], (3,)),
}
REFUSED = [
    (verb, damage, suffix)
    for verb in VERBS
    for damage in DAMAGE
    for suffix in SUFFIXES
    if verb == "verify" or damage == "changed" or suffix == TEXT_SUFFIX
]
"""All combinations for one verb; for the others each kind of damage and each kind of file once."""


def test_an_unchanged_recording_passes(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder_findings(whole) == ()
    for verb in ("verify", "execute", "diff"):
        command, _ = VERBS[verb]
        assert invoke(command(whole, whole)) == 0, verb
        assert not capsys.readouterr().err


@pytest.mark.parametrize(("verb", "damage", "suffix"), REFUSED)
def test_a_damaged_file_of_any_kind_is_named_and_refused(
    whole: Path, folder: Path, verb: str, damage: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.glob(f"*{suffix}"))
    DAMAGE[damage](before[0])
    damaged = [each for each in folder.glob(f"*{suffix}") if each not in before] or before[:2]
    command, codes = VERBS[verb]
    assert invoke(command(whole, folder)) in codes
    said = capsys.readouterr()
    assert any(each.name in said.out + said.err for each in damaged)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("damage", [Path.unlink, flip])
def test_a_manifest_that_is_missing_or_changed_is_refused(
    whole: Path, folder: Path, verb: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(*manifest_files(folder))
    command, codes = VERBS[verb]
    assert invoke(command(whole, folder)) in codes
    said = capsys.readouterr()
    assert ".lsmanifest" in said.out + said.err


def refuse(folder: Path) -> None:
    """Read a whole folder like ``--verify``; LockstepError if anything is invalid."""
    found = verify_recording(folder)
    if not all(each.is_in_order(allows_gaps=False) for each in found):
        raise TraceError(str(found))


@pytest.mark.parametrize("num_changes", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_change_of_any_byte_is_detected(folder: Path, is_killed: bool, num_changes: int) -> None:
    """This includes the open files of a killed recorder: single bits of any of their bytes."""
    if is_killed:
        manifest = FolderManifest(folder)
        [path] = manifest_files(folder)
        for suffix in (SUFFIX, PLAN_SUFFIX, ROUTE_SUFFIX):
            last = max(folder.glob(f"*{suffix}"))
            listed = read_manifest(path).files[last.name]
            manifest.put(type(listed)(last.name, State.OPEN, listed.num_bytes, listed.digest), path=path)
        refuse(folder)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for _ in range(num_changes):
            at, bits = draw.randrange(len(data)), 1 << draw.randrange(8)
            flip(path, at, bits)
            print(f"{path.name}: byte {at} with bits {bits:#x}")
            with pytest.raises(LockstepError):
                refuse(folder)
            path.write_bytes(data)


def test_an_open_file_with_more_bytes_than_listed_is_not_a_fault(folder: Path) -> None:
    path = max(folder.glob(f"*{SUFFIX}"))
    mark_as_killed(path)
    cut(path)
    found = verify(open_trace(folder))
    assert [each.kind for each in found.findings] == [Kind.OPEN]
    assert found.is_in_order(allows_gaps=False)


def test_folders_of_two_machines_can_be_merged(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    record_all(other, 4)
    lost = max(other.glob(f"*{PLAN_SUFFIX}"))
    for path in other.iterdir():
        shutil.copy(path, folder / path.name)
    assert len(manifest_files(folder)) == 2
    refuse(folder)
    assert verify_trace(folder, as_json=True) == 0
    (folder / lost.name).unlink()
    assert [(each.kind, each.file) for each in folder_findings(folder)] == [(Kind.MISSING, lost.name)]


def test_a_single_file_is_compared_with_the_manifest_of_its_folder(folder: Path) -> None:
    path = max(folder.glob(f"*{PLAN_SUFFIX}"))
    assert folder_findings(path) == ()
    path.write_bytes(path.read_bytes() + b"\0")
    assert [(each.kind, each.file) for each in folder_findings(path)] == [(Kind.CHANGED, path.name)]


def test_foreign_files_in_a_folder_are_ignored(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "cost.json").write_text("{}")
    assert folder_findings(folder) == ()


def test_a_finding_about_several_missing_files_covers_each_of_them() -> None:
    finding = Finding(Kind.MISSING, "r-7-000003.lstrace", "", last_missing=5)
    names = [
        f"{run}-{number:06}{suffix}" for run in ("r-7", "r-8") for number in (2, 3, 4, 5, 6) for suffix in SUFFIXES
    ]
    assert [name for name in names if finding.covers(name)] == [f"r-7-{number:06}{SUFFIX}" for number in (3, 4, 5)]
