"""Pairs from two real servers: each request on both, turns of who is first, and what the gate says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lockstep.bench.client import Outcome
from lockstep.bench.runner import PlannedRequest
from lockstep.bench.serve import lines_of, pairs_of
from lockstep.cli.main import invoke
from lockstep.release.observation import NAMES
from tests.server.process import ServerProcess, serve

LOAD = ("--num-prompts", "24", "--random-input-len", "20", "--random-output-len", "8", "--max-concurrency", "2")


@pytest.fixture(scope="module")
def baseline() -> Iterator[ServerProcess]:
    with serve("stub://alpha?step_ms=1", "--served-model-name", "alpha") as running:
        yield running


@pytest.fixture(scope="module")
def slower() -> Iterator[ServerProcess]:
    with serve("stub://alpha?step_ms=20", "--served-model-name", "alpha", "--api-key", "let-me-in") as running:
        yield running


def test_every_request_goes_to_both_servers_and_the_gate_distinguishes_them(
    baseline: ServerProcess, slower: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, verdict = tmp_path / "pairs.jsonl", tmp_path / "verdict.json"
    servers = ("--base-url", baseline.base_url, "--candidate-url", slower.base_url, "--candidate-api-key", "let-me-in")
    assert invoke(["bench", "serve", *servers, *LOAD, "--ignore-eos", "--save-pairs", str(pairs), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["completed"] == result["candidate"]["completed"] == result["num_prompts"] == 24
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(24))
    assert all(line["baseline"]["text"] == line["candidate"]["text"] for line in lines)
    assert {name for line in lines for name in (*line, *line["baseline"])} - {"baseline", "candidate"} <= set(NAMES)
    assert invoke(["gate", str(pairs), "--output", str(verdict)]) == 2
    signals = {each["name"] for each in json.loads(verdict.read_text())["signals"]}
    assert {"latency", "decode"} <= signals


def test_both_answer_under_one_id(baseline: ServerProcess, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    same = ("--base-url", baseline.base_url, "--candidate-url", baseline.base_url)
    assert invoke(["bench", "serve", *same, *LOAD, "--seed", "5", "--save-pairs", str(pairs), "--json"]) == 0
    ids = [json.loads(line)["request_id"] for line in pairs.read_text().splitlines()]
    assert ids == [f"bench-5-{index}" for index in range(24)]


def test_sides_alternate_and_incomplete_pairs_are_left_out() -> None:
    def outcome(text: str) -> Outcome:
        return Outcome(True, 1.0, text=text)

    jobs = [PlannedRequest(None, bytes, None, target) for target in (0, 1, 1, 0, 0, 1)]
    pairs = pairs_of(jobs, [outcome("b0"), outcome("c0"), outcome("c1"), None, None, None])
    texts = [tuple(None if side is None else side.text for side in (pair.baseline, pair.candidate)) for pair in pairs]
    assert texts == [("b0", "c0"), (None, "c1"), (None, None)]
    lines = [msgspec.json.decode(line) for line in lines_of(pairs, 0, "m").splitlines()]
    assert [sorted(line.keys() & {"baseline", "candidate"}) for line in lines] == [
        ["baseline", "candidate"],
        ["candidate"],
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--save-pairs", "pairs.jsonl"), "--candidate-url URL"),
        (("--candidate-url", "ftp://x"), "--candidate-url is 'ftp://x'"),
    ],
)
def test_a_lone_flag_or_a_wrong_address_is_refused(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["bench", "serve", *flags]) == 2
    assert words in capsys.readouterr().err
