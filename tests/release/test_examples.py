"""Examples of the gate: their verdicts with the contents."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.cli.main import invoke

EXAMPLES = Path("examples")


def judged(name: str, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and verdict of an example."""
    output = folder / "verdict.json"
    code = invoke(["gate", str(EXAMPLES / f"{name}.json"), "--output", str(output), *arguments])
    verdict: dict[str, Any] = json.loads(output.read_text())
    return code, verdict


def names_of(verdict: dict[str, Any]) -> list[str]:
    return [signal["name"] for signal in verdict["signals"]]


def test_safe_is_promoted(tmp_path: Path) -> None:
    code, verdict = judged("release_gate_safe", tmp_path)
    assert (code, verdict["decision"], names_of(verdict)) == (0, "promote", [])
    assert verdict["summary"]["same"] == verdict["summary"]["pairs"] == 6


def test_bad_is_rolled_back_for_one_mismatch_and_one_added_error(tmp_path: Path) -> None:
    code, verdict = judged("release_gate_bad", tmp_path)
    assert (code, verdict["decision"]) == (1, "rollback")
    assert sorted(names_of(verdict)) == ["errors", "output-mismatch"]
    assert verdict["summary"]["differing"] == 1
    assert verdict["first_mismatch"]["request"] == "req-2"
    assert verdict["first_mismatch"]["token_index"] == 3
    assert {tuple(item["examples"]) for item in verdict["triage"]} == {("req-2",), ("req-4",)}


def test_numeric_tolerance_is_promoted_with_four_tolerated_comparisons(tmp_path: Path) -> None:
    code, verdict = judged("release_gate_numeric_tolerance", tmp_path)
    assert (code, verdict["decision"]) == (0, "promote")
    [segment] = verdict["segments"]
    assert segment["tolerated"] == 4
    assert "baseline-runtime -> candidate-runtime" in segment["name"]


def test_a_backend_mirror_is_promoted_with_its_pressure_and_versions(tmp_path: Path) -> None:
    code, verdict = judged("backend_mirror_vllm_sglang", tmp_path)
    assert (code, verdict["decision"]) == (0, "promote")
    assert verdict["transitions"] == ["2026-10-01 -> 2026-11-15"]
    figures = verdict["summary"]["figures"]
    for name in ("queue_depth_p95", "kv_pressure_p95", "ttft_p95_ms", "decode_p95_ms"):
        assert figures[name]["baseline"] is not None
        assert figures[name]["candidate"] is not None


def test_a_streaming_mirror_is_promoted_with_whole_coverage(tmp_path: Path) -> None:
    code, verdict = judged("backend_mirror_streaming_vllm_sglang", tmp_path)
    assert (code, verdict["decision"]) == (0, "promote")
    coverage = verdict["coverage"]
    assert coverage["candidate_routing_provenance_rate"] == coverage["candidate_streaming_trace_rate"] == 1.0
    assert verdict["sides"]["candidate"]["route_id"] == ["sglang-a", "sglang-b"]
    assert verdict["sides"]["candidate"]["scheduler"] == ["continuous-batching"]


def test_every_output_has_the_same_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, junit, page = tmp_path / "summary.md", tmp_path / "gate.xml", tmp_path / "gate.html"
    summary.write_text("# before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, verdict = judged("release_gate_bad", tmp_path, "--junit", str(junit), "--html", str(page), "--json")
    assert code == 1
    assert json.loads(capsys.readouterr().out) == verdict
    assert summary.read_text().startswith("# before\n")
    assert verdict["reason"] in summary.read_text()
    assert verdict["reason"] in html.unescape(page.read_text())
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == str(1 + len(verdict["signals"]))
    assert {case.get("name") for case in suite} == {"decision", *names_of(verdict)}
