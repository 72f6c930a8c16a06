"""The gate that follows files: whole lines only, the same verdict as on a file, Argo's and Flagger's words, keys."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli.gate import PolicyFlags, judge_files
from lockstep.release.live import MAX_HOOK_BYTES, Follower, LiveGate, app_of
from lockstep.release.verdict import Verdict, to_json

HOST = "127.0.0.1"


def line(index: int, *, differs: bool = False) -> str:
    """A pair a line; the candidate says something else where it differs."""
    sides = {
        side: {
            "ts": float(index),
            "latency_ms": 10.0 + index % 3,
            "token_ids": [index, int(differs and side != "baseline")],
        }
        for side in ("baseline", "candidate")
    }
    return json.dumps({"request_id": f"r{index}", **sides}) + "\n"


def judged(copies: list[Path]) -> Verdict:
    return judge_files(copies, PolicyFlags(settings=["min_pairs=3"])).verdict


def gate_on(path: Path, folder: Path) -> LiveGate:
    return LiveGate([Follower(path, folder / "copy.jsonl")], judged)


DIFFERS = st.lists(st.booleans(), min_size=1, max_size=12)


@settings(max_examples=4)
@given(DIFFERS, st.lists(st.integers(1, 400), max_size=2))
def test_after_any_growth_it_says_what_the_gate_says_of_the_whole_lines(differs: list[bool], cuts: list[int]) -> None:
    check_growth(differs, cuts)


@pytest.mark.slow
@settings(max_examples=60)
@given(DIFFERS, st.lists(st.integers(1, 400), max_size=6))
def test_after_any_growth_it_says_what_the_gate_says_of_all_that_is_whole(differs: list[bool], cuts: list[int]) -> None:
    check_growth(differs, cuts)


def check_growth(differs: list[bool], cuts: list[int]) -> None:
    """Follow a file wherever it is cut, also in mid-line."""
    text = "".join(line(index, differs=each) for index, each in enumerate(differs))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, whole = folder / "pairs.jsonl", folder / "whole.jsonl"
        gate = gate_on(path, folder)
        for end in sorted({*(cut for cut in cuts if cut < len(text)), len(text)}):
            path.write_text(text[:end])
            gate.look()
            lines = text[:end].splitlines(keepends=True)
            complete = "".join(each for each in lines if each.endswith("\n"))
            if not complete:
                assert gate.standing.verdict is None
                continue
            whole.write_text(complete)
            assert gate.standing.verdict is not None
            assert to_json(gate.standing.verdict) == to_json(judged([whole]))


def test_without_growth_nothing_is_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path)
    assert not gate.look(), "the file may come later"
    path.write_text(line(0))
    assert gate.look()
    assert not gate.look()


def test_a_file_that_shrinks_or_turns_bad_takes_the_verdict_back(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(line(index) for index in range(4)))
    gate = gate_on(path, tmp_path)
    gate.look()
    assert gate.standing.decision == "promote"
    path.write_text(line(0))
    gate.look()
    assert (gate.standing.decision, gate.standing.verdict) == ("hold", None)
    assert "shorter than it was" in gate.standing.reason


@asynccontextmanager
async def client_of(gate: LiveGate, *keys: str) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app_of(gate, HOST, keys))
    async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}:9005") as client:
        yield client


@pytest.mark.parametrize(
    ("differs", "decision", "statuses"),
    [(False, "promote", (200, 412, 200)), (True, "rollback", (412, 200, 412))],
)
async def test_argo_and_flagger_get_their_answers(
    tmp_path: Path, differs: bool, decision: str, statuses: tuple[int, int, int]
) -> None:
    path = tmp_path / "pairs.jsonl"
    gate = gate_on(path, tmp_path)
    hooks = ("confirm-promotion", "rollback", "rollout")
    async with client_of(gate) as client:
        assert (await client.get("/v1/verdict")).status_code == 503
        assert [(await client.post(f"/flagger/{hook}", json={})).status_code for hook in hooks] == [412, 412, 200]
        path.write_text("".join(line(index, differs=differs) for index in range(4)))
        gate.look()
        argo = (await client.get("/argo")).json()
        assert (argo["decision"], argo[decision], argo["pairs"]) == (decision, True, 4)
        assert sum(argo[each] for each in ("promote", "hold", "rollback")) == 1
        assert tuple([(await client.post(f"/flagger/{hook}", json={})).status_code for hook in hooks]) == statuses
        assert (await client.get("/v1/verdict")).json()["decision"] == decision


async def test_with_a_key_nothing_but_health_is_open(tmp_path: Path) -> None:
    async with client_of(gate_on(tmp_path / "none", tmp_path), "let-me-in") as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/argo")).status_code == 401
        assert (await client.get("/argo", headers={"Authorization": "Bearer let-me-in"})).status_code == 200
        bodies = [{"metadata": {"api_key": key}} for key in ("let-me-in", "wrong", 7)]
        found = [
            (await client.post("/flagger/rollout", json=body)).status_code
            for body in [*bodies, {}, [], {"metadata": 1}]
        ]
        assert found == [200, 401, 401, 401, 401, 401]
        long = b'{"metadata": {"api_key": "let-me-in"}, "more": "' + b"x" * MAX_HOOK_BYTES + b'"}'
        assert (await client.post("/flagger/rollout", content=long)).status_code == 401


async def test_without_a_key_only_names_of_this_machine_are_answered(tmp_path: Path) -> None:
    async with client_of(gate_on(tmp_path / "none", tmp_path)) as client:
        assert (await client.get("/argo")).status_code == 200
        assert (await client.get("/argo", headers={"Host": "evil.example"})).status_code == 403
