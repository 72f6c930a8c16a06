"""`lockstep bench cluster`: its counts are those of the manifests, and what differs is a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.bench.cluster import NRT, SUITES, decisions, faults_of, routed_models, text_of
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
        assert result["used_bytes"]["gpu_budget"] == suite.resident_mb * 1_000_000
        for figure in ("decision_us", "call_ms", "loaded_call_ms"):
            assert 0 < result[figure]["p50"] <= result[figure]["p99"]
        assert min(result["request_throughput"], result["sequential_request_throughput"]) > 0
    lines = [line.split("  ") for line in text_of(results).splitlines()]
    cells = {first: [cell.strip() for cell in rest if cell] for first, *rest in lines}
    assert cells["resident / standby"] == ["3 / 1", "26 / 25", "1 / 8", "the same"]
    assert cells["VRAM, MB"] == ["2,400", "20,800", "800", "the same"]
    assert cells["co-activation warms, declared / done"] == ["2 / 0", "0 / 0", "8 / 8"]
    assert cells["boot, ms"][-1] == "9..88"
    assert cells["requests/s, sequential"][-1] == "208..217"
    assert cells["latency, sequential, ms: p50 p95 p99"][-1] == f"p50 {NRT['call_ms']['p50']}"


def test_a_count_that_is_not_right_is_a_fault() -> None:
    suite = SUITES[0]
    counts = {
        "num_models": suite.num_models,
        "num_resident": suite.num_resident,
        "num_standby": suite.num_standby,
        "resident_mb": suite.resident_mb,
        "num_declared_warms": suite.num_declared_warms,
        "num_warms": suite.num_warms,
    }
    assert faults_of(suite, counts) == []
    assert faults_of(replace(suite, num_resident=4), counts) == ["customer-support: num_resident is 3; it must be 4"]


def test_missing_examples_are_reported_with_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["bench", "cluster", "--examples", str(tmp_path)]) == 2
    assert "as --examples" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "num"), [("customer-support", 2), ("density-50", 25), ("warming-heavy", 8)])
async def test_every_call_of_the_decision_path_reaches_its_model(name: str, num: int) -> None:
    """`decisions` asserts it of each; here they run, and ask those that are ready or else all."""
    served = served_by(parse((EXAMPLES / f"{name}.yaml").read_text()), Backend.STUB)
    targets = routed_models(served)
    assert len(targets) == num
    assert min(await decisions(served, targets)) > 0
