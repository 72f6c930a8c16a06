"""What two runs were told differently: the first thing, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from lockstep.replay.explain import called
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, WorkloadRequest
from lockstep.worker.flight.entries import Aborted, Added, CacheReset, Command, Pinned, Swept

_FIELDS = (
    ("num_prompt_tokens", "prompt tokens"),
    ("max_output_tokens", "output tokens at most"),
    ("num_output_tokens", "output tokens"),
    ("priority", "as its class"),
    ("tenant", "as its tenant"),
)


def differing_request(a: Iterable[WorkloadRequest], b: Iterable[WorkloadRequest], unit: ArrivalUnit) -> str:
    """The first request that two workloads of one unit do not share; empty: there is none."""
    for number, (x, y) in enumerate(zip_longest(a, b), 1):
        if x is None or y is None:
            longer, request, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"{longer} has {called(request.name)} as its request {number}, and {shorter} has no more"
        if x.name != y.name:
            return f"their request {number} is another: {called(x.name)} in A, and {called(y.name)} in B"
        told = [
            f"{getattr(x, field)} {words} in A, and {getattr(y, field)} in B"
            for field, words in _FIELDS
            if getattr(x, field) != getattr(y, field)
        ]
        if x.arrival != y.arrival:
            told.append(f"it arrives at {_time(x.arrival, unit)} in A, and at {_time(y.arrival, unit)} in B")
        if x.contents != y.contents:
            told.append("its prompt has another content")
        if told:
            return f"what is asked differs first in {called(x.name)}: {'; '.join(told)}"
    return ""


def differing_command(a: Iterable[Command], b: Iterable[Command]) -> str:
    """The first command that two recordings of an engine do not share, or have at another step; empty: none."""
    for x, y in zip_longest(a, b):
        if x is not None and y is not None and x != y:
            return f"they were told other things: first A of {_said(x)}, and B of {_said(y)}"
        if x is None or y is None:
            longer, command, shorter = ("A", x, "B") if y is None else ("B", y, "A")
            return f"they were told other things: first {longer} of {_said(command)}, and {shorter} nothing more"
    return ""


def _time(arrival: int, unit: ArrivalUnit) -> str:
    return f"tick {arrival:,}" if unit is ArrivalUnit.TICKS else f"{arrival / PS_PER_MS:,.3f} ms"


def _said(command: Command) -> str:
    at = f"before step {command.step:,}"
    match command:
        case Added():
            most = command.request.max_output_tokens
            output = "as many output tokens as fit" if most is None else f"{most:,} output tokens at most"
            tokens = f"{command.request.num_prompt_tokens:,} prompt tokens and {output}"
            return f"{called(str(command.seq_id))} of {tokens}, class {command.request.priority}, {at}"
        case Aborted():
            return f"the end of {called(str(command.seq_id))} ({command.reason.value}) {at}"
        case Pinned():
            return f"{len(command.contents):,} blocks to keep for a session {at}"
        case Swept():
            return f"{len(command.contents):,} blocks of a session to give up {at}"
        case CacheReset():
            return f"the prefix cache to forget {at}"
