"""Rendering of sweeps: as a table, a plot and a sentence for people, as a page, and as an object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.replay.metrics import MORE_IS_BETTER, SHORT_FORMS, as_less_is_better, short_name
from lockstep.replay.sweep import SweepOutcome
from lockstep.report.document import (
    Axis,
    Block,
    Cell,
    Document,
    Flag,
    Lead,
    Number,
    Paragraph,
    Point,
    Remark,
    Scatter,
    Section,
    Style,
    Table,
    Tile,
    Tiles,
    format_number,
    numbers,
    words,
)
from lockstep.report.page import to_html

VERSION = 1
"""Version of the JSON form."""
_SHOWN = ("kv_occupancy", "preemptions", "requests_refused", "goodput.ratio")
"""Figures in each table, in addition to times, speed and objectives."""
_SPEED = {"latency_ms": "output_tokens_per_s", "latency_ticks": "total_ticks"}
"""Figure of speed by the unit of latencies. If the duration of a tick is unknown, no figure is per second."""
_CHEAPEST = "cheapest"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep."""

    name: str
    """Name of the workload."""
    outcomes: tuple[SweepOutcome, ...]
    objectives: tuple[str, ...]
    """Paths of the figures that define the front; empty if no config is valid."""
    is_on_front: tuple[bool, ...]
    """For each outcome, True if it is on the front."""
    goals_ms: Mapping[str, float]
    percent: float
    """Percentage of requests that must meet the goals."""
    best: int | None
    """Index of the cheapest outcome that meets the goals; None: none, or no goals."""
    common: Mapping[str, str]
    """Settings common to all configs."""


def sweep_page(result: SweepResult) -> str:
    """Page of a sweep; equal sweeps give equal pages."""
    names, objectives = metrics_shown(result), _objectives_text(result) or "nothing"
    unit = _unit_of_times(names)
    hint = f"★ is on the Pareto front of {objectives}: no other config is as good in all of them and better in one."
    table = sweep_table(result, Style.SHORT)
    sections = [
        Section("", (Tiles(list(_tiles(result))),)),
        Section("Best configs", (scatter_of(result),)),
        Section("All configs", (table, Paragraph(hint + (f" Times are in {unit}." if unit else ""), "hint"))),
        Section("Common settings", (_common(result),)),
    ]
    said = verdict(result)
    return to_html(
        Document(
            title=f"Sweep of {result.name}",
            sections=sections,
            leads=[Lead(_grid_text(result))],
            verdict=said[:1].upper() + said[1:],
            notes=list(_extrapolation_notes(result)),
        )
    )


def sweep_blocks(result: SweepResult) -> tuple[Block, ...]:
    """Blocks of the sweep for a terminal, without its warnings and its verdict."""
    table = sweep_table(result)
    return (table, scatter_of(result)) if len(result.objectives) > 1 else (table,)


def sweep_table(result: SweepResult, style: Style = Style.GENERAL) -> Table:
    """Table with one row per config; configs on the front are marked."""
    names, settings = metrics_shown(result), tuple(result.outcomes[0].settings)
    columns = (*words("", *settings), *numbers(*map(short_name, names)))
    table = Table("Configs", columns, id="configs", can_sort=True)
    for index, (outcome, is_best) in enumerate(zip(result.outcomes, result.is_on_front, strict=True)):
        badge = _CHEAPEST if index == result.best else ""
        figures: list[Cell] = [
            Number(outcome.figures[name], style) if name in outcome.figures else "" for name in names
        ]
        if outcome.refusal:
            figures = [Remark(f"invalid: {outcome.refusal}")]
        meaning = f"on the Pareto front of {_objectives_text(result)}"
        table.rows.append((Flag(is_best, meaning, badge), *outcome.settings.values(), *figures))
    return table


def scatter_of(result: SweepResult) -> Scatter:
    """Configs as points of the objectives and of all figures that vary."""
    names = _plotted(result)
    axes = [Axis(name, _label(name), short_name(name), better(name)) for name in names]
    points = [
        Point(_settings_text(outcome), outcome.figures, is_best, index == result.best)
        for index, (outcome, is_best) in enumerate(zip(result.outcomes, result.is_on_front, strict=True))
    ]
    return Scatter(axes, points, "" if result.best is None else "cheapest that meets the goals")


def sweep_notes(result: SweepResult) -> Iterator[str]:
    """Warnings of the table."""
    unit = _unit_of_times(metrics_shown(result))
    if unit:
        yield f"times in {unit}"
    if result.objectives:
        front = f"* is on the Pareto front of {_objectives_text(result)}"
        yield f"{front}: no other config is as good in all of them and better in one"
    for outcome in result.outcomes:
        if outcome.refusal:
            yield f"{_settings_text(outcome)} is invalid: {outcome.refusal}"
    yield from _extrapolation_notes(result)


def verdict(result: SweepResult) -> str:
    """Sentence about the cheapest config that meets the goals; empty without goals."""
    if not result.goals_ms:
        return ""
    what = ", ".join(f"{name} of {limit:g} ms" for name, limit in result.goals_ms.items())
    if result.best is None:
        return f"no config meets {what} for {result.percent:g} % of the requests"
    best = result.outcomes[result.best]
    share = 100 * (best.good_share or 0.0)
    return f"cheapest that meets {what}: {_settings_text(best)} ({share:.6g} % of the requests meet it)"


def facts(result: SweepResult) -> dict[str, Any]:
    """Result as an object."""
    return {
        "version": VERSION,
        "name": result.name,
        "common": dict(result.common),
        "objectives": [{"name": each, "better": better(each)} for each in result.objectives],
        "goals_ms": dict(result.goals_ms),
        "slo_percent": result.percent if result.goals_ms else None,
        "cheapest": None if result.best is None else result.outcomes[result.best].settings,
        "rows": [
            {
                "set": each.settings,
                "is_on_front": is_best,
                "refusal": each.refusal or None,
                "note": each.note or None,
                "figures": each.figures,
            }
            for each, is_best in zip(result.outcomes, result.is_on_front, strict=True)
        ],
    }


def metrics_shown(result: SweepResult) -> list[str]:
    """Paths of the figures in tables, objectives first."""
    figures = next((outcome.figures for outcome in result.outcomes if outcome.figures), {})
    form = next((form for form in SHORT_FORMS if f"{form}.ttft.p50" in figures), SHORT_FORMS[0])
    times = [f"{form}.{measure}.{kind}" for measure in ("ttft", "tpot") for kind in ("p50", "p99")]
    others = [name for name in (_SPEED[form], *times, *_SHOWN) if name in figures]
    return list(dict.fromkeys((*result.objectives, *others)))


def better(metric: str) -> Literal["more", "less"]:
    """Direction in which a figure is better."""
    return "more" if metric in MORE_IS_BETTER else "less"


def _plotted(result: SweepResult) -> list[str]:
    outcomes = [outcome.figures for outcome in result.outcomes if outcome.figures]
    names = dict.fromkeys(name for figures in outcomes for name in figures)
    varying = (name for name in names if len({figures.get(name) for figures in outcomes}) > 1)
    return list(dict.fromkeys((*result.objectives, *varying)))


def _extrapolation_notes(result: SweepResult) -> Iterator[str]:
    """Warning about configs with steps beyond the measured range."""
    noted = [outcome for outcome in result.outcomes if outcome.note]
    if noted:
        number = "1 config has" if len(noted) == 1 else f"{len(noted):,} configs have"
        yield f"{number} steps beyond the measured range, such as {_settings_text(noted[-1])}: {noted[-1].note}"


def _unit_of_times(names: Sequence[str]) -> str:
    """Unit of the times among some figures; empty: no times."""
    forms = [name.split(".")[0] for name in names]
    return "ms" if SHORT_FORMS[0] in forms else "ticks" if SHORT_FORMS[1] in forms else ""


def _objectives_text(result: SweepResult) -> str:
    return " and ".join(map(short_name, result.objectives))


def _settings_text(outcome: SweepOutcome) -> str:
    """Settings of the grid as text."""
    return ", ".join(f"{name}={value}" for name, value in outcome.settings.items())


def _label(name: str) -> str:
    """Name with its unit of time; the whole path if the short name is ambiguous."""
    if name.startswith("latency_ticks."):
        return f"{short_name(name)}, ticks"
    return f"{short_name(name)}, ms" if name.startswith("latency_ms.") else name


def _grid_text(result: SweepResult) -> str:
    axes = {name: len({outcome.settings[name] for outcome in result.outcomes}) for name in result.outcomes[0].settings}
    grid = ", ".join(f"{count} of {name}" for name, count in axes.items())
    return f"{len(result.outcomes):,} configs ({grid}), each replayed on the serving scheduler."


def _common(result: SweepResult) -> Table:
    return Table("Settings", (*words("setting"), *numbers("value")), list(result.common.items()), id="common")


def _tiles(result: SweepResult) -> Iterator[Tile]:
    works = [outcome for outcome in result.outcomes if outcome.figures]
    refused = len(result.outcomes) - len(works)
    yield Tile("Configs", f"{len(result.outcomes):,}", f"{refused:,} invalid" if refused else "all valid")
    yield Tile("Pareto front", f"{sum(result.is_on_front):,}", _objectives_text(result))
    for name in result.objectives:
        having = [outcome for outcome in works if name in outcome.figures]
        if having:
            best = min(having, key=lambda outcome: as_less_is_better(outcome.figures, name))
            title = "Most" if better(name) == "more" else "Least"
            value = format_number(best.figures[name], Style.SHORT)
            yield Tile(f"{title} {_label(name)}", value, _settings_text(best))
    if result.goals_ms:
        meeting = sum((outcome.good_share or 0.0) >= result.percent / 100 for outcome in works)
        yield Tile("Meet the goals", f"{meeting:,}", f"for {result.percent:g} % of the requests")
