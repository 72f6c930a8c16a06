"""Entries of a recording: what is written, what is read, and what both mean.

A recording is a sequence of files of chunks (`lockstep.worker.flight.chunks`). An entry is an array: its tag, then the
fields of its class below, in order. Each file begins with a chunk that holds its `Header` alone, and then with the
state of everything, so that it can be understood without those before it.

- Engines are numbered in the order in which they first had to do with the device.
- A ``step`` is how many steps of its engine had begun before the entry's command. A command takes effect before the
  step of that number is decided, or, where ``in_step`` is reported, while the step before it is under way.
- Block hashes and tenants are numbered as they come, and equal numbers mean equal things in all files of one run.
  Neither is ever written. ``runs`` are such numbers: first and length of each run of consecutive ones.

Recordings of plans and of routes have the same files, with the same `Header` and `End`, and between these entries of
their own (`lockstep.cluster.plan_recorder`, `lockstep.cluster.route_recorder`).

The schema's number grows with every change of any entry; other schemas are refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.worker.device_scheduler import CreditRow

SCHEMA_VERSION = 12
SUFFIX = ".lstrace"
"""Of a recording's files."""
MARK_BYTES = 4
"""Of the chain, after each record: a damaged one goes unseen once in 4e9, and then the next one does not. Measured on a
stub with 8 streams, a step takes 7.6 bytes without, 8.1 with 2, 8.4 with 4 and 9.1 with all 8."""
MAX_RUN = 1 << 24
"""Numbers in one list of runs: no context has as many blocks."""
Runs = tuple[int, ...]


class EntryStruct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all entries, of every kind of recording."""


# -- the beginning of a file ------------------------------------------------------------------------------------------


class Header(EntryStruct, frozen=True, tag=1):
    """Head of a file: its run, and its number there. Files of a run are counted from 1 without a hole."""

    schema: int
    lockstep: str
    """The version that recorded it."""
    run: str
    file: int
    has_content: bool = False
    """Whether it holds prompts and answers."""
    machine: str = ""
    is_simulated: bool = False
    """Whether a replay wrote it: its times are logical ones."""
    key_name: str = ""
    """Of the key of its digests (`lockstep.worker.flight.content`), which compare with those under a key of this name.
    Empty: it has no digests, as a simulated one."""
    gap: str = ""
    """Why what came before could not be written; empty: it was, or nothing did."""


class EngineEntry(EntryStruct, frozen=True, tag=2):
    """An engine of the device."""

    number: int
    key: str
    """The replica that it is, as its worker calls it."""
    name: str
    """Of its model."""
    fingerprint: str
    """Of its artifact's content."""
    config: SchedulerConfig
    environment: dict[str, str]
    """What the bits of its answers depend on."""
    machine: dict[str, str]
    """What its speed depends on beside the processor: instruction set and threads."""
    bytes_per_block: int
    text: str = ""
    """Name of its vocabulary and template, which lie beside the files (`lockstep.worker.flight.content.read_text`);
    empty: not kept."""
    num_stages: int = 1
    """Positions of each prompt token (`lockstep.executors.base.Geometry`)."""


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
    """An engine's state where a file begins; none for an engine without a request so far."""

    engine: int
    version: int
    """`lockstep.core.state.STATE_VERSION` of who recorded it."""
    runs: Runs
    """The state's block hashes."""
    tenants: tuple[int, ...]
    scheduler: msgspec.Raw
    """A `SchedulerState` without hashes and tenants."""
    fingerprint: msgspec.Raw
    """A `FingerprintState`."""


class CreditsEntry(EntryStruct, frozen=True, tag=4):
    """State of the device's turns (`lockstep.worker.device_scheduler`), at the beginning of a file."""

    num_turns: int
    credits: list[CreditRow]


class Priorities(EntryStruct, frozen=True, tag=5):
    """Replicas that are loaded, and their priority classes."""

    classes: tuple[tuple[int, int], ...]
    """(engine, class) in order of loading."""


# -- commands ---------------------------------------------------------------------------------------------------------


class Added(EntryStruct, _WithContents, frozen=True, tag=6):
    """A sequence was queued."""

    engine: int
    step: int
    seq_id: int
    request: Request
    """Without block hashes and tenant."""
    tenant: int
    runs: Runs
    """Its block hashes."""

    @classmethod
    def of(cls, engine: int, step: int, seq_id: int, request: Request, tenant: int, contents: Iterable[int]) -> Added:
        """A request, with numbers for its tenant and its block hashes."""
        bare = Request(
            request.num_prompt_tokens,
            request.max_output_tokens,
            priority=request.priority,
            reads_cache=request.reads_cache,
            allows_forced=request.allows_forced,
            sibling_of=request.sibling_of,
            is_bulk=request.is_bulk,
        )
        return cls(engine, step, seq_id, bare, tenant, runs_of(contents))


class Arrival(EntryStruct, frozen=True, tag=7):
    """Origin of the sequence that was just added: when its request came, and what it draws with."""

    engine: int
    seq_id: int
    waited_us: int
    """From the request's arrival to the turn in which it was added."""
    seed: int
    """Of its request, drawn where none was named; sibling ``i`` draws with ``seed + i``."""
    deadline_ms: int | None = None
    queue_deadline_ms: int | None = None


class RequestDigest(EntryStruct, frozen=True, tag=20):
    """Request of the sequence that was just added, the first of it, without a word of its text."""

    engine: int
    seq_id: int
    prompt: bytes
    """Keyed digests, as `lockstep.worker.flight.content` makes them."""
    parameters: bytes
    external_id: str
    """The caller's name for it; one HTTP request may be several here."""
    segment: str
    """The caller's label for the part of the traffic that it belongs to; empty: none."""
    draws: bool = True
    """Whether its seed decides anything; a greedy request draws nothing."""


class OutputDigest(EntryStruct, frozen=True, tag=21):
    """End of a sequence, and a digest of its output."""

    engine: int
    seq_id: int
    reason: FinishReason
    num_tokens: int
    output: bytes
    """Keyed digest of its tokens, or of its vector."""


class Aborted(EntryStruct, frozen=True, tag=8):
    """A sequence was ended by a command."""

    engine: int
    step: int
    seq_id: int
    reason: FinishReason
    in_step: bool


class Named(EntryStruct, _WithContents, frozen=True, tag=23):
    """The full blocks of an answer were named, so that they can be hit when their sequence has ended."""

    engine: int
    step: int
    seq_id: int
    runs: Runs
    """Hashes of the blocks behind those of the prompt."""
    in_step: bool


class _Cached(EntryStruct, _WithContents, frozen=True):
    engine: int
    step: int
    runs: Runs


class Pinned(_Cached, frozen=True, tag=9):
    """Blocks of a session are to be evicted last."""


class Unpinned(_Cached, frozen=True, tag=10):
    """Blocks of a session are given up."""


class Filled(_Cached, frozen=True, tag=22):
    """Blocks were given to contents of a chain that came from where they are kept outside of the pool."""

    start: int
    """Place in the chain from which on contents came."""


class CacheReset(EntryStruct, frozen=True, tag=11):
    """The prefix cache was forgotten."""

    engine: int
    step: int


# -- steps and turns --------------------------------------------------------------------------------------------------


class Record(EntryStruct, frozen=True, tag=12):
    """A record of the fingerprint, written when it closes: any time after the turn of its steps."""

    engine: int
    record: bytes
    mark: bytes
    """The first bytes of the chain after it."""


class Turn(EntryStruct, frozen=True, tag=13):
    """A replica's turn has ended."""

    place: int
    """Of the replica in the last `Priorities`."""
    duration_us: int
    gap_us: int
    """Since the turn before."""
    stepped: bool
    """Whether a step began."""


class WithWork(EntryStruct, frozen=True, tag=14):
    """Places of the replicas that have work in the turns that follow; until there is one, only place 0 has."""

    places: tuple[int, ...]


class Idle(EntryStruct, frozen=True, tag=15):
    """No engine had work, for the first time since a turn or a change of priorities."""


class Closed(EntryStruct, frozen=True, tag=16):
    """Position of an engine when it is unloaded, or the file ends."""

    engine: int
    num_steps: int
    """That had begun."""
    open_record: bytes
    """Empty: none is open."""
    digest: bytes
    """The chain with it."""

    @classmethod
    def of(cls, engine: int, num_steps: int, fingerprint: Fingerprint) -> Closed:
        """The position of an engine and its fingerprint."""
        return cls(engine, num_steps, fingerprint.open_record or b"", bytes.fromhex(fingerprint.hexdigest()))


class End(EntryStruct, frozen=True, tag=17):
    """The last entry of a file."""

    engines: tuple[Closed, ...]
    goes_on: bool
    """Whether another file follows."""


# -- with content only ------------------------------------------------------------------------------------------------


class RequestEntry(EntryStruct, frozen=True, tag=18):
    """The whole request, after its first sequence was added."""

    engine: int
    seq_id: int
    request: bytes
    """As `lockstep.worker.flight.content.decode_request` takes it."""


class Tokens(EntryStruct, frozen=True, tag=19):
    """Tokens of each row that sampled in the engine's last step."""

    engine: int
    tokens: tuple[tuple[int, ...], ...]


class Shown(EntryStruct, frozen=True, tag=24):
    """Chunks in which a streamed answer was sent to its client, recorded when it had ended."""

    engine: int
    seq_id: int
    """First sequence of its request."""
    chunks: tuple[tuple[int, int, int], ...]
    """(completion of ``n``, its tokens that are new, microseconds since the chunk before, or since the request came)"""


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


Command = Added | Aborted | Named | Pinned | Unpinned | Filled | CacheReset
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
    """Numbers as runs of consecutive ones: first, length, first, length..."""
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
    """Numbers of runs: first and length of each, as `runs_of` makes them."""
    return tuple([number for at in range(0, len(runs), 2) for number in range(runs[at], runs[at] + runs[at + 1])])


def check_runs(runs: Runs) -> None:
    """Refuse runs that are none, or more than there can be, whatever a file states.

    Raises:
        ValueError: they are none.
    """
    if len(runs) % 2 or min(runs, default=0) < 0 or sum(runs[1::2]) > MAX_RUN:
        raise ValueError(f"{runs[:2]}... are no runs of numbers")
