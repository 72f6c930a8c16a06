"""Figures of two results side by side: which of them moved beyond their own noise. Pure but for reading files.

A result is the JSON of any `lockstep bench` that names its figures: ``{"figures": {NAME: {"values": [...], "better":
"more" or "less"}}}``, a value for each round. Of the flat results of `bench serve` and `bench throughput` rates and
latencies are taken, one value each.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import UsageError
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines
from lockstep.shown import signed_percent

MIN_ROUNDS = 3
"""Fewer values on a side do not show their noise."""
MIN_CHANGE = 0.03
"""A smaller change is not worth a line, however sure it is."""
MACHINE = "machine "
"""Figures whose names begin so are of work that is the same in every version: if they moved, the machine did."""

Verdict = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a result, a value for each round."""

    values: tuple[float, ...]
    is_more_better: bool

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    name: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float | None:
        """After by before; None where it was nothing before."""
        return self.after.median / self.before.median if self.before.median else None

    @property
    def verdict(self) -> Verdict:
        """Moved: the rounds of one side all lie beyond those of the other, and the medians are 3 % apart.

        Where nothing changed, that happens to one figure in 126 with five rounds a side, to one in 10 with three.
        """
        before, after = self.before.values, self.after.values
        if min(len(before), len(after)) < MIN_ROUNDS:
            return "unknown"
        is_apart = min(after) > max(before) or max(after) < min(before)
        if not is_apart or self.ratio is None or abs(self.ratio - 1) < MIN_CHANGE:
            return "same"
        return "better" if (self.ratio > 1) == self.before.is_more_better else "worse"


def read_figures(path: Path) -> dict[str, Figure]:
    """Figures of a result file; UsageError where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a result of `lockstep bench` ({error})") from None
    figures = figures_of(content) if isinstance(content, dict) else {}
    if not figures:
        raise UsageError(f"{path} holds no figures; write one by --result-filename of a `lockstep bench`")
    return figures


def figures_of(content: Mapping[str, Any]) -> dict[str, Figure]:
    """Figures by name, in the order of the result."""
    named = content.get("figures")
    if isinstance(named, dict):
        return {
            name: Figure(tuple(map(float, each["values"])), each["better"] == "more")
            for name, each in named.items()
            if each["values"]
        }
    flat = {name: value for name, value in content.items() if isinstance(value, (int, float))}
    return {
        name: Figure((float(value),), name.endswith("_throughput"))
        for name, value in flat.items()
        if name.endswith(("_throughput", "_ms", "_s_per_token"))
    }


def changes(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> list[Change]:
    """Figures that both results have, in the order of the first; UsageError where there are none."""
    common = [Change(name, before[name], after[name]) for name in before if name in after]
    if not common:
        raise UsageError(f"the results have no figure in common: {_few(before)} and {_few(after)}")
    return common


def _few(figures: Mapping[str, Figure]) -> str:
    return ", ".join(list(figures)[:3])


def text_of(found: Sequence[Change]) -> str:
    """All figures, those that moved marked, and what to think of it."""
    table = Table("", (*words("figure"), *numbers("before", "after", "change"), *words("")))
    for change in found:
        ratio = change.ratio
        moved = {"better": "BETTER", "worse": "WORSE", "same": "", "unknown": "noise unknown"}[change.verdict]
        shown = "-" if ratio is None else signed_percent(ratio - 1, ".1f")
        table.rows.append((change.name, f"{change.before.median:.4g}", f"{change.after.median:.4g}", shown, moved))
    counts = {verdict: sum(change.verdict == verdict for change in found) for verdict in ("better", "worse", "unknown")}
    lines = [to_lines(table), f"\n{counts['better']} better, {counts['worse']} worse, of {len(found)} figures"]
    if any(change.name.startswith(MACHINE) and change.verdict in ("better", "worse") for change in found):
        lines.append("The machine itself moved: other changes may be its own.")
    if counts["unknown"]:
        lines.append(f"Noise is known from {MIN_ROUNDS} rounds on each side; {counts['unknown']} figures have fewer.")
    return "\n".join(lines)


def as_json(found: Sequence[Change]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "figure": change.name,
            "before": change.before.median,
            "after": change.after.median,
            "ratio": change.ratio,
            "verdict": change.verdict,
        }
        for change in found
    ]
