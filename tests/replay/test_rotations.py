"""Rotations at any moment: a file may begin after any decision, and continues exactly there."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.groups import ONE_GROUP, KVGroup
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.state import STATE_VERSION, SchedulerState
from lockstep.core.step import Explain, StepPlan
from lockstep.errors import TraceError
from lockstep.replay.rerun import EngineRerun
from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from lockstep.replay.verify_report import DivergedError, Verification
from lockstep.worker.flight.entries import Checkpoint, runs_of
from tests.replay.rotations import run_flight

NUM_ROTATIONS = 200
NUM_ROTATIONS_SLOW = 10_000
HAPPENINGS = ("left before it ran", "stopped", "stopped, alone", "empty plans")


def rotate(
    folder: Path, seed: int, num_rotations: int
) -> tuple[Counter[str], list[tuple[int, Verification[DivergedError]]]]:
    """Run flights until their files rotated a given number of times; returns counts, and invalid ones by seed."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    faulty = []
    while seen["rotations"] < num_rotations:
        one = draw.randrange(1 << 30)
        seen += run_flight(
            folder, one, num_users=6 if seen["flights"] % 2 else 1, file_bytes=draw.choice((1, 200, 1000))
        )
        seen["flights"] += 1
        seen["rotations"] += len(list(folder.iterdir())) - 1
        found = verify(open_trace(folder))
        if not found.is_in_order(allows_gaps=False) or found.findings:
            faulty.append((one, found))
        shutil.rmtree(folder)
    return seen, faulty


@pytest.mark.parametrize("num_rotations", [NUM_ROTATIONS, pytest.param(NUM_ROTATIONS_SLOW, marks=pytest.mark.slow)])
def test_recordings_verify_if_requests_ended_before_a_rotation(tmp_path: Path, num_rotations: int) -> None:
    seed = random.randrange(1 << 30) if num_rotations == NUM_ROTATIONS_SLOW else 1
    seen, faulty = rotate(tmp_path / "flight", seed, num_rotations)
    assert not faulty, f"of seed {seed}: {faulty[0]}"
    for what in HAPPENINGS:
        assert seen[what] > num_rotations // 70, what
    print(dict(seen))


def test_a_state_that_empty_plans_change_is_detected_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original defect: the rows of the last step are frozen, and only a live scheduler plans empty steps."""
    decide, plain_state = Scheduler.schedule, Scheduler.state

    def schedule(self: Scheduler, explain: Explain | None = None) -> StepPlan:
        if not self.has_unfinished:
            self._pending_seqs = []
        return decide(self, explain)

    def state(self: Scheduler) -> SchedulerState:
        kept = plain_state(self)
        return kept._replace(next_id=kept.next_id << 8 | len(self._pending_seqs))

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Scheduler, "state", state)
    _, faulty = rotate(tmp_path / "flight", 1, NUM_ROTATIONS)
    assert faulty
    for _, found in faulty:
        assert found.diverged is not None
        assert "the state at the start of the next file" in found.diverged.what


def test_checkpoints_of_another_version_are_skipped_and_every_step_is_decided(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as other:
        other.setattr("lockstep.worker.flight.recorder.STATE_VERSION", 0)
        run_flight(tmp_path, 3, num_requests=30, file_bytes=2000)
    trace = open_trace(tmp_path)
    found = verify(trace)
    assert found.is_in_order(allows_gaps=False), found
    assert found.counts["foreign_checkpoints"] == len(trace.files) - 1 > 2
    assert "not compared" in [*found.lines()][1]
    with pytest.raises(TraceError, match="another version"):
        verify(open_trace(trace.files[1]))


@pytest.mark.parametrize("groups", [ONE_GROUP, (KVGroup(), KVGroup(is_state=True, snapshot_interval=4))])
def test_a_checkpoint_of_other_kv_groups_is_refused(groups: tuple[KVGroup, ...]) -> None:
    config = SchedulerConfig(
        block_size=4, num_blocks=20, max_model_len=64, max_num_seqs=2, groups=(KVGroup(), KVGroup(window=8))
    )
    recorded = Scheduler(config)
    recorded.add(Request(5, 4))
    recorded.schedule()
    state = recorded.state()._replace(contents=(), tenants=())
    states = [msgspec.Raw(msgspec.msgpack.encode(each)) for each in (state, Fingerprint().state())]
    checkpoint = Checkpoint(1, STATE_VERSION, runs_of(()), (0,), *states)
    with pytest.raises(TraceError, match="no valid scheduler state"):
        EngineRerun(1, replace(config, groups=groups)).begin_at(checkpoint)
