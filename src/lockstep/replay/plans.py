"""The planner's recorded decisions, made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.cluster.plan import Action, Observed, PlanPolicy
from lockstep.cluster.plan_flight import PLAN_SCHEMA_VERSION, PLAN_SUFFIX, ActionFields, PlanHeader, PlanRecord
from lockstep.cluster.plan_flight import action_fields as action_fields
from lockstep.cluster.planner import plan
from lockstep.errors import TraceError
from lockstep.replay.trace_file import read_frames

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
    """What came of it."""

    num_plans: int
    """That were compared, the divergent one included."""
    divergence: PlanDivergence | None
    is_cut: bool
    """Whether a file ends in the middle of something, as after a kill."""


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
    num_plans, is_cut = 0, False
    for path in paths:
        number = 0
        for record in _records(path):
            if record is None:
                is_cut = True
                continue
            number += 1
            num_plans += 1
            made = planner(record.observed, record.now_s, record.policy)
            computed = tuple(map(action_fields, made))
            if computed != record.actions:
                return PlansVerdict(
                    num_plans, PlanDivergence(path, number, record.now_s, record.actions, computed), is_cut
                )
    return PlansVerdict(num_plans, None, is_cut)


def describe(verdict: PlansVerdict) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    is_same = "identical" if verdict.divergence is None else "not identical"
    yield f"planner: {verdict.num_plans:,} plans, {is_same}"
    if verdict.is_cut:
        yield "a recording of plans breaks off in the middle of one, which is left out"
    if verdict.divergence is not None:
        yield str(verdict.divergence)


def facts(verdict: PlansVerdict) -> dict[str, Any]:
    """The same as an object."""
    divergence = verdict.divergence
    return {
        "identical": divergence is None,
        "plans": verdict.num_plans,
        "is_cut": verdict.is_cut,
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


def _records(path: Path) -> Iterator[PlanRecord | None]:
    """Every plan of a file; None: it is cut here."""
    decode = msgspec.json.Decoder(PlanRecord).decode
    has_header = False
    for frame in read_frames(path):
        *lines, rest = frame.data.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                if has_header:
                    yield decode(line)
                else:
                    _check_header(path, line)
                    has_header = True
            except msgspec.MsgspecError as error:
                raise TraceError(
                    f"{path}: line {number} of the frame at byte {frame.offset} is no plan of ours: {error}"
                ) from None
        if rest or not frame.is_whole:
            yield None
    if not has_header:
        raise TraceError(f"{path}: it is no recording of plans, or was cut in its first moment")


def _check_header(path: Path, line: bytes) -> None:
    header = msgspec.json.decode(line, type=PlanHeader)
    if header.schema > PLAN_SCHEMA_VERSION:
        raise TraceError(
            f"{path}: recorded by lockstep {header.lockstep} in version {header.schema} of the format; "
            f"this one reads up to {PLAN_SCHEMA_VERSION}"
        )
