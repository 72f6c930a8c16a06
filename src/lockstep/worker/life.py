"""The life of a supervised worker: an enum, a table, and the one method that moves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class WorkerState(Enum):
    """Whether there is somebody to talk to."""

    NEW = auto()
    UP = auto()
    """Running; whether a replica is loaded is another question."""
    LOST = auto()
    """It ended, and the next one is not there yet."""
    CLOSED = auto()


MOVES = {
    WorkerState.NEW: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.UP: (WorkerState.LOST, WorkerState.CLOSED),
    WorkerState.LOST: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.CLOSED: (),
}


@dataclass(frozen=True, slots=True)
class Lost:
    """Notice that the worker ended, with its sessions and all that it had loaded; the next one is on its way."""

    reason: str
    """What it ended with."""


class Life:
    """Where a worker is in its life."""

    def __init__(self) -> None:
        self.state = WorkerState.NEW

    def move_to(self, state: WorkerState) -> None:
        """A move that the table does not have is a programming error."""
        assert state in MOVES[self.state], f"a worker does not go from {self.state.name} to {state.name}"
        self.state = state
