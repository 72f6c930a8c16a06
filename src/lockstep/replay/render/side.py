"""Watchers for pages: collect the timeline of one replay in bounded memory, its preemptions and its first ticks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome, Tick, TickRecorder

MAX_LINES = 500
"""Maximum lines of the table of ticks; larger tables make a page slow."""


class Side:
    """A watcher of a replay; `end` adds its result. A comparison has two."""

    report: Report
    """Report; set by `end`, like the outcomes."""
    outcomes: Sequence[RequestOutcome]

    def __init__(self) -> None:
        self.timeline = TimelineSampler()
        self.recorder = TickRecorder(MAX_LINES)
        self.stalls = Stalls()

    def __call__(self, tick: Tick) -> None:
        """Add the next tick or run of ticks."""
        self.timeline(tick)
        self.recorder(tick)
        self.stalls(tick)

    def end(self, report: Report, outcomes: Sequence[RequestOutcome]) -> None:
        """Set the result of the replay."""
        self.report, self.outcomes = report, outcomes


MAX_BUCKETS = 2048
"""Maximum points of a plot; it also bounds the memory of a sampler and the size of a page."""

QUANTITIES = ("queued", "running", "blocks", "prefill", "decode")
"""Quantities of a tick: waiting requests, running requests, blocks in use, prompt tokens, other computed tokens."""


@dataclass(slots=True)
class Bucket:
    """A span of ticks. Lists are aligned with ``QUANTITIES``."""

    tick: int
    num_ticks: int
    start_ps: int
    end_ps: int
    lows: list[int]
    highs: list[int]
    sums: list[int]
    """Sums over ticks; divided by ``num_ticks`` they are the means."""
    num_preempted: int = 0

    @property
    def means(self) -> list[float]:
        """Means over ticks, independent of their durations, with 6 decimals."""
        return [round(total / self.num_ticks, 6) for total in self.sums]

    def add(self, later: Bucket) -> None:
        """Merge the next bucket into this one."""
        self.num_ticks += later.num_ticks
        self.end_ps = later.end_ps
        self.lows = list(map(min, self.lows, later.lows))
        self.highs = list(map(max, self.highs, later.highs))
        self.sums = [own + other for own, other in zip(self.sums, later.sums, strict=True)]
        self.num_preempted += later.num_preempted

    def take(self, tick: Tick) -> None:
        """Add the next run of ticks in place; a faster ``add``."""
        num_ticks, lows, highs, sums = tick.num_ticks, self.lows, self.highs, self.sums
        for index, value in enumerate(_values(tick)):
            if value < lows[index]:
                lows[index] = value
            elif value > highs[index]:
                highs[index] = value
            sums[index] += value * num_ticks
        self.num_ticks += num_ticks
        self.end_ps = tick.start_ps + tick.duration_ps
        if tick.plan is not None and tick.plan.preempted:
            self.num_preempted += len(tick.plan.preempted)


class TimelineSampler:
    """A watcher that stores at most ``max_buckets`` spans of ``width`` ticks, a power of two that doubles when needed.

    The result depends only on the ticks: a run of ticks gives the same as its single ticks, except that times inside
    the run are interpolated between its begin and its end.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets = max_buckets
        self.width = 1
        """Number of ticks in a full bucket."""
        self.buckets: list[Bucket] = []
        """Buckets in order; spans without events are absent."""

    def __call__(self, tick: Tick) -> None:
        """Add the next tick or run of ticks."""
        last = tick.tick + tick.num_ticks - 1
        while last // self.width >= self._max_buckets:
            self._halve()
        bucket = self.buckets[-1] if self.buckets else None
        if bucket is not None and bucket.tick // self.width == tick.tick // self.width == last // self.width:
            bucket.take(tick)
        else:
            for piece in _cut(tick, self.width):
                self._append(piece)

    @property
    def num_ticks(self) -> int:
        return self.buckets[-1].tick + self.buckets[-1].num_ticks if self.buckets else 0

    def _halve(self) -> None:
        self.width *= 2
        whole, self.buckets = self.buckets, []
        for bucket in whole:
            self._append(bucket)

    def _append(self, bucket: Bucket) -> None:
        if self.buckets and self.buckets[-1].tick // self.width == bucket.tick // self.width:
            self.buckets[-1].add(bucket)
        else:
            self.buckets.append(bucket)


def _cut(tick: Tick, width: int) -> Iterator[Bucket]:
    """Parts of a run of ticks, each within one span."""
    values = _values(tick)
    num_preempted = len(tick.plan.preempted) if tick.plan is not None else 0
    done = 0
    while done < tick.num_ticks:
        first = tick.tick + done
        count = min(tick.num_ticks - done, width - first % width)
        yield Bucket(
            tick=first,
            num_ticks=count,
            start_ps=tick.start_ps + tick.duration_ps * done // tick.num_ticks,
            end_ps=tick.start_ps + tick.duration_ps * (done + count) // tick.num_ticks,
            lows=list(values),
            highs=list(values),
            sums=[value * count for value in values],
            num_preempted=0 if done else num_preempted,
        )
        done += count


def _values(tick: Tick) -> tuple[int, ...]:
    """``QUANTITIES`` of each of the ticks."""
    return tick.num_queued, tick.num_active, tick.num_used_blocks, tick.num_prefill_tokens, tick.num_decode_inputs


MAX_STALLS = 200_000
"""Maximum stored stalls; later ones are dropped."""


class Stall(NamedTuple):
    """One interval in which a sequence was preempted."""

    tick: int
    end_tick: int
    start_ps: int
    end_ps: int


class Stalls:
    """A watcher that stores stalls by sequence."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[Stall]] = {}
        self._open: dict[int, tuple[int, int]] = {}
        """Tick and picosecond of the begin of open stalls."""
        self._count = 0

    def __call__(self, tick: Tick) -> None:
        """Add the next tick or run of ticks."""
        plan = tick.plan
        if plan is None or not (plan.preempted or plan.resumed):
            return
        for seq_id in plan.resumed:
            since = self._open.pop(seq_id, None)
            if since is not None:
                self._by_id.setdefault(seq_id, []).append(Stall(since[0], tick.tick, since[1], tick.start_ps))
        for seq_id in plan.preempted:
            if self._count < MAX_STALLS:
                self._count += 1
                self._open[seq_id] = tick.tick, tick.start_ps

    def of(self, seq_id: int) -> tuple[Stall, ...]:
        """Stalls of one sequence, in order."""
        return tuple(self._by_id.get(seq_id, ()))
