"""`lockstep replay` shows what it found: as Markdown in a pipe, as a page, as a trace; and a comparison of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import invoke

WORKLOAD = {
    "config": {"block_size": 16, "num_blocks": 20, "max_num_seqs": 2},
    "requests": [
        {"id": f"request-{number}", "prompt_tokens": 30, "max_output_tokens": 4, "arrival_tick": number}
        for number in range(4)
    ],
}


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    return str(path)


def test_a_pipe_gets_markdown(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", workload]) == 0
    text = capsys.readouterr().out
    assert text.startswith("workload.json: fingerprint ")
    assert "| completed |" in text


def test_pages_and_traces_are_written_to_the_given_paths(workload: str, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "steps.json"
    assert invoke(["replay", workload, "--html", str(page), "--perfetto", str(trace)]) == 0
    assert "request-3" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_comparison_is_one_page_with_the_settings_that_differ(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert invoke(["replay", workload, "--html", str(page), "--set-b", "max_num_seqs=1"]) == 0
    assert not (tmp_path / "page-b.html").exists()
    assert "Settings that differ" in page.read_text()
    text = capsys.readouterr().out
    assert "decisions differ" in text
    assert "| max_num_seqs " in text
