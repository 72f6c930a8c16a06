"""Entries of a recording: their fields and their meaning, for writers and readers.

A recording is a sequence of files of chunks (`lockstep.worker.flight.chunks`). An entry is an array: its tag, then the
fields of its class below, in order. Each file begins with a chunk that contains only its `Header`. The state of all
engines follows, so that a file can be read without the files before it.

- Engines are numbered in the order of their first use of the device.
- A ``step`` is the number of steps of its engine that had begun before the entry's command. A command takes effect
  before the step of that number is decided or, if ``in_step`` is true, during the step before it.
- Block hashes and tenants are replaced by numbers in order of first use; a number has one meaning in all files of a
  run. ``runs`` contain such numbers: first and length of each run of consecutive ones.

Recordings of plans and of routes have the same file format, with the same `Header` and `End`, and entries of their own
between these (`lockstep.cluster.plan_recorder`, `lockstep.cluster.route_recorder`).

The schema's number increases with every change of any entry. Files with other schemas are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.worker.device_scheduler import CreditRow

SCHEMA_VERSION = 14
SUFFIX = ".lstrace"
"""Suffix of the names of recording files."""
MARK_BYTES = 4
"""Length of the part of the chain that follows each record, in bytes. A damaged record remains undetected with a
probability of 1 in 4e9, and then only until the next record. In a measurement on a stub with 8 streams, a step takes
7.6 bytes without marks, 8.1 with 2 bytes, 8.4 with 4 and 9.1 with all 8."""
MAX_RUN = 1 << 24
"""Maximum number of ids in a list of runs; no context has as many blocks."""
Runs = tuple[int, ...]


class EntryStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of the entries of all kinds of recordings."""


# -- the beginning of a file ------------------------------------------------------------------------------------------


class Header(EntryStruct, frozen=True, tag=1):
    """First entry of a file: its run, and its number within the run. The files of a run are numbered from 1 without
    gaps."""

    schema: int
    lockstep: str
    """Version of Lockstep that recorded the file."""
    run: str
    file: int
    has_content: bool = False
    """True if the recording contains prompts and answers."""
    machine: str = ""
    is_simulated: bool = False
    """True if a replay wrote the file, so that its times are logical ones."""
    key_name: str = ""
    """Name of the key of the digests (`lockstep.worker.flight.content`). Digests of recordings with the same key name
    can be compared. Empty: there are no digests, as in the recording of a replay."""
    gap: str = ""
    """Reason why the part before this file could not be written; empty: nothing is missing before it."""


class EngineEntry(EntryStruct, frozen=True, tag=2):
    """An engine of the device."""

    number: int
    key: str
    """Key of the engine's replica, as in its worker."""
    name: str
    """Name of the engine's model."""
    fingerprint: str
    """Fingerprint of the artifact's content."""
    config: SchedulerConfig
    environment: dict[str, str]
    """Environment that affects the bits of the answers."""
    machine: dict[str, str]
    """Environment that affects only the speed, apart from the processor: instruction set and threads."""
    bytes_per_block: int
    text: str = ""
    """Name of the model's vocabulary and template, which are stored in the same folder
    (`lockstep.worker.flight.content.read_text`); empty: they are not stored."""
    num_stages: int = 1
    """Positions of each prompt token (`lockstep.executors.base.Geometry`)."""
    speculation: str = ""
    """Configuration of drafts and the measured prices on which their numbers depend, as JSON; empty: no drafts."""


class _WithContents:
    """Common part of entries with block hashes."""

    __slots__ = ()
    runs: Runs

    def __post_init__(self) -> None:
        check_runs(self.runs)

    @property
    def contents(self) -> tuple[int, ...]:
        """Numbers of the block hashes."""
        return ids_of(self.runs)


class Checkpoint(EntryStruct, _WithContents, frozen=True, tag=3):
    """State of an engine at the beginning of a file; absent for an engine without any request so far."""

    engine: int
    version: int
    """`lockstep.core.state.STATE_VERSION` of the recording version of Lockstep."""
    runs: Runs
    """Block hashes of the state, as runs."""
    tenants: tuple[int, ...]
    scheduler: msgspec.Raw
    """Encoded `SchedulerState` without hashes and tenants."""
    fingerprint: msgspec.Raw
    """Encoded `FingerprintState`."""


class CreditsEntry(EntryStruct, frozen=True, tag=4):
    """State of the device's scheduler (`lockstep.worker.device_scheduler`) at the beginning of a file."""

    num_turns: int
    credits: list[CreditRow]


class Priorities(EntryStruct, frozen=True, tag=5):
    """Replicas that are loaded, and their priority classes."""

    classes: tuple[tuple[int, int], ...]
    """Pairs of engine number and priority class, in order of loading."""


# -- commands ---------------------------------------------------------------------------------------------------------


class Added(EntryStruct, _WithContents, frozen=True, tag=6):
    """A sequence was queued."""

    engine: int
    step: int
    seq_id: int
    request: Request
    """The request without block hashes and tenant."""
    tenant: int
    runs: Runs
    """Block hashes of the request, as runs."""

    @classmethod
    def of(cls, engine: int, step: int, seq_id: int, request: Request, tenant: int, contents: Iterable[int]) -> Added:
        """Make an entry from a request, and numbers for its tenant and its block hashes."""
        bare = Request(
            request.num_prompt_tokens,
            request.max_output_tokens,
            priority=request.priority,
            reads_cache=request.reads_cache,
            allows_forced=request.allows_forced,
            sibling_of=request.sibling_of,
            snapshots=request.snapshots,
            is_bulk=request.is_bulk,
        )
        return cls(engine, step, seq_id, bare, tenant, runs_of(contents))


class Arrival(EntryStruct, frozen=True, tag=7):
    """Arrival time and seed of the sequence that was just added."""

    engine: int
    seq_id: int
    waited_us: int
    """Time in microseconds from the request's arrival to the turn in which the sequence was added."""
    seed: int
    """Seed of the request, drawn if the request set none; sibling ``i`` samples with ``seed + i``."""
    deadline_ms: int | None = None
    queue_deadline_ms: int | None = None


class RequestDigest(EntryStruct, frozen=True, tag=20):
    """Digest of the request whose first sequence was just added, without any of its text."""

    engine: int
    seq_id: int
    prompt: bytes
    """Keyed digest of the prompt (`lockstep.worker.flight.content`); `parameters` has one of the sampling
    parameters."""
    parameters: bytes
    external_id: str
    """Caller's id of the request. One HTTP request may become several recorded requests."""
    segment: str
    """Caller's label for the part of the traffic that the request belongs to; empty: none."""
    draws: bool = True
    """True if the seed affects the answer; False for a greedy request."""
    adapter: str = ""
    """Name of the request's adapter; empty: none."""
    adapter_fingerprint: str = ""
    """Fingerprint of the content that the name had."""


class OutputDigest(EntryStruct, frozen=True, tag=21):
    """End of a sequence, and a digest of its output."""

    engine: int
    seq_id: int
    reason: FinishReason
    num_tokens: int
    output: bytes
    """Keyed digest of the sequence's tokens, or of its vector."""


class Aborted(EntryStruct, frozen=True, tag=8):
    """A command ended a sequence."""

    engine: int
    step: int
    seq_id: int
    reason: FinishReason
    in_step: bool


class Named(EntryStruct, _WithContents, frozen=True, tag=23):
    """The full blocks of an answer got hashes, so that they can be hit when their sequence has ended."""

    engine: int
    step: int
    seq_id: int
    runs: Runs
    """Hashes of the answer's blocks, which follow those of the prompt, as runs."""
    in_step: bool


class _Cached(EntryStruct, _WithContents, frozen=True):
    engine: int
    step: int
    runs: Runs


class Pinned(_Cached, frozen=True, tag=9):
    """A session's blocks were pinned, so that they are evicted last."""

    borders: tuple[int, ...] = ()
    """Numbers of blocks after which windows and states are kept, too."""


class Unpinned(_Cached, frozen=True, tag=10):
    """A session's blocks were unpinned."""

    borders: tuple[int, ...] = ()


class Filled(_Cached, frozen=True, tag=22):
    """Blocks were filled with contents of a chain that were loaded from outside the pool."""

    start: int
    """Index in the chain of the first loaded block."""
    group: int = 0
    """Number of the KV group."""


class CacheReset(EntryStruct, frozen=True, tag=11):
    """The prefix cache was cleared."""

    engine: int
    step: int


class Proposed(EntryStruct, frozen=True, tag=27):
    """Drafts were proposed for the next step."""

    engine: int
    step: int
    drafts: tuple[tuple[int, int], ...]
    """Pairs of sequence and number of drafts."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of the drafts of each sequence, only with content."""


# -- steps and turns --------------------------------------------------------------------------------------------------


class Record(EntryStruct, frozen=True, tag=12):
    """A record of the fingerprint, written when it is closed, which can be any time after the turn of its steps."""

    engine: int
    record: bytes
    mark: bytes
    """First bytes of the chain after the record."""


class Turn(EntryStruct, frozen=True, tag=13):
    """A replica's turn has ended."""

    place: int
    """Index of the replica in the last `Priorities`."""
    duration_us: int
    gap_us: int
    """Time since the previous turn, in microseconds."""
    stepped: bool
    """True if a step began in the turn."""


class WithWork(EntryStruct, frozen=True, tag=14):
    """Indexes of the replicas that have work in the following turns. Before the first such entry, only replica 0 has
    work."""

    places: tuple[int, ...]


class Idle(EntryStruct, frozen=True, tag=15):
    """No engine had work, for the first time since a turn or a change of priorities."""


class Closed(EntryStruct, frozen=True, tag=16):
    """Position of an engine when it is unloaded or the file ends."""

    engine: int
    num_steps: int
    """Number of steps that had begun."""
    open_record: bytes
    """Bytes of the open record of the fingerprint; empty: none is open."""
    digest: bytes
    """Digest of the chain, including the open record."""

    @classmethod
    def of(cls, engine: int, num_steps: int, fingerprint: Fingerprint) -> Closed:
        """Make the entry from an engine's step count and fingerprint."""
        return cls(engine, num_steps, fingerprint.open_record or b"", bytes.fromhex(fingerprint.hexdigest()))


class End(EntryStruct, frozen=True, tag=17):
    """The last entry of a file."""

    engines: tuple[Closed, ...]
    goes_on: bool
    """True if another file of the run follows."""


# -- with content only ------------------------------------------------------------------------------------------------


class RequestEntry(EntryStruct, frozen=True, tag=18):
    """A whole request, recorded after its first sequence was added."""

    engine: int
    seq_id: int
    request: bytes
    """Request as bytes for `lockstep.worker.flight.content.decode_request`."""


class Tokens(EntryStruct, frozen=True, tag=19):
    """Tokens of each row that sampled in the engine's last step."""

    engine: int
    tokens: tuple[tuple[int, ...], ...]


class Shown(EntryStruct, frozen=True, tag=24):
    """Chunks in which a streamed answer was sent to its client, recorded when the stream had ended."""

    engine: int
    seq_id: int
    """Id of the first sequence of the request."""
    chunks: tuple[tuple[int, int, int], ...]
    """Sent chunks: (index of the completion, number of new tokens, microseconds since the previous chunk, or for the
    first chunk since the arrival of the request)."""


class Vector(EntryStruct, frozen=True, tag=26):
    """Vector of a sequence that has ended: an embedding, the scores of a classifier, or logits of chosen tokens."""

    engine: int
    seq_id: int
    numbers: bytes
    """Floats of four bytes, little-endian."""


class Dispatched(EntryStruct, frozen=True, tag=25):
    """Decision by nearest examples, recorded when the vector of the message had been computed."""

    engine: int
    """Engine of the embedding model."""
    seq_id: int
    """Sequence that computed the vector."""
    target: str
    """Id of the model that answers; empty: the fallback."""
    scores: tuple[tuple[str, float], ...]
    """Best cosine of each model's examples, in order of definition."""


Command = Added | Aborted | Named | Pinned | Unpinned | Filled | CacheReset | Proposed
Entry = (
    Header
    | EngineEntry
    | Checkpoint
    | CreditsEntry
    | Priorities
    | Arrival
    | RequestDigest
    | OutputDigest
    | Command
    | Record
    | Turn
    | WithWork
    | Idle
    | Closed
    | End
    | RequestEntry
    | Tokens
    | Shown
    | Vector
    | Dispatched
)


def runs_of(ids: Iterable[int]) -> Runs:
    """Encode ids as runs of consecutive ones: first, length, first, length..."""
    runs: list[int] = []
    after = -1
    for number in ids:
        if number == after:
            runs[-1] += 1
        else:
            runs += (number, 1)
        after = number + 1
    return tuple(runs)


def ids_of(runs: Runs) -> tuple[int, ...]:
    """Decode runs as `runs_of` makes them: first and length of each."""
    return tuple([number for at in range(0, len(runs), 2) for number in range(runs[at], runs[at] + runs[at + 1])])


def check_runs(runs: Runs) -> None:
    """Reject malformed runs, and runs of more than `MAX_RUN` ids, which would take too much memory to decode.

    Raises:
        ValueError: the runs are malformed or too long.
    """
    if len(runs) % 2 or min(runs, default=0) < 0 or sum(runs[1::2]) > MAX_RUN:
        raise ValueError(f"{runs[:2]}... are not valid runs of numbers")
