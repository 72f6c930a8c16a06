"""The example workloads give the published figures of the system that Lockstep replaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.replay.configs import config_for
from lockstep.replay.readers import read_workload
from lockstep.replay.report import Report, report_of, to_json
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import TickRecorder
from tools.search_workloads import TARGETS, Target, as_text, figures_of, search

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
COLUMNS = (
    "tick",
    "admitted",
    "admitted_prefill_tokens",
    "decoded",
    "completed",
    "queued",
    "active",
    "used_blocks",
)
"""Columns of the ticks in the documentation."""


def replayed(name: str) -> Report:
    workload, recorder = read_workload(EXAMPLES / name), TickRecorder()
    return report_of(Simulation(workload, config_for(workload), watchers=[recorder]).run(), recorder=recorder)


def documentation() -> str:
    return (ROOT / "docs" / "workloads.md").read_text()


def test_workload() -> None:
    report = replayed("workload.json")
    assert (report.requests, report.requests_completed, report.total_ticks) == (4, 4, 11)
    assert (report.prompt_tokens, report.decode_tokens, report.reserved_blocks) == (224, 18, 18)
    assert (report.peak_blocks, report.kv_capacity) == (12, 20)
    assert (report.queue_pressure_ticks, report.active_capacity_ticks) == (3, 3)
    assert report.decode_utilization == 0.818182
    assert report.all_blocks_returned


def test_workload_pressure() -> None:
    report = replayed("workload_pressure.json")
    assert (report.requests, report.requests_completed, report.total_ticks) == (8, 8, 27)
    assert (report.prompt_tokens, report.decode_tokens, report.reserved_blocks) == (432, 48, 35)
    assert (report.peak_blocks, report.kv_capacity, report.peak_blocks_percent) == (13, 15, 86.666667)
    assert (report.max_queued, report.max_active, report.config["max_num_seqs"]) == (5, 3, 3)
    assert report.decode_utilization == 0.888889
    assert report.kv_occupancy == 0.595062
    assert report.all_blocks_returned


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [("workload.json", "e291d8b8c8e31525"), ("workload_pressure.json", "943f56fa046dd47b")],
)
def test_fingerprints_of_the_examples_are_the_published_ones(name: str, fingerprint: str) -> None:
    """They differ from the published b454ea97ea75ee90, which is a hash of bytes that were not published."""
    assert replayed(name).fingerprint == fingerprint
    assert f"| `examples/{name}` | `{fingerprint}` |" in documentation()


def test_the_ticks_in_the_documentation_are_those_of_the_replay() -> None:
    report = replayed("workload.json")
    assert report.ticks is not None
    head = f"| {' | '.join(COLUMNS).replace('_', ' ')} |\n|{'---|' * len(COLUMNS)}\n"
    values = [[getattr(tick, column) for column in COLUMNS] for tick in report.ticks]
    rows = [[", ".join(cell) or "-" if isinstance(cell, tuple) else str(cell) for cell in row] for row in values]
    table = head + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    assert f"\n{table}\n" in documentation(), f"docs/workloads.md has another table than this:\n{table}"
    line = next(line for line in to_json(report).decode().splitlines() if '"tick":3,' in line)
    assert f"\n{line.strip(' ,')}\n" in documentation(), f"docs/workloads.md has another record than this:\n{line}"


def test_priorities_are_mixed() -> None:
    workload = read_workload(EXAMPLES / "workload_pressure.json")
    assert len({request.priority for request in workload.requests}) > 2


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.file)
def test_the_files_are_as_the_search_writes_them(target: Target) -> None:
    """The text of the files is canonical, and their figures are the targets of the search."""
    text = (EXAMPLES / target.file).read_text()
    drawn = json.loads(text)
    assert as_text(drawn) == text
    assert all(wanted in (None, got) for wanted, got in zip(target.figures, figures_of(drawn), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.file)
def test_the_search_finds_the_example_files(target: Target) -> None:
    assert as_text(search(target, seed=0)[1]) == (EXAMPLES / target.file).read_text()
