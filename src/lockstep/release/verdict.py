"""Verdict of a gate as values: a decision, the signals behind it, figures, accounts and triage; JSON with stable bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

SCHEMA = "lockstep-verdict-1"
DIGITS = 6
"""Significant digits of figures: more would be those of the machine's mathematics library."""


class Decision(StrEnum):
    """What to do with the candidate."""

    PROMOTE = "promote"
    HOLD = "hold"
    ROLLBACK = "rollback"

    @property
    def exit_code(self) -> int:
        """Of the commands that judge."""
        return {Decision.PROMOTE: 0, Decision.ROLLBACK: 1, Decision.HOLD: 2}[self]


EXIT_BAD_INPUT = 3
"""Of the gate's commands when there is no verdict, whatever went wrong."""


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is outside policy."""

    name: str
    response: Decision
    segment: str
    """``all``: of all pairs together."""
    sentence: str
    value: float | None = None
    bound: float | None = None
    examples: tuple[str, ...] = ()
    """Ids of requests that show it, the first in order."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One number of both sides."""

    baseline: float | None
    candidate: float | None
    difference: float | None = None
    ratio: float | None = None
    lower: float | None = None
    """Bounds of the mean ratio or difference, in sequential mode."""
    upper: float | None = None
    pairs: int = 0


class SegmentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one segment, or of all."""

    name: str
    pairs: int
    healthy: int
    same: int
    differing: int
    tolerated: int
    incomparable: int
    figures: dict[str, Figures]


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to look after."""

    signal: str
    severity: str
    segment: str
    evidence: str
    response: str
    owner: str
    action: str
    cause: str = ""
    """Most likely cause in a word; empty: nothing tells."""
    examples: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gate says."""

    decision: Decision
    guarantee: str
    """Which error rates hold; none in threshold mode."""
    reason: str
    """The deciding signal in a sentence."""
    evidence: str
    """What kind of evidence decided: equality, decisions, agreement or latency."""
    signals: tuple[Signal, ...]
    notes: tuple[str, ...]
    summary: SegmentSummary
    segments: tuple[SegmentSummary, ...]
    coverage: dict[str, float | None]
    first_mismatch: dict[str, Any] | None
    transitions: tuple[str, ...]
    """Model versions of both sides, where they differ."""
    sides: dict[str, dict[str, tuple[str, ...]]]
    """Models, versions, routes, schedulers, ... of each side."""
    joining: dict[str, Any]
    triage: tuple[Triage, ...]
    policy: dict[str, Any]
    inputs: tuple[dict[str, Any], ...]
    digests: dict[str, str]
    decisions: dict[str, Any] | None = None
    """Of two recordings: where they decide differently, and what the candidate's settings would do."""
    tool: str = ""
    schema: str = SCHEMA


def to_json(verdict: Verdict) -> bytes:
    """The verdict as a file: the same evidence gives the same bytes."""
    plain = msgspec.to_builtins(verdict)
    return msgspec.json.format(msgspec.json.encode(rounded(plain), order="sorted"), indent=2) + b"\n"


def rounded(value: Any) -> Any:
    """A value whose numbers have `DIGITS` digits; what is no number is None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value
