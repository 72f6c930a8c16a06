"""Workloads: requests in lengths, arrivals and block contents, and the block hashes that contents stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lockstep.core.prefix import HASH_BYTES
from lockstep.core.request import Priority

PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
"""Logical time is whole picoseconds, so that a run of steps adds up to the same time as its steps one by one."""


class ArrivalUnit(Enum):
    """Unit of the arrivals of a workload."""

    TICKS = "ticks"
    """A request joins the queue before the step of that number; an idle tick is a tick."""
    PS = "ps"
    """Picoseconds of logical time; the cost model gives the duration of a step, and idle time is skipped."""


@dataclass(slots=True)
class WorkloadRequest:
    """One request of a workload."""

    name: Final[str]
    """Its id in the file, or its number there."""
    num_prompt_tokens: Final[int]
    max_output_tokens: Final[int]
    num_output_tokens: Final[int]
    """Tokens that it gets if nothing ends it before; at most ``max_output_tokens``."""
    arrival: Final[int]
    """Time from the workload's start on, in its unit; never less than that of the request before."""
    priority: Final[int] = Priority.NORMAL
    tenant: Final[str] = ""
    contents: Final[tuple[int, ...]] = ()
    """One dense id for each block of ``content_size`` tokens of the prompt, a partial last one included; equal ids are
    equal content with equal past. Blocks without an id, all of them or the last ones, share nothing."""
    place: Final[str] = ""
    """Place in its file, for messages: ``trace.jsonl:17``."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the scheduler fields that their file sets.

    ``requests`` may be iterated over more than once; when it streams from a file, each time reads the file anew.
    """

    name: str
    requests: Iterable[WorkloadRequest]
    unit: ArrivalUnit
    content_size: int = 0
    """Tokens that one id of ``contents`` stands for; 0: there are none."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of ``SchedulerConfig`` that the file sets; what it leaves open has its default for replays."""
    notes: tuple[str, ...] = ()
    """Caveats of the files that it was read from: what of them is not there."""


ID_BYTES = 12
"""Bytes of a hash that are the content's id; the rest is the block's place within its content."""


def content_hashes(
    contents: tuple[int, ...], content_size: int, block_size: int, num_prompt_tokens: int
) -> tuple[bytes, ...]:
    """Block hashes of a prompt's full blocks.

    Each id stands for ``content_size`` tokens, thus for ``content_size // block_size`` blocks. Block ``i`` of id ``c``
    has the hash of 16 bytes that is ``c`` in 12 bytes and then ``i`` in 4, both little-endian. Equal ids are equal
    content with equal past, so the hashes need no chain.

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
    """A number for a hash of `content_hashes`: equal for equal hashes, consecutive for the blocks of one content.

    Args:
        per_content: blocks that an id stands for.
    """
    content = int.from_bytes(block_hash[:ID_BYTES], "little")
    return content * per_content + int.from_bytes(block_hash[ID_BYTES:], "little")
