"""Mooncake's traces (FAST '25): one JSON object per line, as they are published.

``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, one id per 512 tokens of the prompt, a
partial last block included; equal ids are equal blocks with equal past. Without ``hash_ids`` a request shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lockstep.errors import TraceError
from lockstep.replay.readers.fields import array, check_keys, content_ids, json_object, time_ps, whole
from lockstep.replay.workload import PS_PER_MS, WorkloadRequest

CONTENT_TOKENS = 512
TURNS = ("session_id", "delay", "delay_ms")
"""Keys of a variant whose lines are turns of conversations: when one comes depends on when the one before it ends."""
COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")


def rows(lines: Iterable[tuple[int, str]], name: str) -> Iterator[WorkloadRequest]:
    """The requests of a trace; arrivals in picoseconds as the file counts them."""
    for number, line in lines:
        place = f"{name}:{number}"
        yield row(json_object(line, place), number, place)


def row(fields: Mapping[str, object], number: int, place: str) -> WorkloadRequest:
    """One line; TraceError names its place. An output of 0 tokens counts as 1, because every request gets one."""
    if not fields.keys().isdisjoint(TURNS):
        keys = ", ".join(key for key in TURNS if key in fields)
        raise TraceError(
            f"{place}: it is a turn of a conversation ({keys}), which comes "
            "when the answer before it has ended; a replay's arrivals are fixed, so give every turn its timestamp and "
            "its whole input_length, and leave these keys out"
        )
    check_keys(fields, COLUMNS, COLUMNS[:3], place)
    num_prompt = whole(fields["input_length"], "input_length", place, 1)
    num_output = max(1, whole(fields["output_length"], "output_length", place))
    ids = array(fields.get("hash_ids", []), "hash_ids", place)
    if ids and len(ids) != -(-num_prompt // CONTENT_TOKENS):
        raise TraceError(
            f"{place}: {len(ids)} hash_ids for {num_prompt} tokens; one per {CONTENT_TOKENS} tokens expected"
        )
    return WorkloadRequest(
        name=str(number),
        num_prompt_tokens=num_prompt,
        max_output_tokens=num_output,
        num_output_tokens=num_output,
        arrival=time_ps(fields["timestamp"], "timestamp", place, PS_PER_MS),
        contents=content_ids(ids, "a hash id", place),
        place=place,
    )
