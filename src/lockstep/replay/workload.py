"""Workloads: define requests by lengths, arrivals and block contents, and compute block hashes of contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lockstep.core.prefix import HASH_BYTES
from lockstep.core.request import Priority

PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
"""Picoseconds per millisecond. Logical time is in integer picoseconds, so that the duration of a run of steps equals
the sum of its steps."""


class ArrivalUnit(Enum):
    """Unit of the arrivals of a workload."""

    TICKS = "ticks"
    """The request joins the queue before the step with that number; idle ticks count."""
    PS = "ps"
    """Picoseconds of logical time; the cost model gives the duration of a step, and idle time is skipped."""


@dataclass(slots=True)
class WorkloadRequest:
    """One request of a workload."""

    name: Final[str]
    """Id of the request in the file, or its number."""
    num_prompt_tokens: Final[int]
    max_output_tokens: Final[int]
    num_output_tokens: Final[int]
    """Number of tokens that it generates unless it is ended earlier; at most ``max_output_tokens``."""
    arrival: Final[int]
    """Time since the workload's start, in its unit; at least that of the previous request."""
    priority: Final[int] = Priority.NORMAL
    tenant: Final[str] = ""
    contents: Final[tuple[int, ...]] = ()
    """One dense id per block of ``content_size`` prompt tokens, including a partial last one. Equal ids mean equal
    content after an equal prefix. Blocks without an id, all or the last ones, share nothing."""
    place: Final[str] = ""
    """Location in its file, for messages: ``trace.jsonl:17``."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the scheduler fields from their file.

    ``requests`` can be iterated repeatedly; if it streams from a file, each iteration reads the file again.
    """

    name: str
    requests: Iterable[WorkloadRequest]
    unit: ArrivalUnit
    content_size: int = 0
    """Number of tokens per id in ``contents``; 0: no contents."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of ``SchedulerConfig`` from the file; the others have the defaults of replays."""
    notes: tuple[str, ...] = ()
    """Warnings about the files of the workload, such as missing parts."""


ID_BYTES = 12
"""Bytes of the content id in a hash; the other bytes are the block's index within its content."""


def content_hashes(
    contents: tuple[int, ...], content_size: int, block_size: int, num_prompt_tokens: int
) -> tuple[bytes, ...]:
    """Block hashes of a prompt's full blocks.

    Each id stands for ``content_size`` tokens, thus for ``content_size // block_size`` blocks. Block ``i`` of id ``c``
    has the hash of 16 bytes that is ``c`` in 12 bytes and then ``i`` in 4, both little-endian. Equal ids mean equal
    content after an equal prefix, so the hashes need no chain.

    Args:
        content_size: a multiple of ``block_size``.
    """
    per_content = content_size // block_size
    count = num_prompt_tokens // block_size
    to_bytes = int.to_bytes
    if per_content == 1:
        return tuple([to_bytes(content, HASH_BYTES, "little") for content in contents[:count]])
    places = [to_bytes(place, HASH_BYTES - ID_BYTES, "little") for place in range(per_content)]
    ids = [to_bytes(content, ID_BYTES, "little") for content in contents]
    return tuple([name + place for name in ids for place in places][:count])


def content_number(block_hash: bytes, per_content: int) -> int:
    """Number for a hash of `content_hashes`: equal for equal hashes, consecutive for the blocks of one content.

    Args:
        per_content: number of blocks per id.
    """
    content = int.from_bytes(block_hash[:ID_BYTES], "little")
    return content * per_content + int.from_bytes(block_hash[ID_BYTES:], "little")
