"""Result of executing a recording: its counts and first difference, and how they are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.replay.verify_report import DivergedError
from lockstep.worker.flight.entries import EngineEntry


@dataclass(slots=True)
class Execution:
    """Result of executing one engine's recording."""

    engine: EngineEntry
    notes: list[str] = field(default_factory=list)
    """Differences between this machine or process and the recorded one."""
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    """Number of equal tokens."""
    num_vectors: int = 0
    """Number of vectors with equal bits."""
    diverged: DivergedError | None = None
    """First difference from the recording; None: none."""
    request: RequestTokens | None = None
    """The only request that is compared; None: all requests are."""


@dataclass(slots=True)
class RequestTokens:
    """One request of an engine: its sequences, and the numbers of its equal tokens and vectors."""

    name: str
    sequences: set[int]
    """Ids of its first sequences, and of their siblings once these were added."""
    open: set[int]
    """Ids of the sequences that have not ended."""
    num_tokens: int = 0
    num_vectors: int = 0


def describe(execution: Execution) -> Iterator[str]:
    """Verdict as lines; the first is a summary."""
    engine, diverged, request = execution.engine, execution.diverged, execution.request
    counted = execution if request is None else request
    num_tokens, num_vectors = counted.num_tokens, counted.num_vectors
    kinds = [f"{num_tokens:,} tokens"] if num_tokens or not num_vectors else []
    kinds += [f"{num_vectors:,} vector{'s' * (num_vectors != 1)}"] if num_vectors else []
    whose = f"{execution.num_requests:,} requests" if request is None else f"request {request.name}"
    what = f"{' and '.join(kinds)} of {whose}"
    begin = f"execute: {what} in {execution.num_steps:,} steps of engine {engine.number} ({engine.name})"
    equal = " and ".join(kind for kind, n in (("token", num_tokens or not num_vectors), ("vector", num_vectors)) if n)
    rest = f", every {equal} equal" if diverged is None else f" are equal, but step {diverged.step} is not"
    yield begin + rest
    yield from execution.notes
    if diverged is not None:
        yield from diverged.lines()


def facts(execution: Execution) -> dict[str, Any]:
    """Verdict as an object."""
    return {
        "engine": execution.engine.number,
        "name": execution.engine.name,
        "identical": execution.diverged is None,
        "tokens": execution.num_tokens,
        "vectors": execution.num_vectors,
        "requests": execution.num_requests,
        "steps": execution.num_steps,
        "notes": execution.notes,
        "parted": None if execution.diverged is None else execution.diverged.facts(),
        **({} if execution.request is None else {"request": _request_facts(execution.request)}),
    }


def _request_facts(request: RequestTokens) -> dict[str, Any]:
    return {
        "id": request.name,
        "sequences": sorted(request.sequences),
        "tokens": request.num_tokens,
        "vectors": request.num_vectors,
        "ended": not request.open,
    }
