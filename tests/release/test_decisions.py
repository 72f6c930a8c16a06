"""Decisions of two recordings predict the effect of another setting on a load, with an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.policy import SchedulerConfig
from lockstep.release import decisions
from lockstep.release.decisions import FIGURES, MAX_ERROR, decisions_of, figure_of, figures_of, is_worse, with_decisions
from lockstep.release.rendering import document_of
from lockstep.release.verdict import Decision, Verdict
from lockstep.replay.recording import RunRecording
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace, open_trace
from lockstep.replay.workload import Workload
from lockstep.report.text import to_markdown
from tests.release.recording import judged
from tests.replay.test_recording import COST, LIMITS, crowd

TIGHT = replace(LIMITS, max_num_seqs=2)
DIGITS = 0.02
"""Relative precision: recorded times are whole microseconds, and prices are fitted to them."""


def simulated(path: Path, config: SchedulerConfig, load: Workload | None = None) -> tuple[Trace, dict[str, float]]:
    """Recording of a logical clock with the step prices `COST`, and the figures of its requests."""
    load = crowd() if load is None else load
    with RunRecording(path, load, config, COST) as recording:
        run = Simulation(load, config, COST, watchers=[recording], on_arrival=recording.arrived).run()
    return open_trace(path), figures_of(run.outcomes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture(scope="module")
def baseline(folder: Path) -> tuple[Trace, dict[str, float]]:
    return simulated(folder / "baseline.lstrace", LIMITS)


@pytest.fixture(scope="module")
def candidate(folder: Path) -> tuple[Trace, dict[str, float]]:
    return simulated(folder / "candidate.lstrace", TIGHT)


def engine_of(decisions: dict[str, Any]) -> dict[str, Any]:
    [engine] = decisions["engines"]
    assert isinstance(engine, dict)
    return engine


def test_the_prediction_matches_the_candidate(
    baseline: tuple[Trace, dict[str, float]], candidate: tuple[Trace, dict[str, float]]
) -> None:
    engine = engine_of(decisions_of(baseline[0], candidate[0]))
    assert engine["settings"] == {"max_num_seqs": [LIMITS.max_num_seqs, TIGHT.max_num_seqs]}
    figures = engine["prediction"]["figures"]
    assert list(figures) == list(FIGURES)
    for name, figure in figures.items():
        assert figure["measured"] == pytest.approx(baseline[1][name], rel=1e-3)
        assert figure["baseline"] == pytest.approx(baseline[1][name], rel=DIGITS)
        assert figure["candidate"] == pytest.approx(candidate[1][name], rel=DIGITS)
    assert figures["ttft_p95_ms"]["change"] > 1, "two at a time is another server than five at a time"


def test_the_first_step_that_differs_is_reported_with_its_reason(
    baseline: tuple[Trace, dict[str, float]], candidate: tuple[Trace, dict[str, float]]
) -> None:
    difference = engine_of(decisions_of(baseline[0], candidate[0]))["difference"]
    assert not difference["identical"]
    assert difference["reasons"]
    assert any("2" in reason for reason in difference["reasons"])


def test_a_recording_against_itself_has_no_difference_and_no_predicted_change(
    baseline: tuple[Trace, dict[str, float]],
) -> None:
    engine = engine_of(decisions_of(baseline[0], baseline[0]))
    assert engine["settings"] == {}
    assert engine["difference"]["identical"]
    assert {figure["change"] for figure in engine["prediction"]["figures"].values()} == {0.0}


def test_too_few_steps_give_a_warning_instead_of_a_prediction(folder: Path) -> None:
    few = replace(crowd(), requests=tuple(crowd().requests)[:2])
    trace, _ = simulated(folder / "few.lstrace", LIMITS, few)
    prediction = engine_of(decisions_of(trace, trace))["prediction"]
    assert "a cost model needs at least" in prediction["unknown"]


@pytest.fixture(scope="module")
def verdict(baseline: tuple[Trace, dict[str, float]], candidate: tuple[Trace, dict[str, float]]) -> Verdict:
    """Verdict on two simulated runs without answers, so only times are judged."""
    return judged(baseline[0].files[0], candidate[0].files[0], outputs="ignore")


def test_scheduler_decisions_do_not_decide_the_verdict(verdict: Verdict) -> None:
    assert verdict.decision is Decision.PROMOTE
    assert verdict.signals == ()
    [item] = verdict.triage
    assert (item.signal, item.severity, item.response) == ("decisions", "info", "promote")
    assert "p95 first token" in item.evidence
    assert "max_num_seqs" in item.action


def test_simulated_runs_pair_by_the_place_of_their_requests(verdict: Verdict) -> None:
    assert verdict.joining.by_key == {"index": 120}


def test_a_candidate_with_better_predictions_gives_no_item(
    verdict: Verdict, baseline: tuple[Trace, dict[str, float]], candidate: tuple[Trace, dict[str, float]]
) -> None:
    assert not judged(candidate[0].files[0], baseline[0].files[0], outputs="ignore").triage
    assert not judged(baseline[0].files[0], baseline[0].files[0], outputs="ignore").triage


def test_the_report_shows_settings_difference_prediction_and_error(verdict: Verdict) -> None:
    text = to_markdown(document_of(verdict))
    assert "max_num_seqs: 5 -> 2" in text
    assert "on the candidate's settings" in text
    assert "off by" in text
    decisions = verdict.decisions
    assert decisions is not None
    for reason in engine_of(decisions)["difference"]["reasons"]:
        assert reason in text


def test_a_figure_is_predicted_only_if_the_replay_was_accurate() -> None:
    for error in (-MAX_ERROR, 0.0, MAX_ERROR):
        assert figure_of(100.0, 100.0 * (1 + error), 200.0)["candidate"] == 200.0
    for figure in (figure_of(100.0, 233.0, 500.0), figure_of(100.0, 40.0, 10.0), figure_of(None, 1.0, 2.0)):
        assert (figure["candidate"], figure["change"]) == (None, None)
        assert not is_worse("ttft_p95_ms", figure, 0.05)
    assert figure_of(100.0, 233.0, 500.0)["error"] == pytest.approx(1.33)


def test_predictions_of_an_inaccurate_replay_are_omitted(
    baseline: tuple[Trace, dict[str, float]],
    candidate: tuple[Trace, dict[str, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "MAX_ERROR", -1.0)
    verdict = judged(baseline[0].files[0], candidate[0].files[0], outputs="ignore")
    assert verdict.triage == ()
    assert verdict.decisions is not None
    prediction = engine_of(verdict.decisions)["prediction"]
    assert {figure["candidate"] for figure in prediction["figures"].values()} == {None}
    assert prediction["trust"].endswith("output tokens/s): not predicted")


def test_the_report_gives_the_reason_for_a_missing_prediction(verdict: Verdict) -> None:
    engine = {
        "engine": 0,
        "model": "m",
        "settings": {},
        "difference": {"unknown": "a file is missing"},
        "prediction": {"unknown": "too few steps"},
    }
    text = to_markdown(document_of(with_decisions(verdict, {"engines": [engine], "notes": ["engine 3 is in one"]})))
    for words in ("a file is missing", "too few steps", "engine 3 is in one"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "change", "error", "expected"),
    [
        ("ttft_p95_ms", 0.2, 0.01, True),
        ("ttft_p95_ms", 0.2, -0.3, False),
        ("ttft_p95_ms", 0.04, 0.0, False),
        ("ttft_p95_ms", -0.5, 0.0, False),
        ("output_tokens_per_s", -0.2, 0.01, True),
        ("output_tokens_per_s", 0.2, 0.01, False),
        ("ttft_p95_ms", None, None, False),
    ],
)
def test_a_loss_counts_beyond_the_margin_and_the_error_of_the_replay(
    name: str, change: float | None, error: float | None, expected: bool
) -> None:
    assert is_worse(name, {"change": change, "error": error}, 0.05) is expected


def test_figures_use_the_existing_requests() -> None:
    assert figures_of([]) == {}
    done = RequestOutcome("r", 0, 0, "", 3, num_output_tokens=4, first_token_ps=10**9, finished_ps=4 * 10**9)
    done.arrival_ps = 0
    assert figures_of([done]) == {
        "ttft_p50_ms": 1.0,
        "ttft_p95_ms": 1.0,
        "latency_p50_ms": 4.0,
        "latency_p95_ms": 4.0,
        "output_tokens_per_s": 1000.0,
    }
