"""Comparison of scheduler decisions: finds the first differing step of two recordings and predicts the effect.

For the prediction, the baseline's load is replayed with the candidate's settings. A cost model that was fitted to the
baseline's recording (`lockstep.replay.calibrate`) gives the durations of steps. The load is also replayed with the
baseline's own settings; the difference from the measurement is the error of the prediction. The prediction needs no
mirrored traffic. It is informational and does not affect the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.drafter import Speculator
from lockstep.errors import LockstepError, TraceError
from lockstep.release.verdict import Decision, Triage, Verdict
from lockstep.replay.calibrate import calibrate
from lockstep.replay.causes import differing_fields
from lockstep.replay.cost import Extrapolation
from lockstep.replay.cost_file import CostFile, MadeOn
from lockstep.replay.diff import diff_traces
from lockstep.replay.latencies import distribution
from lockstep.replay.live import LiveStep, live_step, workload_of_sequences
from lockstep.replay.metrics import MORE_IS_BETTER
from lockstep.replay.playback import played
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.render.difference import engine_facts
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace
from lockstep.replay.workload import PS_PER_MS, Workload
from lockstep.shown import signed_percent
from lockstep.worker.flight.entries import EngineEntry

SIGNAL = "decisions"
MAX_ENGINES = 32
"""Maximum number of compared engines. A device holds fewer."""
MAX_STEPS = 50_000
"""Maximum number of an engine's first steps that are compared and replayed, equal to minutes of a busy server."""
MAX_ERROR = 0.25
"""Maximum error of a figure in the replay with the baseline's settings. Figures with larger errors are not
predicted."""
ARRIVALS = "requests arrive as they did at the baseline, also where clients that wait for answers would send later"
FIGURES: Mapping[str, str] = {
    "ttft_p50_ms": "median first token",
    "ttft_p95_ms": "p95 first token",
    "latency_p50_ms": "median latency",
    "latency_p95_ms": "p95 latency",
    "output_tokens_per_s": "output tokens/s",
}
"""Names of the predicted figures for people, by key."""


def decisions_of(baseline: Trace, candidate: Trace) -> dict[str, Any]:
    """Differences between two recordings by engine, with the predicted effect of the candidate's settings.

    Engines with the same number are compared.

    Raises:
        TraceError: a recording is damaged.
    """
    engines_a = {each.number: each for each in baseline.engines}
    engines_b = {each.number: each for each in candidate.engines}
    numbers = sorted(engines_a.keys() & engines_b.keys())[:MAX_ENGINES]
    found = []
    for number in numbers:
        a, b = engines_a[number], engines_b[number]
        differing = differing_fields(a.config, b.config)
        settings = {name: [getattr(a.config, name), getattr(b.config, name)] for name in differing}
        settings |= _different_drafts(a, b)
        found.append(
            {
                "engine": number,
                "model": a.name,
                "settings": settings,
                "difference": _difference(baseline, candidate, number),
                "prediction": _prediction(baseline, a, b, is_alone=len(engines_a) == 1),
            }
        )
    only = sorted(engines_a.keys() ^ engines_b.keys())
    notes = [f"engine {number} is in one recording only" for number in only]
    return {"engines": found, "notes": notes}


def _different_drafts(a: EngineEntry, b: EngineEntry) -> dict[str, list[str]]:
    """Configurations of drafts, if they differ. Prices of rows are measured at each start, and are no setting."""
    both = [Speculator.of(each.speculation).config.text() if each.speculation else "off" for each in (a, b)]
    return {} if both[0] == both[1] else {"speculative_config": both}


def _difference(baseline: Trace, candidate: Trace, number: int) -> dict[str, Any]:
    """First step with a different decision, or the reason why it is unknown."""
    try:
        [found] = diff_traces(baseline, candidate, number, MAX_STEPS)
    except TraceError as error:
        return {"unknown": str(error)}
    facts = engine_facts(found)
    kept = ("identical", "equal_steps", "change", "reasons", "input")
    cut = {"reasons": [f"compared are the first {MAX_STEPS:,} steps"]} if facts["equal_steps"] >= MAX_STEPS else {}
    return {name: facts[name] for name in kept if name in facts} | cut


# -- prediction -------------------------------------------------------------------------------------------------------


def _prediction(trace: Trace, engine: EngineEntry, candidate: EngineEntry, *, is_alone: bool) -> dict[str, Any]:
    """Figures of the baseline's load: measured, and replayed with both settings; or the reason why there are none."""
    try:
        steps, served, notes = _course(trace, engine.number)
        workload = workload_of_sequences(engine.name, engine, served)
        if not workload.requests:
            return {"unknown": "no request of the baseline got a token, so there is no load to replay"}
        made_on = (trace.header.lockstep, trace.header.machine, engine.name, engine.fingerprint)
        cost = calibrate(steps, MadeOn(*made_on, {}, dict(engine.environment)))
        measured = figures_of([each.outcome for each in served if each.outcome.num_output_tokens])
        own, caveats = _replayed(workload, engine.config, cost)
        predicted = own
        if candidate.config != engine.config:
            predicted, caveats = _replayed(workload, candidate.config, cost)
    except LockstepError as error:
        return {"unknown": str(error)}
    notes += [ARRIVALS, *caveats, *cost.notes]
    if not is_alone:
        notes.append("turns of the device's other engines are not part of the replay")
    if candidate.fingerprint != engine.fingerprint or candidate.environment != engine.environment:
        notes.append("steps are priced as on the baseline; the candidate's weights or machine are others")
    figures = {
        name: figure_of(measured.get(name), own[name], predicted[name])
        for name in FIGURES
        if name in own and name in predicted
    }
    return {
        "requests": len(tuple(workload.requests)),
        "figures": figures,
        "trust": _trust(figures, cost),
        "notes": notes,
    }


def _course(trace: Trace, number: int) -> tuple[list[LiveStep], list[PlayedSequence], list[str]]:
    """Steps of an engine, the sequences that ended within them, and notes on omitted steps, in one pass."""
    steps: list[LiveStep] = []
    served: list[PlayedSequence] = []
    sequences = PlayedSequences()
    for event in played(trace):
        ended = [each for each in sequences.take(event) if each.engine.number == number]
        served += [each for each in ended if each.outcome.is_completed]
        if isinstance(event, DecidedStep) and event.engine == number:
            steps.append(live_step(event))
            if len(steps) == MAX_STEPS:
                return steps, served, [f"replayed are the requests that ended in its first {MAX_STEPS:,} steps"]
    return steps, served, []


def _replayed(workload: Workload, config: SchedulerConfig, cost: CostFile) -> tuple[dict[str, float], list[str]]:
    """Figures of a replay, and its caveats."""
    extrapolation = Extrapolation(cost.ranges)
    replay = Simulation(workload, config, cost.model(), watchers=[extrapolation]).run()
    notes = [*replay.notes, *filter(None, [extrapolation.note()])]
    num_refused = sum(bool(each.refusal) for each in replay.outcomes)
    if num_refused:
        notes.append(f"{num_refused:,} requests of the baseline would be refused on the candidate's settings")
    return figures_of([each for each in replay.outcomes if each.is_completed]), notes


def figures_of(outcomes: Sequence[RequestOutcome]) -> dict[str, float]:
    """Figures of requests by the keys of `FIGURES`, without figures that no request has."""
    if not outcomes:
        return {}
    found: dict[str, float] = {}
    firsts = [each.in_ps.ttft for each in outcomes if each.first_token_ps >= 0]
    for stem, values in (("ttft", firsts), ("latency", [each.in_ps.e2e for each in outcomes])):
        spread = distribution(values, PS_PER_MS)
        if spread is not None:
            found |= {f"{stem}_p50_ms": spread.p50, f"{stem}_p95_ms": spread.p95}
    span_ps = max(each.finished_ps for each in outcomes) - min(each.arrival_ps for each in outcomes)
    if span_ps > 0:
        found["output_tokens_per_s"] = sum(each.num_output_tokens for each in outcomes) * 1000 * PS_PER_MS / span_ps
    return found


def figure_of(measured: float | None, own: float, predicted: float) -> dict[str, float | None]:
    """Figure as measured and as replayed, the error of the replay, and the prediction if the error is small.

    Args:
        measured: value in the baseline's recording; None: unknown.
        own: value of the replay with the baseline's settings.
        predicted: value of the replay with the candidate's settings.
    """
    error = own / measured - 1 if measured else None
    is_stated = error is not None and abs(error) <= MAX_ERROR
    return {
        "measured": measured,
        "baseline": own,
        "candidate": predicted if is_stated else None,
        "change": predicted / own - 1 if is_stated and own else None,
        "error": error,
    }


def _trust(figures: Mapping[str, Mapping[str, float | None]], cost: CostFile) -> str:
    """Sentence on the error of the replay with the baseline's settings, and on the figures that are not predicted."""
    errors = {name: abs(each["error"]) for name, each in figures.items() if each["error"] is not None}
    if not errors:
        return "nothing was measured that a replay could be compared with, so nothing is predicted"
    stated = {name: error for name, error in errors.items() if error <= MAX_ERROR}
    found = f"the prices of steps are off by {100 * abs(cost.held_out.total_error):.3g} % in all"
    for some, words in (
        (stated, "a smaller change is within this error"),
        (errors.keys() - stated.keys(), "not predicted"),
    ):
        if some:
            worst = max(sorted(some), key=lambda name: errors[name])
            listed = ", ".join(FIGURES[name] for name in errors if name in some)
            found += f"; a replay of the baseline on its own settings by up to {100 * errors[worst]:.3g} %"
            found += f" ({listed}): {words}"
    return found


# -- verdicts ---------------------------------------------------------------------------------------------------------


def with_decisions(verdict: Verdict, decisions: dict[str, Any] | None, notes: Iterable[str] = ()) -> Verdict:
    """Verdict with the comparison of two recordings. Predicted losses become triage items."""
    items = () if decisions is None else tuple(_items(decisions, float(verdict.policy["margin"])))
    return msgspec.structs.replace(
        verdict, decisions=decisions, triage=verdict.triage + items, notes=(*verdict.notes, *notes)
    )


def _items(decisions: Mapping[str, Any], margin: float) -> Iterator[Triage]:
    """One triage item for each engine with a significant predicted loss."""
    for engine in decisions["engines"]:
        figures = engine["prediction"].get("figures", {})
        worse = {name: each for name, each in figures.items() if is_worse(name, each, margin)}
        if not worse:
            continue
        changes = "; ".join(
            f"{FIGURES[name]} {each['baseline']:.4g} -> {each['candidate']:.4g} ({signed_percent(each['change'])})"
            for name, each in worse.items()
        )
        yield Triage(
            signal=SIGNAL,
            severity="info",
            segment=engine["model"],
            evidence=f"the baseline's load, replayed on the candidate's settings: {changes}",
            response=Decision.PROMOTE.value,
            owner="scheduling",
            action=f"look at {', '.join(engine['settings']) or 'the settings'}; lockstep diff shows the deciding step",
        )


def is_worse(name: str, figure: Mapping[str, float | None], margin: float) -> bool:
    """True if a figure is predicted to worsen by more than the margin and by more than the replay's error."""
    change = figure["change"]
    if change is None:
        return False
    loss = -change if name in MORE_IS_BETTER else change
    return loss > max(margin, abs(figure["error"] or 0.0))
