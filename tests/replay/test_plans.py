"""The planner's decisions are computed again from the recording of a real cluster; a different planner is detected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard
from msgspec.structs import replace

from lockstep.cli.replay import verify_trace
from lockstep.cluster.backend import Backend
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.plan_recorder import PLAN_SUFFIX, PlanEntry, PlanRecorder
from lockstep.cluster.planner import Action, Drain, Observed, Phase, PlanPolicy, Replica, Unload, plan
from lockstep.cluster.state import ClusterOptions
from lockstep.errors import TraceError
from lockstep.replay.plans import PLANS, verify_plans
from lockstep.replay.trace import files_in
from lockstep.replay.trace_integrity import Kind
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.link import WorkerOptions
from tests.cluster.clusters import say
from tests.replay.recordings import read_whole, write_whole

MANIFEST = """
cluster: c
resources: {gpu_budget: 1GB}
models:
  a: {source: 'stub://a', size: 800MB, tier: standby}
  b: {source: 'stub://b', size: 800MB, tier: standby}
"""


async def record(folder: Path) -> None:
    options = ClusterOptions(Backend.AUTO, worker=WorkerOptions(trace=TraceOptions(str(folder))))
    cluster = Cluster(parse(MANIFEST), options)
    await cluster.start()
    try:
        for model in ("a", "b", "a"):
            await say(cluster, "hello", model)
    finally:
        await cluster.close()


async def test_plans_of_a_cluster_are_computed_again(tmp_path: Path) -> None:
    await record(tmp_path)
    verdict = verify_plans(tmp_path)
    assert verdict.diverged is None
    assert verdict.counts["plans"] >= 6, "three loads and what they needed"
    assert verdict.findings == ()


async def test_a_directory_is_verified_whole_steps_and_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(tmp_path)
    (path,) = files_in(tmp_path, PLAN_SUFFIX)
    assert verify_trace(tmp_path, as_json=False) == 0
    steps, plans = capsys.readouterr().out.splitlines()
    assert steps.startswith("replay: ")
    assert plans.startswith("planner: ")
    assert steps.endswith("identical")
    assert plans.endswith("plans, identical")
    assert verify_trace(path, as_json=False) == 0
    assert capsys.readouterr().out == plans + "\n"


async def test_a_planner_that_never_evicts_is_caught_at_the_first_eviction(tmp_path: Path) -> None:
    def hoards(observed: Observed, now_s: float, policy: PlanPolicy) -> Sequence[Action]:
        return [action for action in plan(observed, now_s, policy) if not isinstance(action, Unload)]

    await record(tmp_path)
    verdict = verify_plans(tmp_path, hoards)
    assert verdict.diverged is not None
    assert verdict.counts["plans"] == verdict.diverged.number
    assert verdict.diverged.recorded[0][0] == "unload"
    assert "recorded unload" in [*verdict.lines()][-1]


def one_plan(folder: Path) -> Path:
    """Plan with a drain; every field of a replica differs from its default."""
    busy = Replica("a", Phase.RESIDENT, 800, 2, 0, None, 9.5, 1.25, 0.1, -1, False, 0.0, True, 60.0, None)
    waits = Replica("b", Phase.ABSENT, 700, 0, 3, 1.5, 0.0, 0.0, 0.3, 1)
    observed, policy = Observed((busy, waits), 1000), PlanPolicy()
    actions = plan(observed, 10.1, policy)
    assert any(isinstance(action, Drain) for action in actions)
    recorder = PlanRecorder(TraceOptions(str(folder)))
    recorder.planned(observed, 10.1, policy, actions)
    recorder.planned(observed, 10.1, policy, actions)
    recorder.close()
    (path,) = files_in(folder, PLAN_SUFFIX)
    return path


def test_a_recorded_plan_is_read_unchanged(tmp_path: Path) -> None:
    verdict = verify_plans(one_plan(tmp_path))
    assert (verdict.counts, verdict.diverged, verdict.findings) == ({"plans": 2}, None, ())


def test_data_written_before_a_kill_is_verified(tmp_path: Path) -> None:
    path = one_plan(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-6])
    verdict = verify_plans(path)
    assert [each.kind for each in verdict.findings] == [Kind.OPEN]
    assert verdict.counts["plans"] == 2
    assert verdict.diverged is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"schema":2,"lockstep":"0.8.0","run":"r","file":1}\n', "its schema is 2, .* with lockstep 0.8.0"),
        (b"no entries at all", "is not an entry of a recording"),
        (b"", "ends before the first entry"),
    ],
)
def test_a_file_that_is_not_a_recording_of_plans_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / f"x{PLAN_SUFFIX}"
    path.write_bytes(zstandard.compress(content) if content else b"")
    with pytest.raises(TraceError, match=what):
        verify_plans(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = one_plan(tmp_path)
    header, *rest = read_whole(path, PLANS)
    write_whole(path, [replace(header, schema=99), *rest])
    with pytest.raises(TraceError, match="its schema is 99"):
        verify_plans(path)


def test_a_changed_plan_is_reported_with_both(tmp_path: Path) -> None:
    path = one_plan(tmp_path)
    header, first, second, end = read_whole(path, PLANS)
    assert isinstance(second, PlanEntry)
    write_whole(path, [header, first, replace(second, actions=()), end])
    verdict = verify_plans(path)
    assert verdict.diverged is not None
    assert verdict.facts()["parted"] == {
        "file": path.name,
        "plan": 2,
        "now_s": 10.1,
        "recorded": (),
        "decided": verdict.diverged.decided,
    }
    assert "plan 2, at 10.100 s: recorded nothing, computed drain" in [*verdict.lines()][-1]
