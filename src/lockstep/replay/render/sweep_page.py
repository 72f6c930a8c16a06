"""A sweep as one page: its configs as points of any two figures, and in a table that sorts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.replay.metrics import as_less_is_better, short_name
from lockstep.replay.render.document import rendered
from lockstep.replay.render.figures import Figure, printable, short_text
from lockstep.replay.render.sweep import (
    Swept,
    better,
    extrapolation_notes,
    metrics_shown,
    objectives_text,
    settings_text,
    unit_of_times,
    verdict,
)
from lockstep.replay.render.tiles import Tile, tiles_by
from lockstep.replay.sweep import Outcome


def sweep_page(swept: Swept) -> str:
    """The page; the same sweep gives the same."""
    names = metrics_shown(swept)
    metrics = _plotted(swept)
    axes = [*swept.objectives, *metrics][:2]
    tiles = list(_tiles(swept))
    settings, said = list(swept.outcomes[0].settings), verdict(swept)
    page = {
        "title": f"Sweep of {printable(swept.name)}",
        "lead": _lead(swept),
        "verdict": printable(said[:1].upper() + said[1:]),
        "notes": list(extrapolation_notes(swept)),
        "tiles": tiles,
        "tiles_by": tiles_by(len(tiles)),
        "metrics": [{"name": name, "label": _label(name)} for name in metrics],
        "x": axes[0] if axes else "",
        "y": axes[-1] if axes else "",
        "objectives": objectives_text(swept) or "nothing",
        "has_cheapest": swept.best is not None,
        "unit": unit_of_times(names),
        "columns": [
            *({"label": name, "is_word": True} for name in settings),
            *({"label": short_name(name), "is_word": False} for name in names),
        ],
        "rows": list(_rows(swept, names)),
        "settings": [Figure(name, value) for name, value in swept.common.items()],
    }
    data = {
        "metrics": {name: {"label": _label(name), "better": better(name)} for name in metrics},
        "rows": [
            {
                "label": printable(settings_text(outcome)),
                "is_cheapest": index == swept.best,
                "figures": {name: outcome.figures[name] for name in metrics if name in outcome.figures},
            }
            for index, outcome in enumerate(swept.outcomes)
        ],
    }
    return rendered("sweep.html.jinja", page, data, ["sweep.js"], has_plots=False)


def _plotted(swept: Swept) -> list[str]:
    """Figures that the plot may show: objectives, and all that are not the same everywhere."""
    outcomes = [outcome.figures for outcome in swept.outcomes if outcome.figures]
    names = dict.fromkeys(name for figures in outcomes for name in figures)
    varying = (name for name in names if len({figures.get(name) for figures in outcomes}) > 1)
    return list(dict.fromkeys((*swept.objectives, *varying)))


def _label(name: str) -> str:
    """With the unit of a time, and the whole path where the short name is that of two."""
    if name.startswith("latency_ticks."):
        return f"{short_name(name)}, ticks"
    return f"{short_name(name)}, ms" if name.startswith("latency_ms.") else name


def _lead(swept: Swept) -> str:
    axes = {name: len({outcome.settings[name] for outcome in swept.outcomes}) for name in swept.outcomes[0].settings}
    grid = ", ".join(f"{count} of {name}" for name, count in axes.items())
    return f"{len(swept.outcomes):,} configs ({grid}), each replayed on the real scheduler."


def _tiles(swept: Swept) -> Iterator[Tile]:
    works = [outcome for outcome in swept.outcomes if outcome.figures]
    refused = len(swept.outcomes) - len(works)
    yield Tile("Configs", f"{len(swept.outcomes):,}", f"{refused:,} cannot work" if refused else "all work")
    yield Tile("Pareto front", f"{sum(swept.is_on_front):,}", objectives_text(swept))
    for name in swept.objectives:
        having = [outcome for outcome in works if name in outcome.figures]
        if having:
            best = min(having, key=lambda outcome: as_less_is_better(outcome.figures, name))
            title = "Most" if better(name) == "more" else "Least"
            yield Tile(f"{title} {_label(name)}", short_text(best.figures[name]), settings_text(best))
    if swept.goals_ms:
        meeting = sum((outcome.good_share or 0.0) >= swept.percent / 100 for outcome in works)
        yield Tile("Meet the goals", f"{meeting:,}", f"for {swept.percent:g} % of the requests")


def _rows(swept: Swept, names: list[str]) -> Iterator[dict[str, Any]]:
    for index, (outcome, is_best) in enumerate(zip(swept.outcomes, swept.is_on_front, strict=True)):
        shown = [] if outcome.refusal else [_cell(outcome, name) for name in names]
        yield {
            "cells": [
                *({"text": value, "value": value, "is_word": True} for value in outcome.settings.values()),
                *shown,
            ],
            "refusal": printable(outcome.refusal),
            "num_absent": len(names) or 1,
            "is_on_front": is_best,
            "is_cheapest": index == swept.best,
        }


def _cell(outcome: Outcome, name: str) -> dict[str, Any]:
    value = outcome.figures.get(name)
    text = "" if value is None else short_text(value)
    return {"text": text, "value": "" if value is None else value, "is_word": False}
