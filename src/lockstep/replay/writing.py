"""Workloads as files of our own format (replay/readers/workload_json.py), so that they give the same replay again."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal
from typing import Any

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Priority
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest


def workload_document(workload: Workload, config: SchedulerConfig) -> bytes:
    """The workload with every field of the config, a request per line.

    Contents are written as one id for each block of the config; they are left out where their borders are not those of
    blocks, because then nothing is shared.
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
