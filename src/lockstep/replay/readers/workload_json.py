"""Lockstep's workload files: reads and writes one JSON document with a scheduler config and requests.

``{"config": {...}, "requests": [{...}, ...]}``. Members and requests may have any order: arrivals are sorted.
A request has ``id`` (a unique text or integer), ``prompt_tokens``, ``max_output_tokens``, and optionally
``output_tokens`` (the number that it generates; default: the maximum), ``priority`` (a name or an integer, lower
first), ``arrival_tick`` or ``arrival_ms`` (one kind per file; default: 0), ``prefix_hashes`` (one text or integer for
each block of ``config.block_size`` prompt tokens, from the first on; blocks without one share nothing) and ``tenant``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Priority
from lockstep.errors import TraceError
from lockstep.replay.readers.document import Located, Members
from lockstep.replay.readers.fields import MAX_ID, array, check_keys, shown, text, time_ps, whole
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest

KEYS = ("config", "requests")
REQUEST_KEYS = (
    "id",
    "prompt_tokens",
    "max_output_tokens",
    "output_tokens",
    "priority",
    "arrival_tick",
    "arrival_ms",
    "prefix_hashes",
    "tenant",
)
PRIORITY_CLASSES = {
    "critical": Priority.CRITICAL,
    "high": Priority.HIGH,
    "normal": Priority.NORMAL,
    "low": Priority.LOW,
}
MAX_PRIORITY = (1 << 31) - 1
MAX_TICK = (1 << 62) - 1


class WorkloadFile(NamedTuple):
    """A parsed workload file; its config is not checked yet."""

    config: dict[str, object]
    """Scheduler fields from the file; `replay/configs.py` checks them."""
    unit: ArrivalUnit
    requests: list[WorkloadRequest]
    """Requests in order of arrival; those of one time in the order of the file."""
    block_size: int
    """Tokens per element of ``prefix_hashes``; 0: the file does not set it."""


def read_workload_file(document: Members, name: str) -> WorkloadFile:
    """Read a workload file called ``name``; TraceError gives the line of the fault."""
    check_keys(document, KEYS, ("requests",), name)
    config, block_size = _config(*document.get("config", Located({}, 1)), name)
    items, line = document["requests"]
    reading = _Reading(block_size)
    array(items, "requests", f"{name}:{line}")
    requests = [reading.request(item.value, f"{name}:{item.line}") for item in items]
    requests.sort(key=lambda request: request.arrival)
    return WorkloadFile(config, reading.unit or ArrivalUnit.TICKS, requests, block_size)


def _config(value: object, line: int, name: str) -> tuple[dict[str, object], int]:
    """Config fields from the file, and its block size; 0: not set."""
    place = f"{name}:{line}: config"
    if not isinstance(value, dict):
        raise TraceError(f"{place} is {shown(value)}; it must be an object")
    return value, whole(value["block_size"], "block_size", place, 1) if "block_size" in value else 0


class _Reading:
    """Common state of a file's requests: their ids, the unit of their arrivals, and prefix hashes as dense ids."""

    def __init__(self, block_size: int) -> None:
        self.unit: ArrivalUnit | None = None
        self._block_size = block_size
        self._place_of: dict[str, str] = {}
        self._content_ids: dict[str | int, int] = {}

    def request(self, fields: object, place: str) -> WorkloadRequest:
        if not isinstance(fields, dict):
            raise TraceError(f"{place}: a request must be an object, not {shown(fields)}")
        check_keys(fields, REQUEST_KEYS, REQUEST_KEYS[:3], place)
        num_prompt = whole(fields["prompt_tokens"], "prompt_tokens", place, 1)
        max_output = whole(fields["max_output_tokens"], "max_output_tokens", place, 1)
        num_output = whole(fields.get("output_tokens", max_output), "output_tokens", place, 1, max_output)
        return WorkloadRequest(
            name=self._name(fields["id"], place),
            num_prompt_tokens=num_prompt,
            max_output_tokens=max_output,
            num_output_tokens=num_output,
            arrival=self._arrival(fields, place),
            priority=_priority(fields.get("priority", Priority.NORMAL), place),
            tenant=text(fields.get("tenant", ""), "tenant", place),
            contents=self._contents(array(fields.get("prefix_hashes", []), "prefix_hashes", place), num_prompt, place),
            place=place,
        )

    def _name(self, value: object, place: str) -> str:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        name = str(whole(value, "id", place, 0, MAX_ID)) if is_number else text(value, "id", place)
        if name in self._place_of:
            raise TraceError(f"{place}: the id {shown(name)} is already used at {self._place_of[name]}")
        self._place_of[name] = place
        return name

    def _arrival(self, fields: Mapping[str, Any], place: str) -> int:
        given = [key for key in ("arrival_tick", "arrival_ms") if key in fields]
        if not given:
            return 0
        unit = ArrivalUnit.TICKS if given[0] == "arrival_tick" else ArrivalUnit.PS
        if len(given) > 1 or self.unit not in (None, unit):
            raise TraceError(f"{place}: arrivals are either all arrival_tick or all arrival_ms; this file has both")
        self.unit = unit
        if unit is ArrivalUnit.TICKS:
            return whole(fields["arrival_tick"], "arrival_tick", place, 0, MAX_TICK)
        return time_ps(fields["arrival_ms"], "arrival_ms", place, PS_PER_MS)

    def _contents(self, hashes: Sequence[object], num_prompt: int, place: str) -> tuple[int, ...]:
        if not hashes:
            return ()
        if not self._block_size:
            raise TraceError(f"{place}: prefix_hashes need config.block_size")
        most = -(-num_prompt // self._block_size)
        if len(hashes) > most:
            raise TraceError(
                f"{place}: {len(hashes)} prefix_hashes for {num_prompt} tokens, {most} blocks of {self._block_size}"
            )
        return tuple([self._content_id(each, place) for each in hashes])

    def _content_id(self, value: object, place: str) -> int:
        key: str | int
        if isinstance(value, str):
            key = text(value, "a prefix hash", place)
        else:
            key = whole(value, "a prefix hash", place, 0, MAX_ID)
        return self._content_ids.setdefault(key, len(self._content_ids))


def _priority(value: object, place: str) -> int:
    if isinstance(value, str):
        if value not in PRIORITY_CLASSES:
            known = ", ".join(PRIORITY_CLASSES)
            raise TraceError(f"{place}: priority is {shown(value)}; it must be one of {known}, or a whole number")
        return PRIORITY_CLASSES[value]
    return whole(value, "priority", place, -MAX_PRIORITY, MAX_PRIORITY)


def dump_workload(workload: Workload, config: SchedulerConfig) -> bytes:
    """Convert a workload to a file's bytes, with every field of the config and one request per line.

    Prefix hashes are one number per block of the config. They are omitted if the workload's contents are not multiples
    of blocks, because then nothing is shared.
    """
    encode = msgspec.json.Encoder(decimal_format="number").encode
    size = workload.content_size
    per_content = 0 if size % config.block_size else size // config.block_size
    rows = [encode(_row(request, workload.unit, per_content, config)) for request in workload.requests]
    head = msgspec.json.format(encode(asdict(config)), indent=2).replace(b"\n", b"\n  ")
    return b'{\n  "config": ' + head + b',\n  "requests": [\n    ' + b",\n    ".join(rows) + b"\n  ]\n}\n"


def _row(request: WorkloadRequest, unit: ArrivalUnit, per_content: int, config: SchedulerConfig) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": request.name,
        "prompt_tokens": request.num_prompt_tokens,
        "max_output_tokens": request.max_output_tokens,
    }
    if request.num_output_tokens != request.max_output_tokens:
        row["output_tokens"] = request.num_output_tokens
    if request.priority != Priority.NORMAL:
        row["priority"] = request.priority
    if request.tenant:
        row["tenant"] = request.tenant
    if unit is ArrivalUnit.TICKS:
        row["arrival_tick"] = request.arrival
    else:
        whole_ms, rest_ps = divmod(request.arrival, PS_PER_MS)
        row["arrival_ms"] = Decimal(request.arrival) / PS_PER_MS if rest_ps else whole_ms
    if per_content and request.contents:
        hashes = [content * per_content + place for content in request.contents for place in range(per_content)]
        row["prefix_hashes"] = hashes[: config.blocks_for(request.num_prompt_tokens)]
    return row
