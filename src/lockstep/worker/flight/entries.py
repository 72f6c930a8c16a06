"""A recording's entries as values: what `format` says, read back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from lockstep.core.request import FinishReason
from lockstep.worker.flight.format import (
    ALLOWS_FORCED,
    DIGEST_BYTES,
    HAS_SIBLING,
    MARK_BYTES,
    OTHER_MASK,
    OTHER_PLACE,
    READS_CACHE,
    STEPPED,
    Kind,
    unsigned,
)

MAX_RUN = 1 << 24
"""Ids in one run, and in one list: no context has as many blocks."""
MAX_INT_BITS = 140
"""Seeds are the largest numbers, and have 64."""
REASONS = tuple(FinishReason)


class Header(NamedTuple):
    facts: dict[str, Any]


class EngineEntry(NamedTuple):
    facts: dict[str, Any]


class Checkpoint(NamedTuple):
    engine: int
    scheduler: Any
    fingerprint: Any


class SeatsEntry(NamedTuple):
    num_turns: int
    seats: list[tuple[str, int, int, int]]


class Priorities(NamedTuple):
    classes: tuple[tuple[int, int], ...]
    """(engine, class) in order of loading."""


class Added(NamedTuple):
    engine: int
    step: int
    seq_id: int
    num_prompt_tokens: int
    max_output_tokens: int | None
    reads_cache: bool
    allows_forced: bool
    priority: int
    tenant: int
    contents: tuple[int, ...]
    sibling_of: int | None


class Came(NamedTuple):
    engine: int
    seq_id: int
    waited_us: int
    seed: int
    deadline_ms: int
    queue_deadline_ms: int


class Aborted(NamedTuple):
    engine: int
    step: int
    seq_id: int
    reason: FinishReason
    in_step: bool


class Pinned(NamedTuple):
    engine: int
    step: int
    contents: tuple[int, ...]


class Swept(NamedTuple):
    engine: int
    step: int
    contents: tuple[int, ...]


class CacheReset(NamedTuple):
    engine: int
    step: int


class Record(NamedTuple):
    engine: int
    record: bytes
    mark: bytes


class Turn(NamedTuple):
    place: int
    mask: int
    duration_us: int
    gap_us: int
    stepped: bool


class Idle(NamedTuple):
    pass


class Closed(NamedTuple):
    engine: int
    num_steps: int
    open_record: bytes
    digest: bytes


class GoesOn(NamedTuple):
    pass


class End(NamedTuple):
    engines: tuple[Closed, ...]


class RequestEntry(NamedTuple):
    engine: int
    seq_id: int
    request: bytes
    """As `content.decode_request` takes it."""


class Tokens(NamedTuple):
    engine: int
    tokens: tuple[tuple[int, ...], ...]


Command = Added | Aborted | Pinned | Swept | CacheReset
Entry = (
    Header
    | EngineEntry
    | Checkpoint
    | SeatsEntry
    | Priorities
    | Came
    | Command
    | Record
    | Turn
    | Idle
    | Closed
    | GoesOn
    | End
    | RequestEntry
    | Tokens
)


class EntryReader:
    """Reads the frames of one file in order."""

    def __init__(self) -> None:
        self._data = b""
        self._at = 0
        self._place = 0
        self._mask = 0
        self.has_ended = False
        """Whether the file's last entry was read."""
        self.goes_on = False
        """Whether the file says that another follows."""

    def read(self, frame: bytes) -> Iterator[Entry]:
        """The entries of a frame.

        Raises:
            IndexError: it ends within an entry; those before were yielded.
            ValueError, msgspec.MsgspecError: it is no frame of ours.
        """
        self._data, self._at = frame, 0
        while self._at < len(self._data):
            yield self._entry(Kind(self._byte()))

    @property
    def offset(self) -> int:
        """Bytes of the frame that were read."""
        return self._at

    def _entry(self, kind: Kind) -> Entry:
        match kind:
            case Kind.TURN:
                return self._turn()
            case Kind.RECORD:
                return Record(self._int(), self._bytes(), self._raw(MARK_BYTES))
            case Kind.ADDED:
                return self._added()
            case Kind.CAME:
                return Came(self._int(), self._int(), self._int(), self._sint(), self._int(), self._int())
            case Kind.ABORTED:
                return self._aborted()
            case Kind.PINNED:
                return Pinned(self._int(), self._int(), self._ids())
            case Kind.SWEPT:
                return Swept(self._int(), self._int(), self._ids())
            case Kind.RESET:
                return CacheReset(self._int(), self._int())
            case Kind.IDLE:
                return Idle()
            case Kind.TOKENS:
                engine = self._int()
                return Tokens(engine, tuple(tuple(self._ints(self._int())) for _ in range(self._count())))
        return self._rare(kind)

    def _rare(self, kind: Kind) -> Entry:
        match kind:
            case Kind.HEADER:
                return Header(self._doc())
            case Kind.ENGINE:
                return EngineEntry(self._doc())
            case Kind.CHECKPOINT:
                return Checkpoint(self._int(), self._doc(list[Any]), self._doc(list[Any]))
            case Kind.SEATS:
                return SeatsEntry(*self._doc(tuple[int, list[tuple[str, int, int, int]]]))
            case Kind.PRIORITIES:
                return Priorities(tuple((self._int(), self._sint()) for _ in range(self._count())))
            case Kind.CLOSED:
                return self._closed()
            case Kind.GOES_ON:
                self.goes_on = True
                return GoesOn()
            case Kind.END:
                self.has_ended = True
                return End(tuple(self._closed() for _ in range(self._count())))
        assert kind is Kind.REQUEST, f"{kind.name} has no reader"
        return RequestEntry(self._int(), self._int(), self._bytes())

    def _turn(self) -> Turn:
        head = self._int()
        gap_us = self._int()
        if head & OTHER_PLACE:
            self._place = self._int()
        if head & OTHER_MASK:
            self._mask = self._int()
        return Turn(self._place, self._mask, head >> 3, gap_us, bool(head & STEPPED))

    def _added(self) -> Added:
        engine, step, seq_id, prompt, output, flags = self._ints(6)
        priority, tenant, contents = self._sint(), self._int(), self._ids()
        return Added(
            engine,
            step,
            seq_id,
            prompt,
            output - 1 if output else None,
            bool(flags & READS_CACHE),
            bool(flags & ALLOWS_FORCED),
            priority,
            tenant,
            contents,
            self._int() if flags & HAS_SIBLING else None,
        )

    def _aborted(self) -> Aborted:
        engine, step, seq_id, how = self._ints(4)
        if how >> 1 >= len(REASONS):
            raise ValueError(f"{how >> 1} is no reason")
        return Aborted(engine, step, seq_id, REASONS[how >> 1], bool(how & 1))

    def _closed(self) -> Closed:
        return Closed(self._int(), self._int(), self._bytes(), self._raw(DIGEST_BYTES))

    # -- what entries are made of -------------------------------------------------------------------------------------

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _int(self) -> int:
        data, at = self._data, self._at
        byte = data[at]
        at += 1
        value, shift = byte & 127, 7
        while byte > 127:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if shift > MAX_INT_BITS:
                raise ValueError("a number that never ends")
        self._at = at
        return value

    def _sint(self) -> int:
        return unsigned(self._int())

    def _ints(self, count: int) -> list[int]:
        return [self._int() for _ in range(count)]

    def _count(self) -> int:
        """Of things that take a byte each at least."""
        count = self._int()
        if count > len(self._data):
            raise IndexError(f"{count} things in {len(self._data)} bytes")
        return count

    def _raw(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise IndexError(f"{count} bytes from {start} of {len(self._data)}")
        return self._data[start : self._at]

    def _bytes(self) -> bytes:
        return self._raw(self._int())

    def _doc(self, kind: Any = dict[str, Any]) -> Any:
        return msgspec.msgpack.decode(self._bytes(), type=kind)

    def _ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for _ in range(self._count()):
            first = self._sint() + (ids[-1] + 1 if ids else 0)
            length = self._int()
            if first < 0 or length + len(ids) > MAX_RUN:
                raise ValueError(f"a run of {length} ids from {first}")
            ids.extend(range(first, first + length))
        return tuple(ids)
