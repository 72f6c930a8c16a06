"""`lockstep run-batch`: a file in, a file out in the same order; faults are told before a model is loaded, and what was
broken off goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.run_batch import arguments_of, part_of
from lockstep.errors import UsageError
from tests.server.batches.inputs import jsonl, line
from tests.waiting import HANG_S, until

NAMED = ("--served-model-name", "pocket")


def run(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "lockstep", "run-batch", *arguments]
    return subprocess.run(command, input=given, capture_output=True, timeout=HANG_S, check=False)


def answers_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in content.splitlines()]


def test_answers_are_those_of_the_server_in_the_order_of_the_requests(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "made" / "out.jsonl"
    asked = [line(index) for index in range(6)]
    asked[2]["url"], asked[2]["body"] = "/v1/embeddings", {"input": "Hello", "model": "pocket"}
    asked[4]["body"]["temperature"] = -1
    source.write_bytes(jsonl(asked))
    ran = run(str(source), str(target), "pocket://", *NAMED)
    assert ran.returncode == 1, ran.stderr
    assert b"5 of 6 requests answered, 1 failed" in ran.stderr
    answers = answers_of(target.read_bytes())
    assert [each["custom_id"] for each in answers] == [each["custom_id"] for each in asked]
    assert [each["response"]["status_code"] for each in answers] == [200, 200, 200, 200, 400, 200]
    assert answers[4]["response"]["body"]["error"]["param"] == "temperature"
    assert not part_of(str(target)).exists()

    part = part_of(str(target))
    again = run("-i", str(source), "-o", "-", "--model", "pocket://", *NAMED)
    texts = [[each["response"]["body"].get("choices") for each in some] for some in (answers, answers_of(again.stdout))]
    assert texts[0] == texts[1]
    assert not part.exists()


def test_interrupted_batch_continues(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(jsonl([line(index, max_tokens=16, ignore_eos=True) for index in range(30)]))
    part = part_of(str(target))
    command = [sys.executable, "-m", "lockstep", "run-batch", str(source), str(target), "stub://a?step_ms=20"]
    slow = subprocess.Popen([*command, *NAMED, "--max-num-seqs", "4"], stderr=subprocess.DEVNULL)
    until(lambda: part.exists() and part.read_bytes().count(b"\n") > 4)
    slow.kill()
    slow.wait()
    assert not target.exists()
    before = part.read_bytes()

    for arguments, message in (
        ((str(source), str(target), "stub://a?step_ms=20"), "add --resume, or delete the file"),
        ((str(source), str(target), "stub://b", "--resume"), "belongs to another input"),
    ):
        refused = run(*arguments, *NAMED)
        assert refused.returncode == 2
        assert message in " ".join(refused.stderr.decode().split())
    assert part.read_bytes() == before

    ran = run(str(source), str(target), "stub://a?step_ms=20", *NAMED, "--resume")
    assert ran.returncode == 0, ran.stderr
    assert [each["custom_id"] for each in answers_of(target.read_bytes())] == [f"request-{i}" for i in range(30)]
    assert not part.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file has no requests"),
        (b"{oops\n", "line 1: the line is not valid JSON"),
        (jsonl([line(0), line(0)]), "line 2: custom_id 'request-0' is also used in line 1"),
        (jsonl([line(0, model="gpt-4o")]), "line 1: model is 'gpt-4o'; it must be 'pocket'"),
    ],
)
def test_invalid_input_is_rejected_before_the_model_is_loaded(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(content)
    assert invoke(["run-batch", str(source), str(target), "stub://a?load_ms=600000", *NAMED]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_arguments_are_flags_as_well() -> None:
    assert arguments_of(("a", "b", "c"), (None, None, None)) == ("a", "b", "c")
    assert arguments_of((None, None, None), ("a", "b", "c")) == ("a", "b", "c")
    assert arguments_of(("c", None, None), ("a", "b", None)) == ("a", "b", "c")
    for positional, given, message in (
        (("a", "b", None), (None, None, None), "MODEL is missing"),
        ((None, None, None), (None, "b", "c"), "IN is missing"),
        (("a", "b", "c"), (None, None, "d"), "unexpected argument 'c'"),
    ):
        with pytest.raises(UsageError, match=message):
            arguments_of(positional, given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such.jsonl", "out"), "no-such.jsonl cannot be read: No such file"),
        (("in.jsonl", "-", "--resume"), "--resume requires a file as OUT"),
        (("in.jsonl", "out.jsonl", "--resume"), "of an interrupted run; remove the flag"),
        (("in.jsonl", "in.jsonl"), "the output cannot be written there"),
    ],
)
def test_files_that_cannot_be_read_or_written_are_rejected(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(jsonl([line(0)]))
    assert invoke(["run-batch", *arguments, "--model", "stub://a", *NAMED]) == 2
    assert message in capsys.readouterr().err
