"""Verification of recorded plans: runs the cluster's planner again on its recorded inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.cluster.plan_recorder import PLAN_SUFFIX, ActionFields, PlanEntry, action_fields
from lockstep.cluster.planner import Action, Observed, PlanPolicy, plan
from lockstep.replay.trace import read_entries, read_parts
from lockstep.replay.trace_integrity import Part
from lockstep.replay.verify_report import Verification, verification_of
from lockstep.worker.flight.chunks import EntryDecoder
from lockstep.worker.flight.entries import End, Header

Planner = Callable[[Observed, float, PlanPolicy], Sequence[Action]]
PLANS: EntryDecoder[Header | End | PlanEntry] = msgspec.msgpack.Decoder(list[Header | End | PlanEntry])
"""Decoder of a recording of the planner's plans."""


class PlanDivergence(NamedTuple):
    """First plan that differs from the recorded one."""

    path: Path
    number: int
    """Number of the plan in its file, from 1."""
    now_s: float
    recorded: tuple[ActionFields, ...]
    decided: tuple[ActionFields, ...]

    def lines(self) -> Iterator[str]:
        """The divergence as text."""
        recorded, decided = (
            "; ".join(" ".join(map(str, action)) for action in actions) or "nothing"
            for actions in (self.recorded, self.decided)
        )
        yield (f"{self.path}: plan {self.number}, at {self.now_s:.3f} s: recorded {recorded}, computed {decided}")

    def facts(self) -> dict[str, Any]:
        """The divergence as an object."""
        return {
            "file": self.path.name,
            "plan": self.number,
            "now_s": self.now_s,
            "recorded": self.recorded,
            "decided": self.decided,
        }


def verify_plans(path: Path, planner: Planner = plan) -> Verification[PlanDivergence]:
    """Compute every recorded plan of a directory or a file again, up to the first difference.

    Raises:
        TraceError: a file is damaged, has another schema, or is not a recording of plans.
    """
    parts, findings = read_parts(path, PLAN_SUFFIX, PLANS)
    return verification_of("planner", "plans", _compared(parts, planner), findings)


def _compared(parts: Iterable[Part], planner: Planner) -> Iterator[PlanDivergence | None]:
    """Divergence of each plan; None: equal."""
    for part in parts:
        plans = (entry for entry in read_entries(part.path, PLANS) if isinstance(entry, PlanEntry))
        for number, entry in enumerate(plans, 1):
            decided = tuple(map(action_fields, planner(entry.observed, entry.now_s, entry.policy)))
            is_same = decided == entry.actions
            yield None if is_same else PlanDivergence(part.path, number, entry.now_s, entry.actions, decided)
