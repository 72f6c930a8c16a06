"""What a sweep came to: as a table and a sentence for people, as an object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.replay.metrics import MORE_IS_BETTER, SHORT_FORMS, short_name
from lockstep.replay.render.tables import Table
from lockstep.replay.sweep import Outcome

VERSION = 1
"""Of the JSON form."""
_SHOWN = ("kv_occupancy", "preemptions", "requests_refused", "goodput.ratio")
"""Figures that a table has beside times, speed and objectives."""
_SPEED = {"latency_ms": "output_tokens_per_s", "latency_ticks": "total_ticks"}
"""By what times count: where nobody said how long a tick is, nothing is per second."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep that is over."""

    name: str
    """Of the workload."""
    outcomes: tuple[Outcome, ...]
    objectives: tuple[str, ...]
    """Paths of the figures that the front is about; none where nothing works."""
    is_on_front: tuple[bool, ...]
    """Of each outcome."""
    goals_ms: Mapping[str, float]
    percent: float
    """Of the requests that must meet them."""
    best: int | None
    """The cheapest outcome that meets the goals; None: none does, or there are no goals."""
    common: Mapping[str, str]
    """What was set for all."""


def metrics_shown(swept: Swept) -> list[str]:
    """Paths of the figures that tables have: objectives first."""
    figures = next((outcome.figures for outcome in swept.outcomes if outcome.figures), {})
    form = next((form for form in SHORT_FORMS if f"{form}.ttft.p50" in figures), SHORT_FORMS[0])
    times = [f"{form}.{measure}.{kind}" for measure in ("ttft", "tpot") for kind in ("p50", "p99")]
    others = [name for name in (_SPEED[form], *times, *_SHOWN) if name in figures]
    return list(dict.fromkeys((*swept.objectives, *others)))


def unit_of_times(names: Sequence[str]) -> str:
    """What the times among some figures count; empty: there are none."""
    forms = [name.split(".")[0] for name in names]
    return "ms" if SHORT_FORMS[0] in forms else "ticks" if SHORT_FORMS[1] in forms else ""


def sweep_table(swept: Swept) -> Table:
    """A row for each config; ``*`` is on the front."""
    names = metrics_shown(swept)
    settings = tuple(swept.outcomes[0].settings)
    table = Table("Configs", ("", *settings, *map(short_name, names)), num_words=1 + len(settings))
    for outcome, is_best in zip(swept.outcomes, swept.is_on_front, strict=True):
        figures = [f"{outcome.figures[name]:,g}" if name in outcome.figures else "" for name in names]
        table.rows.append(("*" if is_best else "", *outcome.settings.values(), *figures))
    return table


def sweep_notes(swept: Swept) -> Iterator[str]:
    """What a reader of the table must know."""
    unit = unit_of_times(metrics_shown(swept))
    if unit:
        yield f"times in {unit}"
    if swept.objectives:
        front = f"* is on the Pareto front of {objectives_text(swept)}"
        yield f"{front}: no other is as good in everything and better in something"
    for outcome in swept.outcomes:
        if outcome.refusal:
            yield f"{settings_text(outcome)} cannot work: {outcome.refusal}"
    yield from extrapolation_notes(swept)


def extrapolation_notes(swept: Swept) -> Iterator[str]:
    """Which configs' times are of steps larger than any that was measured."""
    noted = [outcome for outcome in swept.outcomes if outcome.note]
    if noted:
        number = "1 config has" if len(noted) == 1 else f"{len(noted):,} configs have"
        yield f"{number} steps larger than any that was measured, as {settings_text(noted[-1])}: {noted[-1].note}"


def objectives_text(swept: Swept) -> str:
    """The objectives by their short names."""
    return " and ".join(map(short_name, swept.objectives))


def settings_text(outcome: Outcome) -> str:
    """What the grid set."""
    return ", ".join(f"{name}={value}" for name, value in outcome.settings.items())


def verdict(swept: Swept) -> str:
    """Which config is the cheapest that meets the goals; empty without goals."""
    if not swept.goals_ms:
        return ""
    what = ", ".join(f"{name} of {limit:g} ms" for name, limit in swept.goals_ms.items())
    if swept.best is None:
        return f"no config meets {what} for {swept.percent:g} % of the requests"
    best = swept.outcomes[swept.best]
    share = 100 * (best.good_share or 0.0)
    return f"cheapest that meets {what}: {settings_text(best)} ({share:.6g} % of the requests meet it)"


def facts(swept: Swept) -> dict[str, Any]:
    """All of it as an object."""
    return {
        "version": VERSION,
        "name": swept.name,
        "common": dict(swept.common),
        "objectives": [{"name": each, "better": better(each)} for each in swept.objectives],
        "goals_ms": dict(swept.goals_ms),
        "slo_percent": swept.percent if swept.goals_ms else None,
        "cheapest": None if swept.best is None else swept.outcomes[swept.best].settings,
        "rows": [
            {
                "set": each.settings,
                "is_on_front": is_best,
                "refusal": each.refusal or None,
                "note": each.note or None,
                "figures": each.figures,
            }
            for each, is_best in zip(swept.outcomes, swept.is_on_front, strict=True)
        ],
    }


def better(metric: str) -> str:
    """``more`` or ``less``."""
    return "more" if metric in MORE_IS_BETTER else "less"
