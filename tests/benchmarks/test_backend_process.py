"""An engine in a process of its own: how its ways are chosen, and what it says when it cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.comparison.backend_process import ENGINES, Prompts, Times, fastest
from benchmarks.comparison.rounds import ENGINES as RACING
from benchmarks.comparison.rounds import OURS

SCRIPT = ("-m", "benchmarks.comparison.backend_process")


class Timed:
    """An engine with a configured duration for each way."""

    def __init__(self, **seconds: float) -> None:
        self._seconds = seconds
        self.runs: list[tuple[str, int, int]] = []

    def ways(self, num_seqs: int) -> list[str]:
        return list(self._seconds)

    def run(self, prompts: Prompts, num_output: int, way: str) -> Times:
        self.runs.append((way, len(prompts), num_output))
        return [[0.0, self._seconds[way]] for _ in prompts]


@pytest.mark.parametrize("seconds", [{"a": 3.0, "b": 1.0, "c": 2.0}, {"a": 2.0, "b": 1.0}, {"b": 1.0, "c": 2.0}])
def test_the_fastest_way_is_kept_and_was_the_last_to_run(seconds: dict[str, float]) -> None:
    engine: Any = Timed(**seconds)
    assert fastest(engine, [[1] * 100, [2]], 5) == ("b", [[0.0, 1.0]] * 2)
    assert engine.runs[-1] == ("b", 2, 5)
    assert {way for way, num_prompts, _ in engine.runs if num_prompts == 1} == set(seconds)


def test_one_way_is_not_compared_with_anything() -> None:
    engine: Any = Timed(only=1.0)
    assert fastest(engine, [[1]], 5)[0] == "only"
    assert engine.runs == [("only", 1, 5)]


def test_every_engine_that_may_race_is_known() -> None:
    assert {OURS["engine"], *RACING} == set(ENGINES)


def test_times_of_tokens_come_for_each_line_and_an_error_ends_nothing() -> None:
    asked = [
        {"prompts": [[5, 6, 7], [8]], "num_output": 3, "way": ""},
        {"prompts": [[]], "num_output": 3, "way": "defaults"},
        {"prompts": [[5]], "num_output": 2, "way": "defaults"},
    ]
    command = [sys.executable, *SCRIPT, "lockstep", "stub://a", "1", "2", "100"]
    lines = "".join(json.dumps(line) + "\n" for line in asked)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    ready, first, wrong, last = map(json.loads, done.stdout.splitlines())
    assert ready["version"].startswith("Lockstep ")
    assert first["way"] == "defaults"
    assert [len(times) for times in first["times"]] == [3, 3]
    assert "error" in wrong
    assert len(last["times"][0]) == 2


def test_an_engine_that_is_not_installed_reports_the_install_command() -> None:
    without = (
        "import runpy, sys; sys.modules['mistralrs'] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    )
    command = [sys.executable, "-c", without, SCRIPT[1], "mistral.rs", "x.gguf", "1", "1", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install mistralrs" in json.loads(done.stdout)["error"]
