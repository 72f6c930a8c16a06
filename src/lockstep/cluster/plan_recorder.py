"""Recording of the planner's decisions: what it saw and what it decided, each plan by itself.

A file is a sequence of zstd frames with checksums, as those of the device (worker/flight/entries.py), and has lines of
JSON: a `PlanHeader`, then a `PlanRecord` for each plan, each with its mark (`lockstep.cluster.marked_lines`). Whoever
has the same planner gets the same actions. Replicas have the names that the cluster gives them; no prompt and no caller
is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import msgspec

from lockstep.cluster.marked_lines import Marker
from lockstep.cluster.planner import Action, Observed, PlanPolicy
from lockstep.version import __version__
from lockstep.worker.flight.files import TraceFiles
from lockstep.worker.flight.options import TraceOptions

PLAN_SCHEMA_VERSION = 2
PLAN_SUFFIX = ".lsplans"
SHARE = 16
"""Plans get one part in so many of the bytes that a recording may take, in addition."""

ActionFields = tuple[str | None, ...]
"""The name of an action and its fields."""


class PlanHeader(msgspec.Struct, frozen=True):
    """Header of a file."""

    schema: int
    lockstep: str
    run: str
    file: int
    gap: str = ""
    """Why plans before it are in no file; empty: it goes on where the file before it ends."""


class PlanRecord(msgspec.Struct, frozen=True):
    """One plan."""

    now_s: float
    policy: PlanPolicy
    observed: Observed
    actions: tuple[ActionFields, ...]


def action_fields(action: Action) -> ActionFields:
    """An action as it is written."""
    return (type(action).__name__.lower(), *astuple(action))


class PlanRecorder:
    """Writes every plan, in a thread of its files; what cannot be written is logged once, and nothing waits for it."""

    def __init__(self, options: TraceOptions) -> None:
        share = msgspec.structs.replace(options, max_bytes=options.max_bytes // SHARE)
        self._files = TraceFiles(share, PLAN_SUFFIX)
        self._encode = msgspec.json.Encoder().encode
        self._marker = Marker()

    def planned(self, observed: Observed, now_s: float, policy: PlanPolicy, actions: Sequence[Action]) -> None:
        """Record a plan."""
        line = self._encode(PlanRecord(now_s, policy, observed, tuple(map(action_fields, actions)))) + b"\n"
        files = self._files
        if files.wants_file():
            header = PlanHeader(PLAN_SCHEMA_VERSION, __version__, files.run, files.num_files + 1, files.gap)
            self._marker = Marker()
            files.begin(self._marker.marked(self._encode(header) + b"\n" + line))
        elif files.is_open:
            files.put(self._marker.marked(line))

    @property
    def fault(self) -> str:
        """Reason why nothing is being recorded now; empty: it is."""
        return self._files.report().fault

    def close(self) -> None:
        """Write what is left, within a bounded time."""
        self._files.close()
