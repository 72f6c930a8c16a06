"""Perfetto traces: writes the steps, counters and request phases of a replay as trace events.

The format is that of Chrome's trace events ("Trace Event Format", the JSON Object Format): complete events ``X``,
counters ``C``, flows ``s`` and ``f``, metadata ``M``; times are microseconds of logical time. Events are
written as they happen, so the memory depends only on the number of requests.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lockstep.errors import UsageError
from lockstep.replay.render.side import Stalls
from lockstep.replay.timeline import RequestOutcome, Tick
from lockstep.replay.workload import PS_PER_US

_SCHEDULER, _REQUESTS = 1, 2
"""Process ids in the trace; their threads are the tracks."""
_STEPS = 1
MAX_LANES = 10_000
"""Maximum parallel tracks of requests; a request without a free track is omitted."""


class PerfettoWriter:
    """A watcher that writes events into a file as they happen; call ``add_requests`` after the replay.

    A context manager. The file is complete JSON if the block ends without an exception.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | str, name: str) -> None:
        self._path = path
        try:
            self._file: IO[str] = open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._unwritten(error) from error
        self._separator = ""
        self._stalls = Stalls()
        self._end_ps = 0
        """End of the previous step."""
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        self._metadata("process_name", _SCHEDULER, 0, {"name": f"scheduler ({name})"})
        self._metadata("thread_name", _SCHEDULER, _STEPS, {"name": "steps"})
        self._metadata("process_name", _REQUESTS, 0, {"name": "requests"})

    def __enter__(self) -> PerfettoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                self._counters(self._end_ps, 0, 0, 0, 0, 0)
                self._file.write("\n]}\n")
        except OSError as failed:  # flushing its buffer failed
            raise self._unwritten(failed) from None

    def __call__(self, tick: Tick) -> None:
        """Write a step, or a run of steps, and the counters from its begin on."""
        start_us = _us(tick.start_ps)
        self._stalls(tick)
        if tick.start_ps > self._end_ps:
            self._counters(self._end_ps, 0, 0, 0, 0, 0)
        self._end_ps = tick.start_ps + tick.duration_ps
        if tick.plan is not None:
            self._event(
                ph="X",
                name=_step_name(tick),
                cat="step",
                pid=_SCHEDULER,
                tid=_STEPS,
                ts=start_us,
                dur=_us(tick.duration_ps),
                args=_step_args(tick),
            )
        self._counters(
            tick.start_ps,
            tick.num_queued,
            tick.num_active,
            tick.num_used_blocks,
            tick.num_prefill_tokens,
            tick.num_decode_inputs,
        )

    def add_requests(self, outcomes: Iterable[RequestOutcome]) -> None:
        """Write the phases of requests, in tracks that hold one request at a time."""
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        num_lanes = 0
        for outcome in sorted(outcomes, key=lambda each: (each.arrival_ps, each.seq_id)):
            if not outcome.is_completed:
                continue
            while busy and busy[0][0] <= outcome.arrival_ps:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free and num_lanes == MAX_LANES:
                continue
            if not free:
                num_lanes += 1
                heapq.heappush(free, num_lanes)
                self._metadata("thread_name", _REQUESTS, num_lanes, {"name": f"lane {num_lanes}"})
            lane = heapq.heappop(free)
            heapq.heappush(busy, (outcome.finished_ps, lane))
            self._request(outcome, lane)

    def _request(self, outcome: RequestOutcome, lane: int) -> None:
        whole = {"pid": _REQUESTS, "tid": lane, "cat": "request"}
        self._event(
            ph="X",
            name=outcome.name,
            ts=_us(outcome.arrival_ps),
            dur=_us(outcome.finished_ps - outcome.arrival_ps),
            args=_request_args(outcome),
            **whole,
        )
        for name, start_ps, end_ps in phases(outcome):
            self._event(ph="X", name=name, ts=_us(start_ps), dur=_us(end_ps - start_ps), **whole)
        for stall in self._stalls.of(outcome.seq_id):
            length_ps = stall.end_ps - stall.start_ps
            self._event(ph="X", name="preempted", ts=_us(stall.start_ps), dur=_us(length_ps), **whole)
        if outcome.admitted_ps >= 0:
            flow = {"name": "admitted", "cat": "admission", "id": outcome.seq_id, "ts": _us(outcome.admitted_ps)}
            self._event(ph="s", pid=_SCHEDULER, tid=_STEPS, **flow)
            self._event(ph="f", bp="e", pid=_REQUESTS, tid=lane, **flow)

    def _counters(self, at_ps: int, queued: int, running: int, blocks: int, prefill: int, decode: int) -> None:
        """Write the values of the counters from ``at_ps`` on."""
        counters = {
            "requests": {"queued": queued, "running": running},
            "KV blocks": {"used": blocks},
            "batch tokens": {"prefill": prefill, "decode": decode},
        }
        for name, values in counters.items():
            self._event(ph="C", name=name, pid=_SCHEDULER, tid=0, ts=_us(at_ps), args=values)

    def _metadata(self, name: str, pid: int, tid: int, args: dict[str, str]) -> None:
        self._event(ph="M", name=name, pid=pid, tid=tid, args=args)

    def _event(self, **event: Any) -> None:
        try:
            self._file.write(self._separator + "\n" + json.dumps(event, separators=(",", ":")))
        except OSError as error:
            raise self._unwritten(error) from error
        self._separator = ","

    def _unwritten(self, error: OSError) -> UsageError:
        return UsageError(f"{self._path}: cannot write the trace: {error.strerror}")


def phases(outcome: RequestOutcome) -> Iterator[tuple[str, int, int]]:
    """Phases of a request that it reached: name, begin and end in picoseconds."""
    borders = (
        ("queued", outcome.arrival_ps, outcome.admitted_ps),
        ("prefill", outcome.admitted_ps, outcome.first_token_ps),
        ("decode", outcome.first_token_ps, outcome.finished_ps),
    )
    for name, start_ps, end_ps in borders:
        if start_ps < 0:
            return
        end_ps = end_ps if end_ps >= 0 else outcome.finished_ps
        if end_ps > start_ps:
            yield name, start_ps, end_ps


def _us(ps: int) -> float | int:
    """Microseconds, as an integer if possible, which is shorter."""
    return ps // PS_PER_US if ps % PS_PER_US == 0 else ps / PS_PER_US


def _step_name(tick: Tick) -> str:
    counts = {"prefill": tick.num_prefill_tokens, "decode": tick.num_decode_inputs}
    name = " + ".join(kind for kind, count in counts.items() if count) or "moves"
    return name if tick.num_ticks == 1 else f"{tick.num_ticks} x {name}"


def _step_args(tick: Tick) -> dict[str, Any]:
    assert tick.plan is not None
    assert tick.events is not None
    return {
        "tick": tick.tick,
        "ticks": tick.num_ticks,
        "sequences": tick.plan.num_sequences,
        "prefill tokens": tick.num_prefill_tokens,
        "output tokens": tick.num_decoded_tokens,
        "admitted": list(tick.plan.admitted),
        "finished": {str(seq_id): reason.value for seq_id, reason in tick.events.finished},
        "preempted": list(tick.plan.preempted),
        "resumed": list(tick.plan.resumed),
    }


def _request_args(outcome: RequestOutcome) -> dict[str, Any]:
    return {
        "id": outcome.seq_id,
        "priority": outcome.priority,
        "tenant": outcome.tenant,
        "prompt tokens": outcome.num_prompt_tokens,
        "output tokens": outcome.num_output_tokens,
        "cached tokens": outcome.num_cached_tokens,
        "preemptions": outcome.num_preemptions,
    }
