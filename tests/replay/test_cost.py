"""Warnings about times of steps beyond the measured range."""

from __future__ import annotations

from lockstep.replay.cost import CostModel, Extrapolation, Ranges
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import ArrivalUnit
from tests.replay.workloads import config, request, workload


def note_of(ranges: Ranges) -> str:
    """Warning of two requests: a step with both prompts, and 9 decode steps with up to 29 tokens of context each."""
    extrapolation = Extrapolation(ranges)
    load = workload(request("a", 20, 10), request("b", 20, 10), unit=ArrivalUnit.PS)
    Simulation(load, config(), CostModel(), watchers=[extrapolation]).run()
    return extrapolation.note()


def test_steps_within_the_measured_range_need_no_warning() -> None:
    assert note_of({"prefill tokens": (0, 40), "decoding sequences": (0, 2), "context tokens": (1, 58)}) == ""
    assert note_of({}) == ""


def test_each_extrapolated_feature_is_listed_with_both_values() -> None:
    ranges = {"prefill tokens": (0, 30), "decoding sequences": (0, 1), "context tokens": (1, 58)}
    assert note_of(ranges) == (
        "times are extrapolated for 100.0% of the steps, which compute up to 40 prefill tokens (measured: 30), up to 2 "
        "decoding sequences (measured: 1)"
    )


def test_the_context_at_the_end_of_a_run_counts() -> None:
    assert "up to 58 context tokens (measured: 57)" in note_of({"context tokens": (1, 57)})
