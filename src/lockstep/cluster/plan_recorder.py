"""Recording of plans: the planner's input and its decision, for each plan.

The files have the format of a device's recording (`lockstep.worker.flight.entries`), with a `PlanEntry` for each plan
between header and end. The same planner makes the same actions from the same input. Replicas have the same names as in
the cluster. The files contain no prompts and no callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

from lockstep.cluster.planner import Action, Observed, PlanPolicy
from lockstep.system import SYSTEM, System
from lockstep.worker.flight.entries import EntryStruct
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.writer import RecordingWriter

PLAN_SUFFIX = ".lsplans"
SHARE = 16
"""Size limit of plan recordings, in addition to the device's: one part in this many of its limit."""

ActionFields = tuple[str | None, ...]
"""Name of an action, and its fields."""


class PlanEntry(EntryStruct, frozen=True, tag=32):
    """One plan of the planner, with its input."""

    now_s: float
    policy: PlanPolicy
    observed: Observed
    actions: tuple[ActionFields, ...]


def action_fields(action: Action) -> ActionFields:
    """Recorded form of an action."""
    return (type(action).__name__.lower(), *astuple(action))


class PlanRecorder:
    """Records every plan. A thread writes the files; a write error is logged once, and plans never wait for it."""

    def __init__(self, options: TraceOptions, system: System = SYSTEM) -> None:
        self._writer = RecordingWriter(options.share(SHARE), PLAN_SUFFIX, system=system)

    def planned(self, observed: Observed, now_s: float, policy: PlanPolicy, actions: Sequence[Action]) -> None:
        """Record a plan."""
        entry, writer = PlanEntry(now_s, policy, observed, tuple(map(action_fields, actions))), self._writer
        if writer.files.wants_file():
            writer.end(goes_on=True)
            writer.begin(lambda: writer.chunk.put(entry))
        elif writer.files.is_open:
            writer.chunk.put(entry)
            writer.flush()

    @property
    def fault(self) -> str:
        """Reason why nothing is being recorded now; empty: it is."""
        return self._writer.files.report().fault

    def close(self) -> None:
        """Write the queued entries, within a limited time."""
        self._writer.close()
