"""`lockstep bench cluster`: its counts are those of the manifests, and what differs is a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.bench.cluster import SUITES, asked_of, decisions, faults_of
from lockstep.cli.main import invoke
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.manifest_file import parse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_all_suites_boot_as_they_must_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Their counts are the bench's own assertion: exit code 0 says that they hold."""
    command = ["bench", "cluster", "--examples", str(EXAMPLES), "--num-calls", "8", "--worker", "thread", "--json"]
    assert invoke(command) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["suite"] for result in results] == [suite.name for suite in SUITES]
    for result, suite in zip(results, SUITES, strict=True):
        assert result["faults"] == []
        assert (result["num_models"], result["resident_mb"]) == (suite.num_models, suite.resident_mb)
        for figure in ("decision_us", "call_ms", "loaded_call_ms"):
            assert 0 < result[figure]["p50"] <= result[figure]["p99"]
        assert result["request_throughput"] > 0


def test_a_count_that_is_not_right_is_a_fault() -> None:
    suite = SUITES[0]
    counts = {
        "num_models": suite.num_models,
        "num_resident": suite.num_resident,
        "num_standby": suite.num_standby,
        "resident_mb": suite.resident_mb,
        "num_warms": suite.num_warms,
    }
    assert faults_of(suite, counts) == []
    assert faults_of(replace(suite, num_resident=4), counts) == ["customer-support: num_resident is 3, not 4"]


def test_examples_that_are_not_there_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "cluster", "--examples", str(tmp_path)]) == 2
    assert "give the examples' directory by --examples" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "num"), [("customer-support", 2), ("density-50", 25), ("warming-heavy", 8)])
async def test_every_call_of_the_decision_path_reaches_its_model(name: str, num: int) -> None:
    """`decisions` asserts it of each; here they run, and ask those that are ready or else all."""
    served = served_by(parse((EXAMPLES / f"{name}.yaml").read_text()), Backend.STUB)
    targets = asked_of(served)
    assert len(targets) == num
    assert min(await decisions(served, targets)) > 0
