"""Report of a comparison: computes the ratios of each round, and writes JSON and tables."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.comparison.rounds import OURS, OWN_NAMES, ROUTER, Comparison
from benchmarks.comparison.routed import ollama_lines
from benchmarks.comparison.workloads import FIGURES
from lockstep.executors.machine import machine_name
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines

COMPARED = ("output_throughput", "decode_throughput", "ttft_ms", "ttft_p99_ms", "request_ms")
"""Figures with ratios."""
SERVED = {"engine": (("served ", OURS["server"]),)}
"""Additional ratios for engines: our server against other engines, since users run our server."""


def ratios(comparison: Comparison, work: str, peer: str, figure: str, own: str | None = None) -> list[float]:
    """Ratios of each round in which both have the figure; above 1: Lockstep is better.

    Args:
        own: name of our backend; None: that of the peer's kind.
    """
    names = (OURS[comparison.backends[peer]["kind"]], ROUTER) if own is None else (own,)
    ours = next((comparison.seen[work, name] for name in names if (work, name) in comparison.seen), {})
    more = FIGURES[figure][1]
    found: list[float] = []
    for number, theirs in comparison.seen.get((work, peer), {}).items():
        mine = ours.get(number, {})
        if mine.get(figure) and theirs.get(figure):
            found.append(mine[figure] / theirs[figure] if more else theirs[figure] / mine[figure])
    return found


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Whole comparison as an object; `lockstep bench compare` reads its ``figures``."""
    values: dict[str, Any] = {}
    better: dict[str, Any] = {}
    for (work, name), rounds in comparison.seen.items():
        for figure, (_, more) in FIGURES.items():
            seen = [found[figure] for found in rounds.values() if figure in found]
            if seen:
                key = f"{work} {name} {figure}"
                values[key] = {"values": seen, "better": "more" if more else "less"}
            for prefix, own in (("", None), *SERVED.get(comparison.backends[name]["kind"], ())):
                found = [] if name in OWN_NAMES else ratios(comparison, work, name, figure, own)
                if found:
                    spread = {"median": statistics.median(found), "least": min(found), "greatest": max(found)}
                    better[f"{work} {name} {prefix}{figure}"] = spread
    return {
        "kind": "peers",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "machine": machine_name(),
        "command": shlex.join(["lockstep", *sys.argv[1:]]),
        "options": asdict(comparison.options),
        "duration_s": round(comparison.duration_s, 1),
        "ended_by": comparison.ended_by,
        "not_measured": _not_measured(comparison),
        "backends": comparison.backends,
        "out": comparison.out,
        "figures": values,
        "times_better": better,
    }


def text_of(comparison: Comparison) -> str:
    """Tables by kind of workload: medians of each backend, ratios, and the number of rounds."""
    of_kind: dict[str, list[str]] = {}
    for work in comparison.options.workloads:
        if any(name == work.name for name, _ in comparison.seen):
            of_kind.setdefault(work.kind, []).append(work.name)
    duration = f"{comparison.duration_s:.0f} s" + (f", ended by {comparison.ended_by}" if comparison.ended_by else "")
    lines = [
        f"{Path(comparison.options.model).name} on {machine_name()}, {duration}",
        "; ".join(dict.fromkeys(each["version"] for each in comparison.backends.values())),
        *(f"{to_lines(_table(comparison, workloads))}\n" for workloads in of_kind.values()),
        "x: times that ours of the same kind was better (served x: our server), median of rounds (least to greatest)",
    ]
    if missing := _not_measured(comparison):
        lines.append(f"not measured: {', '.join(missing)}")
    lines += [f"without {name}: {reason}" for name, reason in comparison.out.items()]
    ways = {name: _ways(each["ways"]) for name, each in comparison.backends.items()}
    lines += [f"{name}: {way}" for name, way in ways.items() if way]
    return "\n".join([*lines, *(ollama_lines(comparison.options.model) if comparison.options.routed else [])])


def _table(comparison: Comparison, workloads: Sequence[str]) -> Table:
    """Table of some workloads, with the columns that any of them has."""
    seen = {key: rounds for key, rounds in comparison.seen.items() if key[0] in workloads}
    known = {figure for rounds in seen.values() for found in rounds.values() for figure in found}
    columns = [figure for figure in FIGURES if figure in known]
    has_peers = any(name not in OWN_NAMES for _, name in seen)
    shown = [figure for figure in COMPARED if figure in known and has_peers]
    titles = [*(FIGURES[figure][0] for figure in columns), "rounds"]
    names = list(comparison.backends)
    compared: list[tuple[str, str, str | None]] = [(f"x {FIGURES[figure][0]}", figure, None) for figure in shown]
    if has_peers and any(comparison.backends[name]["kind"] == "engine" for _, name in seen) and OURS["server"] in names:
        compared.append(("served x output tok/s", "output_throughput", OURS["server"]))
    titled = words(*(title for title, _, _ in compared))
    table = Table("", (*words("work", "backend"), *numbers(*titles), *titled))
    for (work, name), rounds in sorted(
        seen.items(), key=lambda each: (workloads.index(each[0][0]), names.index(each[0][1]))
    ):
        cells = [_median([found[figure] for found in rounds.values() if figure in found]) for figure in columns]
        own = name in OWN_NAMES
        is_server = comparison.backends[name]["kind"] == "server"
        spreads = [
            "" if own or (is_server and ours) else _spread(ratios(comparison, work, name, figure, ours))
            for _, figure, ours in compared
        ]
        table.rows.append((work, name, *cells, str(len(rounds)), *spreads))
    return table


def _not_measured(comparison: Comparison) -> list[str]:
    seen = {work for work, _ in comparison.seen}
    return [
        work.name for work in (*comparison.options.workloads, *comparison.options.left_out) if work.name not in seen
    ]


def _median(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{middle:,.{1 if middle < 100 else 0}f}"


def _spread(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-"


def _ways(ways: Mapping[str, str]) -> str:
    """Ways of a backend that were chosen from several."""
    chosen = {title: way for title, way in ways.items() if way and way != "defaults"}
    if len(set(chosen.values())) == 1:
        return next(iter(chosen.values()))
    return "; ".join(f"{title}: {way}" for title, way in chosen.items())
