"""Latency goals as a command line gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.errors import UsageError


def parse_goals(text: str, option: str, names: Sequence[str]) -> dict[str, float]:
    """``ttft:500,tpot:50`` (or with spaces) as milliseconds by metric.

    Args:
        option: what gave the text, for messages.
        names: metrics that can be goals.

    Raises:
        UsageError: it says what would be right.
    """
    goals: dict[str, float] = {}
    for pair in text.replace(",", " ").split():
        name, _, value = pair.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if name not in names or not 0 <= limit_ms < math.inf:
            raise UsageError(f"{option} has {pair!r}; write ttft:500,tpot:50 with {', '.join(names)} in milliseconds")
        goals[name] = limit_ms
    return goals
