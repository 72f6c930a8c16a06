"""The bytes of a recording.

A recording is a sequence of files, each a sequence of zstd frames with checksums (``zstd -d`` reads it). What they hold
is a sequence of entries; none reaches over the end of a frame. Each file begins with the state of everything, so each
can be understood without those before it.

- ``int`` is an unsigned LEB128 number: 7 bits per byte, lowest first, the high bit set on all but the last byte.
- ``sint`` is the int ``2 * n`` of a number that is not negative, and ``-2 * n - 1`` of one that is.
- ``bytes`` is an int, their number, and the bytes. ``doc`` is bytes that hold one msgpack value.
- ``ids`` is an int, the number of runs, and for each an sint, its first id less the one after the run before (in the
  beginning: less 0), and an int, its length. Ids stand for block hashes and for tenants; they are counted as they come,
  and equal ids mean equal things in all files of one run. Neither hashes nor tenants are ever written.
- An engine is an int, its number; engines are counted in the order in which they first had to do with the device.
- A step is an int: the steps of its engine that had begun before the entry's command. A command takes effect before
  the step of that number is decided, or, where ``in_step`` is said, while the step before it is under way.

An entry is one byte, its kind, and what that kind has:

    1  HEADER      doc                    a map: schema, lockstep, run, file, has_content, machine, or in its place
                                          simulated (true), and gap, where what came before could not be written: why;
                                          the first of each file. Files of a run are counted from 1 without a hole
    2  ENGINE      doc                    a map: number, key, name, fingerprint, config, geometry, environment
    3  CHECKPOINT  engine doc doc         scheduler and fingerprint, as in core/checkpoint.py: hashes and tenants as ids
    4  SEATS       doc                    [turns, [[key, grant_us, credit_us, last_turn], ...]], the device scheduler
    5  PRIORITIES  int (engine sint)*     who is loaded, in order, and in which class
    6  ADDED       engine step int(id) int(prompt tokens) int(most output tokens + 1; 0: as many as fit) int(flags)
                   sint(priority) int(tenant) ids [int(id of the first sibling)]
                   flags: 1 reads_cache, 2 allows_forced, 4 has a sibling
    7  CAME        engine int(id) int(us that it waited) sint(seed) int(deadline in ms; 0: none) int(queue's, the same)
    8  ABORTED     engine step int(id) int(2 * reason + in_step)        reason counts FinishReason from 0
    9  PINNED      engine step ids
    10 SWEPT       engine step ids
    11 RESET       engine step            the prefix cache
    12 RECORD      engine bytes digest    a record of core/fingerprint.py and the first 4 bytes of the chain after it
    13 TURN        int(8 * us + flags) int(us since the turn before) [int(place)] [int(mask)]
                   flags: 1 a step began, 2 another place than in the turn before, 4 another mask
                   the turn of the replica at this place of the last PRIORITIES; bit n of the mask: that at place n had
                   work. In the beginning of a file place and mask are 0
    14 IDLE                               nobody had work, for the first time since a turn or a change of priorities
    15 CLOSED      engine int(steps) bytes digest8
    16 END         int (engine int(steps) bytes digest8)*
                   the steps that had begun, the open record (empty: none) and the whole chain with it: at the unloading
                   of an engine, and at the end of a file for each
    17 REQUEST     engine int(id) doc     with content only: engine/outputs.py's GenerationRequest; see content.py
    18 TOKENS      engine int (int int*)* with content only: for each row that sampled in the engine's last step, what
                   it got
    19 GOES_ON                            before END, where another file follows; since schema 2

Between a step's RECORD and its TURN there may be any distance: a record is written when it closes. The schema's number
grows with every change of this; older ones are read, newer ones refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from lockstep.core.fingerprint import leb128
from lockstep.core.request import Request

SCHEMA_VERSION = 2
SUFFIX = ".lstrace"
"""Of a recording's files."""
MARK_BYTES = 4
"""Of the chain, after each record: a damaged one goes unseen once in 4e9, and then the next one does not. Measured on a
stub with 8 streams, a step takes 7.6 bytes without, 8.1 with 2, 8.4 with 4 and 9.1 with all 8."""
DIGEST_BYTES = 8


class Kind(IntEnum):
    """What an entry is."""

    HEADER = 1
    ENGINE = 2
    CHECKPOINT = 3
    SEATS = 4
    PRIORITIES = 5
    ADDED = 6
    CAME = 7
    ABORTED = 8
    PINNED = 9
    SWEPT = 10
    RESET = 11
    RECORD = 12
    TURN = 13
    IDLE = 14
    CLOSED = 15
    END = 16
    REQUEST = 17
    TOKENS = 18
    GOES_ON = 19


READS_CACHE, ALLOWS_FORCED, HAS_SIBLING = 1, 2, 4
STEPPED, OTHER_PLACE, OTHER_MASK = 1, 2, 4


def put_ints(out: bytearray, *values: int) -> None:
    """Append ints."""
    out += leb128(values)


def put_bytes(out: bytearray, data: bytes) -> None:
    """Append bytes with their number."""
    put_ints(out, len(data))
    out += data


def signed(value: int) -> int:
    """A number as the int that an sint is."""
    return 2 * value if value >= 0 else -2 * value - 1


def unsigned(value: int) -> int:
    """The other way."""
    return value >> 1 if value & 1 == 0 else -(value >> 1) - 1


def put_ids(out: bytearray, ids: Iterable[int]) -> None:
    """Append ids, as runs of consecutive ones."""
    runs: list[int] = []
    after = 0
    for number in ids:
        if runs and number == after:
            runs[-1] += 1
        else:
            runs += (signed(number - after), 1)
        after = number + 1
    put_ints(out, len(runs) // 2, *runs)


def put_request(out: bytearray, step: int, seq_id: int, request: Request, tenant: int, contents: Iterable[int]) -> None:
    """Append what follows an ADDED entry's engine."""
    sibling = request.sibling_of
    output = 0 if request.max_output_tokens is None else request.max_output_tokens + 1
    flags = READS_CACHE * request.reads_cache + ALLOWS_FORCED * request.allows_forced
    flags += HAS_SIBLING * (sibling is not None)
    put_ints(out, step, seq_id, request.num_prompt_tokens, output, flags, signed(request.priority), tenant)
    put_ids(out, contents)
    if sibling is not None:
        put_ints(out, sibling)
