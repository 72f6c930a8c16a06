"""Promise 2 on real servers: every step of a live run under mixed load is decided again as recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.replay.live import live_requests, live_steps, workload_of
from lockstep.replay.trace import Trace, open_trace
from lockstep.replay.verify import verify
from tests.processes import ROOT
from tests.replay.live import entry_counts, manifest_in, mixed_load
from tests.server.process import ServerProcess, serve
from tests.waiting import until

NUM_REQUESTS = 216
NUM_REQUESTS_SLOW = 9_000
SEED = 7
FLAGS = ("--scheduling-policy", "priority", "--log-level", "error", "--disable-log-requests")
EVERYTHING = (
    "preemptions",
    "swaps",
    "evictions",
    "hits",
    "forced",
    "answers",
    "pins",
    "sweeps",
    "fills",
    "abort",
    "deadline",
    "stops",
)


def lockstep(*arguments: str) -> tuple[int, str]:
    """Run the command in another process."""
    command = [sys.executable, "-m", "lockstep", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment, cwd=ROOT)
    return ended.returncode, ended.stdout + ended.stderr


def run_cluster(folder: Path, num_requests: int, *flags: str) -> Path:
    """Run three replicas on one device under a mixed load, then send SIGTERM."""
    with serve("--manifest", str(manifest_in(folder)), "--trace", str(folder / "trace"), *FLAGS, *flags) as server:
        statuses = asyncio.run(mixed_load(server, num_requests, SEED))
        assert server.stop() == 0
    assert statuses[200] > num_requests // 2
    assert set(statuses) <= {0, 200, 408, 503, 504}, "refused for no other reason than a deadline or a full house"
    return folder / "trace"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cluster(tmp_path_factory.mktemp("live"), NUM_REQUESTS, "--trace-content")


def test_every_step_of_a_live_cluster_is_decided_again(recorded: Path) -> None:
    code, said = lockstep("replay", "--verify", str(recorded))
    assert code == 0, said
    assert said.splitlines()[0].endswith(", identical")
    trace = open_trace(recorded)
    seen = entry_counts(trace)
    assert f"replay: {seen['steps']:,} steps of 4 engines" in said
    assert seen["steps"] >= 2_000
    for what in (*EVERYTHING, "priority -1", "priority 0", "priority 1"):
        assert seen[what] > 0, what
    took_turns = [engine.name for engine in trace.engines if seen[f"steps of {engine.number}"]]
    assert sorted(took_turns) == ["fake", "pocket", "pocket"], "two embedded models and a stub"


@pytest.mark.parametrize("source", ["pocket://", "stub://fake?token_us=20"])
def test_every_token_is_computed_equally_in_another_process(recorded: Path, source: str) -> None:
    code, said = lockstep("replay", "--execute", str(recorded), "--model", source)
    assert code == 0, said
    lines = [line for line in said.splitlines() if line.startswith("execute: ")]
    assert len(lines) == (2 if source == "pocket://" else 1)
    assert all(line.endswith("every token equal") for line in lines)


def test_a_model_with_another_fingerprint_is_refused(recorded: Path) -> None:
    code, said = lockstep("replay", "--execute", str(recorded), "--model", "stub://other")
    assert code == 2
    assert "fingerprint" in said


def test_events_can_be_read_from_a_recording(recorded: Path) -> None:
    trace = open_trace(recorded)
    steps = list(live_steps(trace))
    for engine in trace.engines:
        own = [step.step for step in steps if step.engine == engine.number]
        assert own == list(range(len(own)))
    assert all(step.duration_us > 0 and step.gap_us >= 0 for step in steps)
    served_engines = [engine.number for engine in trace.engines if engine.name != "router"]
    assert len(served_engines) == 3
    for number in served_engines:
        check_requests(trace, number)


def check_requests(trace: Trace, number: int) -> None:
    """Times are in order, and the workload has exactly the served requests."""
    served = [each for each in live_requests(trace, number) if each.num_output_tokens]
    assert len(served) > 20
    for each in served:
        assert each.arrival_ps <= each.admitted_ps <= each.first_token_ps <= each.finished_ps
    workload = workload_of(trace, number)
    told = tuple(workload.requests)
    assert sorted(each.num_output_tokens for each in told) == sorted(each.num_output_tokens for each in served)
    arrivals = [each.arrival for each in told]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    size = workload.content_size
    assert all(len(each.contents) == -(-each.num_prompt_tokens // size) for each in told if each.contents)


def test_a_killed_server_leaves_its_decided_steps(tmp_path: Path) -> None:
    """Without SIGTERM and without an end of the file, only the last second is missing."""
    folder = tmp_path / "trace"
    server = ServerProcess("--manifest", str(manifest_in(tmp_path)), "--trace", str(folder), *FLAGS)
    try:
        server.wait_ready()
        asyncio.run(mixed_load(server, 48, SEED))
        until(lambda: verify(open_trace(folder)).counts["steps"] > 0, "steps are in the file")
        server.signal(signal.SIGKILL)
        server.wait()
    finally:
        server.stop()
    found = verify(open_trace(folder))
    assert found.is_identical, found.diverged
    assert found.counts["steps"] > 0
    code, said = lockstep("replay", "--verify", str(folder))
    assert code == 0, said
    assert "ends early at byte" in said


@pytest.mark.slow
def test_a_long_run_is_decided_again(tmp_path: Path) -> None:
    """At least 100,000 steps of the same load."""
    folder = run_cluster(tmp_path, NUM_REQUESTS_SLOW)
    code, said = lockstep("replay", "--verify", str(folder))
    assert code == 0, said
    assert entry_counts(open_trace(folder))["steps"] >= 100_000
