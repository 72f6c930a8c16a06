"""Tables of simulated error rates: formats rates with Clopper and Pearson's bounds, in a Markdown page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.gate_rivals import RIVALS


def upper_bound(events: float, count: float) -> float:
    """Clopper and Pearson's upper bound of a rate at 97.5 %, by bisection of the binomial tail."""
    if events >= count:
        return 1.0
    low, high = events / count, 1.0
    for _ in range(60):
        rate = 0.5 * (low + high)
        low, high = (rate, high) if _log_tail(int(events), int(count), rate) > math.log(0.025) else (low, rate)
    return high


def _log_tail(events: int, count: int, rate: float) -> float:
    """Logarithm of the probability of at most ``events`` events."""
    k = np.arange(events + 1)
    ways = np.array([math.lgamma(count + 1) - math.lgamma(each + 1) - math.lgamma(count - each + 1) for each in k])
    terms = ways + k * math.log(rate) + (count - k) * math.log1p(-rate)
    return float(np.logaddexp.reduce(terms))


def rate_of(found: Mapping[str, float], name: str) -> str:
    """Rate with its upper bound; a dash if it was not computed."""
    if name not in found:
        return "-"
    count = found["canaries"]
    return f"{100 * found[name] / count:.2f} % (<= {100 * upper_bound(found[name], count):.2f} %)"


TABLES: Mapping[str, Mapping[str, str]] = {
    "latency": {
        "rollback, no effect": "rollback at none",
        "rollback at the margin": "rollback at margin",
        "promotion at the margin": "promotion at margin",
        "promotion, no effect": "promotion at none",
    },
    "slow": {
        "rollback, no effect, before": "before: rollback at none",
        "rollback, no effect": "rollback at none",
        "rollback at the margin, before": "before: rollback at margin",
        "rollback at the margin": "rollback at margin",
        "promotion at the margin, before": "before: promotion at margin",
        "promotion at the margin": "promotion at margin",
        "promotion, no effect": "promotion at none",
        "hold, no effect": "hold at none",
    },
    "slow-covered": {
        "rollback, no effect": "rollback at none",
        "rollback at the margin": "rollback at margin",
        "promotion at the margin": "promotion at margin",
        "promotion, no effect": "promotion at none",
        "hold, no effect": "hold at none",
    },
    "tail": {
        "rollback, no effect": "rollback at none",
        "rollback at the bound": "rollback at margin",
        "promotion at the bound": "promotion at margin",
        "promotion, no effect": "promotion at none",
    },
    "rivals": {name: name for name in RIVALS},
    "events": {
        "rollback, no effect": "rollback at none",
        "rollback at the bound": "rollback at margin",
        "promotion at the bound": "promotion at margin",
        "promotion, no effect": "promotion at none",
    },
    "missing": {
        "rollback, no effect": "rollback at none",
        "rollback at the margin": "rollback at margin",
        "promotion at the margin": "promotion at margin",
        "promotion, no effect": "promotion at none",
    },
    "family": {
        "rollback": "rollback at any",
        "promotion": "promotion at any",
        "false discoveries, first look": "false discoveries, first",
        "false discoveries, last look": "false discoveries, last",
        "true discoveries, first look": "discoveries, first",
        "true discoveries, last look": "discoveries, last",
    },
    "power": {
        "rolled back": "rollback at caught",
        "whole decisions": "rollback at caught by whole decisions",
        "median pairs": "pairs",
        **{name: name for name in RIVALS},
    },
    "promotion": {
        "latency alone promotes": "latency",
        "mean pairs": "latency pairs",
        "the whole decision promotes": "whole",
        "mean pairs, whole": "whole pairs",
        "promotes at the last look": "whole at the end",
    },
}
"""Columns of each table, and the sums in them."""


BEFORE: Mapping[str, tuple[int, int, int]] = {
    "slow spells of 200": (45, 46, 6),
    "slow spells of 500": (68, 68, 0),
    "swing of 10 %, period 5,000": (237, 502, 0),
    "long memory, H 0.7": (1, 143, 160),
    "AR(1), 0.999": (182, 282, 0),
    "level of AR(1), 0.999": (219, 449, 233),
    "warm-up of 500, 30 % slower": (1000, 1000, 0),
}
"""Wrong decisions per 1,000 canaries of the gate of commit 4685e02, which had no warm-up window and used a variance of
block means: rollbacks without an effect, rollbacks and promotions at the margin. Streams, seeds and looks are those of
the scenarios with these names."""
BEFORE_CANARIES = 1_000
NUMBERS = frozenset(["pairs", "latency pairs", "whole pairs"])
"""Sums of pairs instead of canaries."""
CORRECT = frozenset(
    [
        *("rollback at caught", "rollback at caught by whole decisions", "promotion at none"),
        *("latency", "whole", "whole at the end"),
        *RIVALS,
    ]
)
"""Correct decisions, whose rates have lower bounds."""


def with_before(scenario: str, found: Mapping[str, float]) -> Mapping[str, float]:
    """Sums of a scenario together with those of the earlier gate."""
    names = ("rollback at none", "rollback at margin", "promotion at margin")
    return {**found, **{f"before: {name}": count for name, count in zip(names, BEFORE.get(scenario, ()), strict=False)}}


def cell(found: Mapping[str, float], name: str, *, is_wanted: bool) -> str:
    """Rate with its bound, or a mean; a dash if it was not computed."""
    if name not in found:
        return "-"
    count = BEFORE_CANARIES if name.startswith("before: ") else found["canaries"]
    mean = found[name] / count
    if name in NUMBERS:
        return f"{mean:,.0f}"
    if "discoveries" in name:
        return f"{100 * mean:.2f} %"
    if is_wanted:
        return f"{100 * mean:.1f} % (>= {100 * (1 - upper_bound(count - found[name], count)):.1f} %)"
    return f"{100 * mean:.2f} % (<= {100 * upper_bound(found[name], count):.2f} %)"


def table(name: str, lines: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Markdown table.

    Args:
        lines: names of scenarios with the sums over their canaries.
    """
    lines = [(scenario, with_before(scenario, found) if name == "slow" else found) for scenario, found in lines]
    columns = {title: key for title, key in TABLES[name].items() if any(key in found for _, found in lines)}
    rows = [["", *columns, "canaries"], ["---", *("---:" for _ in columns), "---:"]]
    for scenario, found in lines:
        is_power = name == "power"
        cells = [
            cell(found, key, is_wanted=key in CORRECT and (is_power or key not in RIVALS)) for key in columns.values()
        ]
        rows.append([scenario, *cells, f"{found['canaries']:,.0f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """Page with the tables between its marks replaced."""
    for name, found in tables.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (begin and end):
            raise SystemExit(f"the page has no marks for the table {name}")
        text = f"{before}{begin}{found}\n{end}{after}"
    return text
