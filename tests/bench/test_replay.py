"""`lockstep bench replay` measures both ways of replaying, and holds that they decide the same."""

from __future__ import annotations

from pathlib import Path

from lockstep.bench.replay import run_replay_bench, text_of
from lockstep.replay.readers import ReadOptions

WORKLOAD = Path(__file__).resolve().parents[2] / "examples" / "workload_pressure.json"


def test_both_ways_are_measured_and_decide_the_same() -> None:
    said: list[str] = []
    result = run_replay_bench(str(WORKLOAD), {}, ReadOptions(), 2, said.append)
    assert result["faults"] == []
    counted, single = result["run_lengths"], result["single_steps"]
    assert counted["fingerprint"] == single["fingerprint"]
    assert counted["requests"] == single["requests"] == 8
    assert counted["steps"] == single["steps"] == single["decided_steps"] == 27
    assert counted["decided_steps"] <= single["decided_steps"]
    assert said[0] == "run_lengths, round 1 of 2"
    assert len(said) == 4


def test_settings_and_readers_are_those_of_a_replay() -> None:
    few = run_replay_bench(str(WORKLOAD), {"max_num_seqs": "1"}, ReadOptions(limit=3), 1)
    assert few["run_lengths"]["requests"] == 3
    all_of_them = run_replay_bench(str(WORKLOAD), {}, ReadOptions(), 1)
    assert few["run_lengths"]["fingerprint"] != all_of_them["run_lengths"]["fingerprint"]


def test_the_figures_are_a_line_for_each_way() -> None:
    head, counted, single, memory = text_of(run_replay_bench(str(WORKLOAD), {}, ReadOptions(), 1)).split("\n")
    assert head.split() == ["requests/s", "best", "s", "steps", "decided", "us", "each", "fingerprint"]
    assert counted.startswith("run lengths ")
    assert single.startswith("single steps ")
    assert counted.split()[-1] == single.split()[-1]
    assert memory.startswith("peak memory ")
