"""Live gate on growing files: whole lines only, the verdict of a batch run, responses to Argo and Flagger, keys."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import EvidenceError
from lockstep.release.judging import PolicySources, judge_files
from lockstep.release.live import MAX_HOOK_BYTES, Follower, LiveGate, app_of
from lockstep.release.verdict import Verdict, to_json
from tests.release.judging import pair_line as line
from tests.release.judging import written
from tests.waiting import eventually

HOST = "127.0.0.1"


THRESHOLD = ("min_pairs=3",)
SEQUENTIAL = (
    "mode=sequential",
    "warmup_pairs=0",
    "min_pairs=3",
    "error_margin=20",
    "missing_margin=20",
    "tail_margin=20",
    "mismatch_margin=20",
)


def gate_on(path: Path, folder: Path, policy: tuple[str, ...] = THRESHOLD) -> LiveGate:
    return LiveGate([Follower(path, folder / "copy.jsonl")], lambda copies: judged(copies, policy))


def judged(paths: list[Path], policy: tuple[str, ...] = THRESHOLD) -> Verdict:
    return judge_files(paths, PolicySources(settings=[*policy])).verdict


def check(gate: LiveGate, path: Path, policy: tuple[str, ...] = THRESHOLD) -> None:
    """Check that a gate has the verdict of a batch run on the existing whole lines."""
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if not complete:
        assert (gate.state.verdict, gate.state.decision) == (None, "hold")
        return
    whole = path.with_name("whole.jsonl")
    whole.write_text(complete)
    assert gate.state.verdict is not None
    assert to_json(gate.state.verdict) == to_json(judged([whole], policy))


Change = tuple[Any, ...]
changes = st.one_of(
    st.tuples(st.just("append"), st.lists(st.booleans(), min_size=1, max_size=5), st.integers(0, 200)),
    st.tuples(st.just("cut"), st.integers(0, 1500)),
    st.tuples(st.just("replace"), st.lists(st.booleans(), max_size=8)),
    st.tuples(st.just("delete")),
)


@settings(max_examples=4)
@given(st.lists(changes, min_size=1, max_size=4))
def test_the_live_gate_agrees_with_the_gate_on_whole_lines_after_any_change_of_its_file(history: list[Change]) -> None:
    check_history(history)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(changes, min_size=1, max_size=8))
def test_the_live_gate_agrees_with_the_gate_after_long_histories_of_changes(history: list[Change]) -> None:
    check_history(history)


def check_history(history: list[Change]) -> None:
    """Follow a file that is appended to (also half lines), truncated, replaced, and temporarily missing."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "pairs.jsonl"
        gate = gate_on(path, Path(name))
        for change in history:
            make_change(path, change)
            gate.check()
            check(gate, path)


def make_change(path: Path, change: Change) -> None:
    text = path.read_text() if path.exists() else ""
    match change:
        case ("append", differs, half):
            start = text[: text.rfind("\n") + 1]
            more = "".join(line(start.count("\n") + at, differs=each) for at, each in enumerate(differs))
            path.write_text(start + more + line(99)[:half].rstrip())
        case ("cut", size):
            path.write_text(text[:size])
        case ("replace", differs):
            fresh = path.with_name("fresh")
            fresh.write_text("".join(line(at, differs=each) for at, each in enumerate(differs, 50)))
            fresh.rename(path)
        case _:
            path.unlink(missing_ok=True)


def test_a_replaced_file_with_an_equal_end_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path)
    for history in ([("replace", [False, False]), ("replace", [True, False])], [("delete",), ("replace", [False] * 2)]):
        for change in history:
            make_change(path, change)
            gate.check()
            check(gate, path)


def test_the_live_gate_agrees_with_the_gate_in_sequential_mode(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path, SEQUENTIAL)
    decisions = []
    for num_pairs in (50, 130, 131, 400):
        path.write_text("".join(line(index) for index in range(num_pairs)))
        gate.check()
        check(gate, path, SEQUENTIAL)
        decisions.append(gate.state.decision.value)
    assert decisions[0] == "hold"
    assert decisions[-1] == "promote"


def test_without_growth_nothing_is_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path)
    assert not gate.check(), "the file may come later"
    path.write_text(line(0))
    assert gate.check()
    assert not gate.check()


def test_an_invalid_line_withdraws_the_verdict_and_is_judged_once(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(line(index) for index in range(4)))
    gate = gate_on(path, tmp_path)
    gate.check()
    assert gate.state.decision == "promote"
    with path.open("a") as file:
        file.write('{"request_id": \n')
    gate.check()
    assert (gate.state.decision, gate.state.verdict) == ("hold", None)
    assert "truncated JSON" in gate.state.reason
    assert not gate.check()


def test_two_files_are_judged_only_together(tmp_path: Path) -> None:
    side = [{"request_id": f"r{index}", "ts": index, "latency_ms": 1.0, "token_ids": [index]} for index in range(3)]
    paths = [tmp_path / "baseline.jsonl", tmp_path / "candidate.jsonl"]
    gate = LiveGate([Follower(path, path.with_suffix(".copy")) for path in paths], judged)
    for path in paths:
        assert gate.state.verdict is None
        written(path, side)
        gate.check()
    assert gate.state.decision == "promote"
    paths[0].unlink()
    gate.check()
    assert (gate.state.decision, gate.state.verdict) == ("hold", None)
    assert "deleted" in gate.state.reason
    written(paths[0], side)
    gate.check()
    assert gate.state.decision == "promote"


def test_only_regular_files_are_followed(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="not a regular file"):
        Follower(tmp_path, tmp_path / "copy")


async def test_a_failing_judge_withdraws_the_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pairs.jsonl"

    def failing(_: list[Path]) -> Verdict:
        raise MemoryError

    gate = LiveGate([Follower(path, tmp_path / "copy")], failing, poll_s=0.01)
    path.write_text(line(0))
    following = asyncio.create_task(gate.run())
    await eventually(lambda: "judging failed" in gate.state.reason)
    following.cancel()
    assert gate.state.decision == "hold"
    assert "MemoryError" in caplog.text


@asynccontextmanager
async def client_of(gate: LiveGate, *keys: str) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app_of(gate, HOST, keys))
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}:9005") as client:
        yield client


@pytest.mark.parametrize(
    ("differs", "decision", "statuses"),
    [(False, "promote", (200, 412, 200)), (True, "rollback", (412, 200, 412))],
)
async def test_argo_and_flagger_get_their_responses(
    tmp_path: Path, differs: bool, decision: str, statuses: tuple[int, int, int]
) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path)
    hooks = ("confirm-promotion", "rollback", "rollout")
    async with client_of(gate) as client:
        assert (await client.get("/v1/verdict")).status_code == 503
        assert (await client.get("/health/ready")).status_code == 503
        assert [(await client.post(f"/flagger/{hook}", json={})).status_code for hook in hooks] == [412, 412, 200]
        path.write_text("".join(line(index, differs=differs) for index in range(4)))
        gate.check()
        argo = (await client.get("/argo")).json()
        assert (argo["decision"], argo["pairs"]) == (decision, 4)
        assert tuple([(await client.post(f"/flagger/{hook}", json={})).status_code for hook in hooks]) == statuses
        told = await client.get("/v1/verdict")
        assert told.json()["decision"] == decision
        assert int(told.headers["age"]) >= argo["age_s"] >= 0
        assert (await client.get("/health/ready")).status_code == 200


async def test_with_a_key_only_health_is_open(tmp_path: Path) -> None:
    async with client_of(gate_on(tmp_path / "none", tmp_path), "let-me-in") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/argo")).status_code == 401
        assert (await client.get("/argo", headers={"Authorization": "Bearer let-me-in"})).status_code == 412
        bodies = [{"metadata": {"api_key": key}} for key in ("let-me-in", "wrong", 7)]
        found = [
            (await client.post("/flagger/rollout", json=body)).status_code
            for body in [*bodies, {}, [], {"metadata": 1}]
        ]
        assert found == [200, 401, 401, 401, 401, 401]
        long = b'{"metadata": {"api_key": "let-me-in"}, "more": "' + b"x" * MAX_HOOK_BYTES + b'"}'
        assert (await client.post("/flagger/rollout", content=long)).status_code == 401


async def test_without_a_key_only_host_names_of_this_machine_are_accepted(tmp_path: Path) -> None:
    async with client_of(gate_on(tmp_path / "none", tmp_path)) as client:
        assert (await client.get("/argo")).status_code == 412
        assert (await client.get("/argo", headers={"Host": "evil.example"})).status_code == 403
