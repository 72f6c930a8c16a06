"""When requests arrive: counted from the first, spread, hurried and cut as asked. Whole numbers throughout."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

from lockstep.errors import TraceError, UsageError
from lockstep.replay.workload import WorkloadRequest

MAX_SAME_STAMP = 100_000
"""Requests that share a stamp are held together while they are spread."""
_RANDOM_BITS = 64

Timed = tuple[int, WorkloadRequest]
"""A request with the arrival that it is given."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is made of a file's arrivals."""

    speed: float = 1.0
    """All gaps are divided by it."""
    limit: int | None = None
    """Requests at most, the first ones to arrive; None: all."""
    dequantize_seed: int | None = None
    """Requests that share a stamp are spread uniformly up to the next one, in their order, at random from this seed;
    None: they stay together."""
    engine: int | None = None
    """Of a recording: whose requests, by the engine's number; None: those of the only one."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise UsageError(f"the speed is {self.speed}; it must be above 0 and finite")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"the limit is {self.limit}; at least one request is needed")
        if self.dequantize_seed is not None and self.dequantize_seed < 0:
            raise UsageError(f"the seed is {self.dequantize_seed}; it must not be negative")
        if self.engine is not None and self.engine < 0:
            raise UsageError(f"the engine is {self.engine}; engines are counted from 0")


def shaped(
    requests: Iterable[WorkloadRequest], options: ReadOptions, *, from_first: bool = True
) -> Iterator[WorkloadRequest]:
    """The same requests with the arrivals that the options make of theirs.

    Args:
        requests: in order of arrival.
        from_first: whether times count from the first arrival; else from 0.

    Raises:
        TraceError: one arrives before the one in front of it.
    """
    # As it is written: a tenth, not the binary fraction next to it.
    speed = Fraction(repr(options.speed))
    timed = _in_order(requests)
    if options.dequantize_seed is not None:
        timed = _spread(timed, options.dequantize_seed)
    origin = None if from_first else 0
    for arrival, request in islice(timed, options.limit):
        origin = arrival if origin is None else origin
        given = (arrival - origin) * speed.denominator // speed.numerator
        yield request if given == request.arrival else replace(request, arrival=given)


def _in_order(requests: Iterable[WorkloadRequest]) -> Iterator[Timed]:
    last = 0
    for request in requests:
        if request.arrival < last:
            raise TraceError(f"{request.place}: it arrives before the request above it; sort the trace by time")
        last = request.arrival
        yield last, request


def _spread(timed: Iterable[Timed], seed: int) -> Iterator[Timed]:
    """Uniform between a stamp and the next; the last gap is as long as the one before it."""
    draw = random.Random(seed).getrandbits
    together: list[Timed] = []
    gap = 0

    def apart() -> Iterator[Timed]:
        offsets = sorted([draw(_RANDOM_BITS) * gap >> _RANDOM_BITS for _ in together])
        for (stamp, request), offset in zip(together, offsets, strict=True):
            yield stamp + offset, request

    for arrival, request in timed:
        if together and arrival != together[0][0]:
            gap = arrival - together[0][0]
            yield from apart()
            together.clear()
        if len(together) == MAX_SAME_STAMP:
            raise TraceError(f"{request.place}: over {MAX_SAME_STAMP} requests share a stamp; they cannot be spread")
        together.append((arrival, request))
    yield from apart()
