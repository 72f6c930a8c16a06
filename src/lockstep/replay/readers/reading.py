"""`read_workload`: opens a file, and hands it to the reader of its format. The shell of this room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import TraceError, UsageError
from lockstep.replay.readers import vllm_bench, workload_json
from lockstep.replay.readers.arrivals import ReadOptions, shaped
from lockstep.replay.readers.document import members, read_text
from lockstep.replay.readers.formats import KNOWN, LineFormat, detect
from lockstep.replay.readers.source import numbered_lines, open_source
from lockstep.replay.trace import open_trace, workload_of
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.format import SUFFIX, Kind

AS_RECORDED = ReadOptions()
HEAD_BYTES = 64 << 10
"""What is looked at to tell formats apart."""
MAX_UNSORTED = 1_000_000
"""Requests of a file whose lines have another order than arrivals: they are held together to be sorted."""


def read_workload(path: str | Path, options: ReadOptions = AS_RECORDED) -> Workload:
    """A file as a workload, whatever format it has.

    Formats with sorted lines stream: their ``requests`` may be iterated over again and again, and each time reads the
    file anew, in memory that does not depend on its size.

    Raises:
        TraceError: it cannot be read or is none of the formats; the message has the line. Faults of lines that stream
            are raised when they are reached.
    """
    path = Path(path).expanduser()
    if is_recording(path):
        return _read_recording(path, options)
    with open_source(path) as stream:
        head = stream.read(HEAD_BYTES)
    if options.engine is not None:
        raise UsageError(f"{path.name} is no recording: it has no engines to choose from")
    line_format = detect(head, path.name)
    if line_format is None:
        return _read_document(path, options)
    requests: Iterable[WorkloadRequest] = _FileRequests(path, line_format, options)
    if not line_format.is_sorted:
        requests = tuple(requests)
    return Workload(path.name, requests, ArrivalUnit.PS, line_format.content_size)


def is_recording(path: Path) -> bool:
    """Whether a path is a recording of ours: a directory, or a file that begins as they do."""
    if path.is_dir() or path.suffix == SUFFIX:
        return True
    with open_source(path) as stream:
        return stream.read(1) == bytes([Kind.HEADER])


@dataclass(frozen=True, slots=True)
class _FileRequests:
    """The requests of a file of lines, read anew by each iteration."""

    path: Path
    format: LineFormat
    options: ReadOptions

    def __iter__(self) -> Iterator[WorkloadRequest]:
        with open_source(self.path) as stream:
            rows = self.format.rows(numbered_lines(stream, self.path.name), self.path.name)
            if not self.format.is_sorted:
                rows = iter(_sorted(rows))
            yield from _some(shaped(rows, self.options), self.path.name)


def _sorted(rows: Iterable[WorkloadRequest]) -> list[WorkloadRequest]:
    requests: list[WorkloadRequest] = []
    for row in rows:
        if len(requests) == MAX_UNSORTED:
            raise TraceError(f"{row.place}: over {MAX_UNSORTED} requests that have to be sorted; cut the file")
        requests.append(row)
    return sorted(requests, key=lambda request: request.arrival)


def _some(requests: Iterable[WorkloadRequest], name: str) -> Iterator[WorkloadRequest]:
    """The same, but at least one."""
    is_empty = True
    for request in requests:
        is_empty = False
        yield request
    if is_empty:
        raise TraceError(f"{name} holds no request")


def _read_recording(path: Path, options: ReadOptions) -> Workload:
    """What a live engine was asked, with its config."""
    trace = open_trace(path)
    number = options.engine
    if number is None:
        if len(trace.engines) > 1:
            names = ", ".join(f"{engine.number} ({engine.name})" for engine in trace.engines)
            raise UsageError(f"{path.name} is a recording of several engines: {names}; choose one by its number")
        number = trace.engines[0].number if trace.engines else 0
    workload = workload_of(trace, number)
    return replace(workload, requests=tuple(_some(shaped(workload.requests, options), path.name)))


def _read_document(path: Path, options: ReadOptions) -> Workload:
    name = path.name
    with open_source(path) as stream:
        text = read_text(stream, name)
    document = members(text, name, exact=(*workload_json.KEYS, *vllm_bench.ARRAYS), itemised="requests")
    if any(key in document for key in workload_json.KEYS):
        content = workload_json.content_of(document, name)
        requests = tuple(_some(shaped(content.requests, options, from_first=False), name))
        return Workload(name, requests, content.unit, content.block_size, content.config)
    if any(key in document for key in (*vllm_bench.ARRAYS, *vllm_bench.RUN_KEYS)):
        return Workload(
            name, tuple(_some(shaped(vllm_bench.requests_of(document, name), options), name)), ArrivalUnit.PS
        )
    raise TraceError(f"{name}:1: unknown format; it may be {KNOWN}")
