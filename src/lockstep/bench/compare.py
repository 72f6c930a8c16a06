"""Comparison of two bench results: shows which metrics changed beyond their noise. All is pure except reading files.

A result is the JSON of a `lockstep bench` with named metrics: ``{"figures": {NAME: {"values": [...], "better": "more"
or "less"}}}``, with one value per round. From the flat results of `bench serve` and `bench throughput`, rates and
latencies are read, with one value each.
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
"""Minimum number of values per side from which noise can be estimated."""
MIN_CHANGE = 0.03
"""Minimum relative change that is reported as better or worse."""
MACHINE = "machine "
"""Prefix of metrics whose work is the same in every version. If they changed, the machine's speed did."""

Verdict = Literal["better", "worse", "same", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Metric of a result."""

    values: tuple[float, ...]
    """One value per round."""
    is_more_better: bool
    """True if larger values are better."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Change:
    """Metric of two results."""

    name: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float | None:
        """Median after divided by the median before; None if the latter is 0."""
        return self.after.median / self.before.median if self.before.median else None

    @property
    def verdict(self) -> Verdict:
        """Verdict on the change: better or worse if the rounds do not overlap and the medians differ by at least 3 %.

        Without a real change, this happens to one metric in 126 with five rounds per side, and to one in 10 with three.
        """
        before, after = self.before.values, self.after.values
        if min(len(before), len(after)) < MIN_ROUNDS:
            return "unknown"
        is_apart = min(after) > max(before) or max(after) < min(before)
        if not is_apart or self.ratio is None or abs(self.ratio - 1) < MIN_CHANGE:
            return "same"
        return "better" if (self.ratio > 1) == self.before.is_more_better else "worse"


def read_figures(path: Path) -> dict[str, Figure]:
    """Metrics of a result file by name; UsageError if it is not a result."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a result of `lockstep bench` ({error})") from None
    figures = figures_of(content) if isinstance(content, dict) else {}
    if not figures:
        raise UsageError(f"{path} has no metrics; write a result with --result-filename of a `lockstep bench`")
    return figures


def figures_of(content: Mapping[str, Any]) -> dict[str, Figure]:
    """Metrics of a result by name, in its order."""
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
    """Changes of the metrics that both results have, in the order of the first; UsageError if there are none."""
    common = [Change(name, before[name], after[name]) for name in before if name in after]
    if not common:
        raise UsageError(f"the results have no metric in common: {_few(before)} and {_few(after)}")
    return common


def _few(figures: Mapping[str, Figure]) -> str:
    return ", ".join(list(figures)[:3])


def text_of(found: Sequence[Change]) -> str:
    """Table of all metrics with marks for changed ones, the counts, and warnings about the comparison."""
    table = Table("", (*words("metric"), *numbers("before", "after", "change"), *words("")))
    for change in found:
        ratio = change.ratio
        mark = {"better": "BETTER", "worse": "WORSE", "same": "", "unknown": "noise unknown"}[change.verdict]
        shown = "-" if ratio is None else signed_percent(ratio - 1, ".1f")
        table.rows.append((change.name, f"{change.before.median:.4g}", f"{change.after.median:.4g}", shown, mark))
    counts = {verdict: sum(change.verdict == verdict for change in found) for verdict in ("better", "worse", "unknown")}
    lines = [to_lines(table), f"\n{counts['better']} better, {counts['worse']} worse, of {len(found)} metrics"]
    if any(change.name.startswith(MACHINE) and change.verdict in ("better", "worse") for change in found):
        lines.append("The speed of the machine changed, which may be the cause of other changes.")
    if counts["unknown"]:
        lines.append(f"Noise needs {MIN_ROUNDS} rounds on each side; {counts['unknown']} metrics have fewer.")
    return "\n".join(lines)


def as_json(found: Sequence[Change]) -> list[dict[str, Any]]:
    """Changes in the form of the JSON output."""
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
