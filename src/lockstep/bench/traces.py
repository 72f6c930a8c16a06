"""Timed traces as samples: any file that a replay takes, with its own times."""

from __future__ import annotations

import logging
from pathlib import Path

from lockstep.bench.samples import Sample, Segment
from lockstep.errors import TraceError
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.readers.fields import PS_PER_S
from lockstep.replay.workload import ArrivalUnit, WorkloadRequest

log = logging.getLogger(__name__)


def trace_samples(path: Path, options: ReadOptions) -> tuple[Sample, ...]:
    """The requests of a trace; equal contents are equal segments, and priorities and tenants stay behind.

    Raises:
        TraceError: the file cannot be read, or its requests have no times; the message names the line.
    """
    workload = read_workload(path, options)
    for note in workload.notes:
        log.warning("%s", note)
    if workload.unit is ArrivalUnit.TICKS:
        raise TraceError(f"{workload.name} counts arrivals in ticks of a simulation; a server needs arrival_ms")
    return tuple([_sample(request, index, workload.content_size) for index, request in enumerate(workload.requests)])


def _sample(request: WorkloadRequest, index: int, content_size: int) -> Sample:
    left = request.num_prompt_tokens
    segments = []
    for content in request.contents:
        segments.append(Segment((2, content), min(left, content_size)))
        left -= content_size
    if left > 0:
        segments.append(Segment((1, index), left))
    return Sample(tuple(segments), request.num_output_tokens, request.arrival / PS_PER_S)
