"""Reader of workloads: detects the format from the content, and changes arrivals as the options require."""

from __future__ import annotations

import codecs
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

from lockstep.errors import TraceError, UsageError
from lockstep.replay.live import workload_of
from lockstep.replay.readers import workload_json
from lockstep.replay.readers.document import members, read_text
from lockstep.replay.readers.formats import (
    AIPERF,
    AIPERF_KEYS,
    AZURE,
    AZURE_COLUMNS,
    MOONCAKE,
    MOONCAKE_COLUMNS,
    VLLM_ARRAYS,
    VLLM_RUN_KEYS,
    LineFormat,
    vllm_bench_requests,
)
from lockstep.replay.readers.source import numbered_lines, open_source
from lockstep.replay.trace import open_trace
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.chunks import HEAD_BYTES as RECORDING_HEAD_BYTES
from lockstep.worker.flight.chunks import begins_recording
from lockstep.worker.flight.entries import SUFFIX

MAX_SAME_STAMP = 100_000
"""Maximum requests with the same timestamp; they are held in memory together while they are spread."""
_RANDOM_BITS = 64

Timed = tuple[int, WorkloadRequest]
"""A request with its new arrival."""
HEAD_BYTES = 64 << 10
"""Bytes from which the format is detected."""
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{1,64})"')
KNOWN = (
    'a recording of lockstep serve --trace, a workload ({"config": ..., "requests": [...]}), a Mooncake trace '
    f"(JSON lines), an Azure trace ({','.join(AZURE_COLUMNS)}), a detailed result of vllm bench serve, or AIPerf's "
    "profile_export.jsonl"
)
DOCUMENT_KEYS = (*workload_json.KEYS, *VLLM_ARRAYS, *VLLM_RUN_KEYS)
"""Keys of documents: a file with one of them is read whole."""
MAX_KEYS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Changes to a file's arrivals."""

    speed: float = 1.0
    """Divisor of all gaps between arrivals."""
    limit: int | None = None
    """Maximum requests, the first ones by arrival; None: all."""
    dequantize_seed: int | None = None
    """Seed for spreading requests with the same timestamp uniformly and in order up to the next timestamp; None: they
    keep their timestamp."""
    engine: int | None = None
    """Number of the engine whose requests are read from a recording; None: the only one."""
    max_unsorted: int = 1_000_000
    """Maximum requests of a file whose lines are not in order of arrival; they are sorted in memory."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise UsageError(f"the speed is {self.speed}; it must be positive and finite")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"the limit is {self.limit}; it must be at least 1")
        if self.dequantize_seed is not None and self.dequantize_seed < 0:
            raise UsageError(f"the seed is {self.dequantize_seed}; it must not be negative")
        if self.engine is not None and self.engine < 0:
            raise UsageError(f"the engine is {self.engine}; it must be at least 0")


AS_RECORDED = ReadOptions()


def read_workload(path: str | Path, options: ReadOptions = AS_RECORDED) -> Workload:
    """Read a file of any supported format as a workload.

    Formats with sorted lines are streamed: their ``requests`` can be iterated repeatedly, and each iteration reads the
    file again, in memory that does not depend on its size.

    Raises:
        TraceError: the file cannot be read or has none of the formats; the message has the line. Faults in streamed
            lines are raised when the lines are reached.
    """
    path = Path(path).expanduser()
    if is_recording(path):
        return _read_recording(path, options)
    with open_source(path) as stream:
        head = stream.read(HEAD_BYTES)
    if options.engine is not None:
        raise UsageError(f"{path.name} is not a recording, so it has no engines; omit the engine")
    line_format = _detect(head, path.name)
    if line_format is None:
        return _read_document(path, options)
    requests: Iterable[WorkloadRequest] = _FileRequests(path, line_format, options)
    if not line_format.is_sorted:
        requests = tuple(requests)
    return Workload(path.name, requests, ArrivalUnit.PS, line_format.content_size)


def is_recording(path: Path) -> bool:
    """True if a path is a recording of Lockstep: a directory, or a file with the first bytes of one."""
    if path.is_dir() or path.suffix == SUFFIX:
        return True
    with open_source(path) as stream:
        return begins_recording(stream.read(RECORDING_HEAD_BYTES))


@dataclass(frozen=True, slots=True)
class _FileRequests:
    """Requests of a file of lines; each iteration reads the file again."""

    path: Path
    format: LineFormat
    options: ReadOptions

    def __iter__(self) -> Iterator[WorkloadRequest]:
        with open_source(self.path) as stream:
            requests = self.format.read(numbered_lines(stream, self.path.name), self.path.name)
            if not self.format.is_sorted:
                requests = iter(_sorted(requests, self.options.max_unsorted))
            yield from _some(shaped(requests, self.options), self.path.name)


def _sorted(rows: Iterable[WorkloadRequest], most: int) -> list[WorkloadRequest]:
    requests: list[WorkloadRequest] = []
    for row in rows:
        if len(requests) == most:
            raise TraceError(f"{row.place}: more than {most} requests in unsorted lines; shorten the file")
        requests.append(row)
    return sorted(requests, key=lambda request: request.arrival)


def _some(requests: Iterable[WorkloadRequest], name: str) -> Iterator[WorkloadRequest]:
    """The same requests; TraceError if there are none."""
    is_empty = True
    for request in requests:
        is_empty = False
        yield request
    if is_empty:
        raise TraceError(f"{name} has no requests")


def _read_recording(path: Path, options: ReadOptions) -> Workload:
    """Requests of a recorded engine, with its config."""
    trace = open_trace(path)
    workload = workload_of(trace, trace.engine(options.engine).number)
    return replace(workload, requests=tuple(_some(shaped(workload.requests, options), path.name)))


def _read_document(path: Path, options: ReadOptions) -> Workload:
    name = path.name
    with open_source(path) as stream:
        text = read_text(stream, name)
    document = members(text, name, exact=(*workload_json.KEYS, *VLLM_ARRAYS), itemised="requests")
    if any(key in document for key in workload_json.KEYS):
        file = workload_json.read_workload_file(document, name)
        requests = tuple(_some(shaped(file.requests, options, from_first=False), name))
        return Workload(name, requests, file.unit, file.block_size, file.config)
    if any(key in document for key in (*VLLM_ARRAYS, *VLLM_RUN_KEYS)):
        return Workload(name, tuple(_some(shaped(vllm_bench_requests(document, name), options), name)), ArrivalUnit.PS)
    raise TraceError(f"{name}:1: unknown format; supported are {KNOWN}")


def _detect(head: bytes, name: str) -> LineFormat | None:
    """Format of lines that a file begins with; None: a JSON document.

    Raises:
        TraceError: the file is neither.
    """
    text = _beginning(head).removeprefix("\ufeff").lstrip()
    if not text and head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise TraceError(f"{name} is neither UTF-8 text nor zstd; supported are {KNOWN}")
    if not text:
        raise TraceError(f"{name} is empty; supported are {KNOWN}")
    if text.startswith("{"):
        keys = _first_keys(text)
        if any(key in MOONCAKE_COLUMNS for key in keys):
            return MOONCAKE
        if any(key in AIPERF_KEYS for key in keys):
            return AIPERF
        if _has_lines(text) and not any(key in DOCUMENT_KEYS for key in keys):
            raise TraceError(f"{name}:1: unknown format of JSON lines, with {_named(keys)}; supported are {KNOWN}")
        return None
    if text.split("\n", 1)[0].casefold().startswith(AZURE_COLUMNS[0].casefold()):
        return AZURE
    raise TraceError(f"{name}:1: unknown format; supported are {KNOWN}")


def _has_lines(text: str) -> bool:
    """True if the first line is a whole object and another line follows."""
    first, _, rest = text.partition("\n")
    try:
        return isinstance(json.loads(first), dict) and bool(rest.strip())
    except (ValueError, RecursionError):
        return False


def _named(keys: Sequence[str]) -> str:
    """Keys of an object for a message, the first ones if there are many."""
    if not keys:
        return "no key"
    return f"the keys {', '.join(map(json.dumps, keys[:MAX_KEYS_SHOWN]))}{' ...' if len(keys) > MAX_KEYS_SHOWN else ''}"


def _beginning(head: bytes) -> str:
    """Beginning of the file as text, up to the first invalid byte, whose error the reader of its line reports."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        return head[: error.start].decode()


def _first_keys(text: str) -> list[str]:
    """Keys of the object in the first line, or its first key if that line is cut."""
    try:
        first = json.loads(text.split("\n", 1)[0])
    except (ValueError, RecursionError):
        match = _FIRST_KEY.match(text)
        return [match[1]] if match else []
    return list(first) if isinstance(first, dict) else []


def shaped(
    requests: Iterable[WorkloadRequest], options: ReadOptions, *, from_first: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests with arrivals changed by the options.

    Args:
        requests: requests in order of arrival.
        from_first: True: times count from the first arrival; False: from 0.

    Raises:
        TraceError: a request arrives before the previous one.
    """
    # The exact decimal, not the binary fraction next to it.
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
            raise TraceError(f"{request.place}: arrives before the request above it; sort the trace by time")
        last = request.arrival
        yield last, request


def _spread(timed: Iterable[Timed], seed: int) -> Iterator[Timed]:
    """Arrivals uniform between a timestamp and the next; the last gap has the length of the one before it."""
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
            raise TraceError(f"{request.place}: more than {MAX_SAME_STAMP} equal timestamps; they cannot be spread")
        together.append((arrival, request))
    yield from apart()
