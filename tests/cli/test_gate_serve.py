"""`lockstep gate serve` as a process: a file that grows, and who may ask."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx2
import pytest

from lockstep.cli.main import invoke
from lockstep.errors import EvidenceError
from lockstep.release.judging import judge_files
from tests.processes import Piped
from tests.waiting import until


def line(index: int) -> str:
    side = {"ts": float(index), "latency_ms": 10.0, "token_ids": [index]}
    return json.dumps({"request_id": f"r{index}", "baseline": side, "candidate": side}) + "\n"


def test_a_verdict_follows_its_file(tmp_path: Path) -> None:
    path, temporary = tmp_path / "pairs.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    path.write_text(line(0))
    environment = os.environ | {"TMPDIR": str(temporary)}
    with Piped("gate", "serve", str(path), "--port", "0", "--set", "min_pairs=3", environment=environment) as program:
        found = re.search(r"http://[\d.:]+", program.stdout.readline())
        assert found is not None
        with httpx2.Client(base_url=found.group()) as client:
            until(lambda: client.get("/argo").json()["pairs"] == 1)
            assert client.get("/argo").json()["decision"] == "hold"
            with path.open("a") as file:
                file.write(line(1) + line(2) + '{"request_id": "half')
            until(lambda: client.get("/argo").json()["pairs"] == 3)
            assert client.get("/argo").json()["decision"] == "promote"
        program.program.send_signal(signal.SIGTERM)
        assert program.program.wait() == 0
    assert not list(temporary.iterdir()), "nothing of the copies stays"


def test_a_line_that_cannot_be_read_is_reported_by_the_users_path_and_its_number(tmp_path: Path) -> None:
    """Over HTTP and on standard error, and no path of ours is in either."""
    path, temporary = tmp_path / "pairs.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    path.write_text(line(0) + line(1) + '{"request_id": "r2", "baseline": {"latency_ms": "slow"}}\n' + line(3))
    environment = os.environ | {"TMPDIR": str(temporary)}
    with Piped("gate", "serve", str(path), "--port", "0", environment=environment) as program:
        found = re.search(r"http://[\d.:]+", program.stdout.readline())
        assert found is not None
        with httpx2.Client(base_url=found.group()) as client:
            for address in ("/v1/verdict", "/argo"):
                reason = client.get(address).json()["reason"]
                assert reason.startswith(f"{path}:3: the baseline's latency_ms must be a number")
                assert str(temporary) not in reason
            path.write_text(line(0) + line(1))
            until(lambda: client.get("/argo").json()["pairs"] == 2)
        program.program.send_signal(signal.SIGTERM)
        code, _, errors = program.communicate()
    assert code == 0
    assert f"{path}:3: " in errors
    assert str(temporary) not in errors


def test_a_recording_is_not_followed_and_named_as_it_was_given(tmp_path: Path) -> None:
    """A folder is what every recording may be; a copy of one would be judged by a path of ours."""
    given = [Path("baseline.lstrace"), Path("candidate.lstrace")]
    with pytest.raises(EvidenceError, match=r"^baseline\.lstrace: recordings cannot be followed"):
        judge_files([tmp_path, tmp_path], names=given)


@pytest.mark.parametrize("next_command", [("gate",), ("gate", "serve", "--port", "0")])
def test_folders_of_a_gate_that_was_killed_are_removed_at_the_next_start(
    tmp_path: Path, next_command: tuple[str, ...]
) -> None:
    path, temporary = tmp_path / "pairs.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    path.write_text(line(0))
    environment = os.environ | {"TMPDIR": str(temporary)}
    with Piped("gate", "serve", str(path), "--port", "0", environment=environment) as killed:
        assert killed.stdout.readline()
        with Piped("gate", "serve", str(path), "--port", "0", environment=environment) as alive:
            assert alive.stdout.readline()
            killed.program.send_signal(signal.SIGKILL)
            killed.program.wait()
            assert len(list(temporary.iterdir())) >= 2
            with Piped(*next_command, str(path), environment=environment) as following:
                assert following.stdout.readline()
                following.program.send_signal(signal.SIGTERM)
                following.program.wait()
            until(lambda: len(list(temporary.iterdir())) == 1, "the folder of the gate that runs stays, and no other")
            alive.program.send_signal(signal.SIGTERM)
            assert alive.program.wait() == 0
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "no API key is set"),
        (("--set", "min_pears=3"), "did you mean 'min_pairs'"),
        (("second.jsonl", "third.jsonl"), "BASELINE CANDIDATE"),
    ],
)
def test_invalid_arguments_are_rejected_before_files_are_followed(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["gate", "serve", str(tmp_path / "pairs.jsonl"), "--port", "0", *arguments]) in (2, 3)
    assert words in capsys.readouterr().err
