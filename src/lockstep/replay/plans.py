"""The planner's recorded decisions, made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.cluster.plan_recorder import PLAN_SCHEMA_VERSION, PLAN_SUFFIX, ActionFields, PlanHeader, PlanRecord
from lockstep.cluster.plan_recorder import action_fields as action_fields
from lockstep.cluster.planner import Action, Observed, PlanPolicy, plan
from lockstep.errors import TraceError
from lockstep.replay.line_files import lines_of, part_of
from lockstep.replay.trace_integrity import Finding, are_in_order, arranged, is_whole

Planner = Callable[[Observed, float, PlanPolicy], Sequence[Action]]


class PlanDivergence(NamedTuple):
    """The first plan that came out otherwise."""

    path: Path
    number: int
    """Of the plan in its file, from 1."""
    now_s: float
    recorded: tuple[ActionFields, ...]
    computed: tuple[ActionFields, ...]

    def __str__(self) -> str:
        def shown(actions: tuple[ActionFields, ...]) -> str:
            return "; ".join(" ".join(str(field) for field in action) for action in actions) or "nothing"

        return (
            f"{self.path}: plan {self.number}, at {self.now_s:.3f} s: "
            f"recorded {shown(self.recorded)}, computed {shown(self.computed)}"
        )


class PlansVerdict(NamedTuple):
    """Result of making recorded plans again."""

    num_plans: int
    """That were compared, the divergent one included."""
    divergence: PlanDivergence | None
    findings: tuple[Finding, ...] = ()
    """What of the files is not there, or not where it belongs."""

    def is_in_order(self, allows_gaps: bool) -> bool:
        """True if every plan came out as recorded, and none is missing; see `trace_integrity.are_in_order`."""
        return self.divergence is None and are_in_order(self.findings, allows_gaps)


def plan_files(path: Path) -> tuple[Path, ...]:
    """The recordings of plans in a directory, in order; a file that is one is itself, and others are none."""
    if path.is_dir():
        return tuple(sorted(path.glob(f"*{PLAN_SUFFIX}")))
    return (path,) if path.suffix == PLAN_SUFFIX else ()


def verify_plans(paths: Sequence[Path], planner: Planner = plan) -> PlansVerdict:
    """Make every recorded plan again, up to the first that comes out otherwise.

    Raises:
        TraceError: a file is damaged, of a newer version, or no recording of plans.
    """
    parts, findings = arranged(
        [part_of(path, PlanHeader, PLAN_SCHEMA_VERSION, "plans") for path in paths], is_alone=len(paths) == 1
    )
    if not parts:
        raise TraceError(f"{paths[0]}: it is no recording of plans, or was cut in its first moment")
    num_plans = 0
    for part in parts:
        for number, record in enumerate(_entries(part.path), 1):
            num_plans += 1
            made = planner(record.observed, record.now_s, record.policy)
            computed = tuple(map(action_fields, made))
            if computed != record.actions:
                divergence = PlanDivergence(part.path, number, record.now_s, record.actions, computed)
                return PlansVerdict(num_plans, divergence, findings)
    return PlansVerdict(num_plans, None, findings)


def describe(verdict: PlansVerdict) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    is_same = "identical" if verdict.divergence is None else "not identical"
    rest = "" if is_whole(verdict.findings) else ", but the files are not as they were recorded"
    yield f"planner: {verdict.num_plans:,} plans, {is_same}{rest}"
    yield from map(str, verdict.findings)
    if verdict.divergence is not None:
        yield str(verdict.divergence)


def facts(verdict: PlansVerdict) -> dict[str, Any]:
    """The verdict as an object."""
    divergence = verdict.divergence
    return {
        "identical": divergence is None,
        "plans": verdict.num_plans,
        "whole": is_whole(verdict.findings),
        "findings": [finding.facts() for finding in verdict.findings],
        "parted": None
        if divergence is None
        else {
            "file": divergence.path.name,
            "plan": divergence.number,
            "now_s": divergence.now_s,
            "recorded": divergence.recorded,
            "decided": divergence.computed,
        },
    }


def _entries(path: Path) -> Iterator[PlanRecord]:
    """Every plan of a file."""
    decode = msgspec.json.Decoder(PlanRecord).decode
    for line in lines_of(path):
        if line is not None and line.number > 1:
            yield line.decoded(decode, "plan")
