"""Rerun of an engine's recording: applies the recorded commands to a new scheduler, and compares all decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import compress
from typing import NamedTuple, NoReturn

import msgspec

from lockstep.core.fingerprint import Fingerprint, chained, row_tables, split_tables
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import FinishedSequence
from lockstep.core.state import STATE_VERSION, FingerprintState, SchedulerState
from lockstep.core.step import Chunk, Explain, StepEvents, StepPlan, StepResult
from lockstep.errors import LockstepError, TraceError
from lockstep.replay.verify_report import DivergedError
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    CacheReset,
    Checkpoint,
    Closed,
    Command,
    Filled,
    Named,
    Pinned,
    Proposed,
    Record,
    Unpinned,
)

SchedulerOf = Callable[[SchedulerConfig], Scheduler]
CONTENT_BYTES = 16


_REASONS = tuple(FinishReason)
_FAILED, _WITH_DRAFTS = 2, 2
Pair = tuple[int, int]


class Timing(NamedTuple):
    """Time of a step, in microseconds from the beginning of its run."""

    start_us: int
    duration_us: int
    gap_us: int
    is_after_idle: bool


class DecidedStep(NamedTuple):
    """One step, decided again as it was recorded."""

    engine: int
    plan: StepPlan
    result: StepResult | None
    """Result of the step; None, like ``events``: the step failed."""
    events: StepEvents | None
    finished: tuple[FinishedSequence, ...]
    timing: Timing
    tokens: Mapping[int, tuple[int, ...]]
    """Tokens of each sequence that sampled; empty if the recording has no content."""


class AppliedCommand(NamedTuple):
    """A command that was applied again."""

    engine: int
    command: Command
    finished: tuple[FinishedSequence, ...]
    """Sequences that the command ended."""


EngineEvent = DecidedStep | AppliedCommand


def content_of(number: int) -> bytes:
    """Block hash in replays: the id, little-endian."""
    return number.to_bytes(CONTENT_BYTES, "little")


def request_of(added: Added) -> Request:
    """Core request with the recorded lengths and the hashes of replays."""
    return replace(added.request, block_hashes=tuple(map(content_of, added.contents)), tenant=str(added.tenant))


def apply_to_cache(scheduler: Scheduler, command: Command, hash_of: Callable[[int], bytes]) -> None:
    """Apply a command on the prefix cache.

    Args:
        hash_of: returns the block hash of a content id.
    """
    match command:
        case Pinned():
            scheduler.pin([hash_of(content) for content in command.contents], command.borders)
        case Unpinned():
            scheduler.sweep([hash_of(content) for content in command.contents], command.borders)
        case Filled():
            scheduler.fill([hash_of(content) for content in command.contents], command.start, command.group)
        case CacheReset():
            scheduler.reset_prefix_cache()


class EngineRerun:
    """A scheduler that decides the steps of one engine again.

    Block hashes and tenants are derived from their ids: they are equal exactly if the original ones were.
    """

    def __init__(self, number: int, config: SchedulerConfig, scheduler_of: SchedulerOf = Scheduler) -> None:
        self.number = number
        self.config = config
        self.scheduler = scheduler_of(config)
        self.num_steps = 0
        """Number of steps decided again so far."""
        self.timings: deque[Timing] = deque()
        """Timings of steps whose records follow later: a turn is recorded at its end, a record when it closes."""
        self.tokens: deque[tuple[tuple[int, ...], ...]] = deque()
        """Tokens of steps whose records follow later, for each row that sampled."""
        self.explain: Explain | None = None
        """Called with the reasons why a step passes sequences over, from the next step on."""
        self._fingerprint = Fingerprint()
        self._next_step = 0
        self._commands: deque[Command] = deque()
        self._is_open = False
        """True if the next record may be the one that is open in the fingerprint, with more repeats."""

    @property
    def num_begun(self) -> int:
        """Number of steps that the engine had begun, including those before its first checkpoint."""
        return self._next_step

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the steps decided again."""
        return self._fingerprint.hexdigest()

    def command(self, command: Command) -> None:
        """Store a command until the step that it names."""
        self._commands.append(command)

    def apply(self, command: Command) -> None:
        """Apply a command to the scheduler.

        Raises:
            DivergedError: its effect differs from the recorded one.
        """
        scheduler = self.scheduler
        try:
            match command:
                case Added():
                    seq_id = scheduler.add(request_of(command))
                    if seq_id != command.seq_id:
                        self._diverge(f"the recorded sequence {command.seq_id} has the id {seq_id} here")
                case Aborted():
                    if not scheduler.abort(command.seq_id, command.reason):
                        self._diverge(f"sequence {command.seq_id} was ended by a command, but does not exist here")
                case Proposed():
                    scheduler.propose(dict(command.drafts))
                case Named():
                    scheduler.name_answer(command.seq_id, tuple(map(content_of, command.contents)))
                case _:
                    apply_to_cache(scheduler, command, content_of)
        except (LockstepError, AssertionError, IndexError) as error:
            self._diverge(f"the recorded command {type(command).__name__!r} is refused here: {error}")

    def begin_at(self, entry: Checkpoint) -> None:
        """Continue from a recorded state.

        Raises:
            TraceError: the state is invalid, or of another version.
        """
        if entry.version != STATE_VERSION:
            raise TraceError("a checkpoint has a state of another version; replay it with the version that recorded it")
        scheduler, fingerprint = _states_of(entry)
        try:
            self.scheduler = Scheduler.from_state(self.config, scheduler)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"a checkpoint has no valid scheduler state: {error!r}") from error
        self._fingerprint = Fingerprint.from_state(fingerprint)
        self._next_step = scheduler.step
        self._is_open = self._fingerprint.open_record is not None
        self._commands.clear()

    def arrive_at(self, entry: Checkpoint) -> bool:
        """Compare a recorded state with the state after the previous steps. False: it is of another version and cannot
        be compared.

        DivergedError: the states differ.
        """
        if entry.version != STATE_VERSION:
            return False
        if _states_of(entry) != (self.scheduler.state(), self._fingerprint.state()):
            self._diverge("the state at the start of the next file differs from the state after the previous steps")
        return True

    def record(self, entry: Record) -> Iterator[EngineEvent]:
        """Decide the steps of a record again.

        Raises:
            DivergedError: a decision differs, or the record is damaged.
        """
        mark = chained(self._chain(), entry.record)[: len(entry.mark)]
        is_valid = mark == entry.mark
        damage = "" if is_valid else f"its recorded digest is {entry.mark.hex()}, the computed one {mark.hex()}"
        yield from self._decide(entry.record, damage)
        self._is_open = False

    def close(self, entry: Closed) -> Iterator[EngineEvent]:
        """Decide the steps of the record that is open at the end of a file, and apply the commands after them.

        Raises:
            DivergedError: as for `record`, or the digest of all steps differs.
        """
        if entry.open_record:
            yield from self._decide(entry.open_record, "")
            self._is_open = True
        yield from self._apply_due()
        if entry.num_steps != self._next_step:
            self._diverge(f"{entry.num_steps} steps had begun, but there are records of {self._next_step}")
        if entry.digest.hex() != self.fingerprint:
            self._diverge(f"the recorded digest is {entry.digest.hex()}, the computed one {self.fingerprint}")
        if self.timings:
            self._diverge(f"{len(self.timings)} turns began a step that has no record")

    # -- one record ---------------------------------------------------------------------------------------------------

    def _chain(self) -> bytes:
        """Chain before the next record: the open record has closed, unless the next one is the same."""
        return self._fingerprint.chain if self._is_open else bytes.fromhex(self._fingerprint.hexdigest())

    def _decide(self, record: bytes, damage: str) -> Iterator[EngineEvent]:
        """Decide the steps of a record, except those decided while it was open at the end of a file."""
        seen = self._fingerprint
        first: StepPlan | None = None
        try:
            decision = decode_record(record)
            if not self._is_open:
                first = decision.plan(self._next_step, seen.step_before, seen.ended_before, len(self.config.groups))
        except ValueError as error:
            self._damaged(damage or str(error), None)
        if damage:
            self._damaged(damage, first)
        if first is not None:
            yield from self._step(first, decision)
        for _ in range(decision.repeats + 1 - seen.num_open_steps):
            before = seen.step_before
            assert before is not None, "a record of a failed step has no repeats"
            yield from self._step(_repeat_of(before), None)
        if seen.open_record != record:
            self._diverge("equal decisions give a record with different bytes")

    def _step(self, recorded: StepPlan, decision: StepRecord | None) -> Iterator[EngineEvent]:
        """Decide one step; None: it repeats the previous one."""
        yield from self._apply_due()
        try:
            plan = self.scheduler.schedule(self.explain)
        except AssertionError as error:
            self._diverge(f"planning fails here: {error}", recorded=recorded)
        if recorded != plan and replace(recorded, num_prompt_tokens=plan.num_prompt_tokens) != plan:
            raise DivergedError(self.number, self._next_step, "the recorded plan differs", recorded, plan)
        self._next_step += 1
        yield from self._apply_due(in_step=True)
        if decision is not None and decision.is_failed:
            self.scheduler.fail(plan)
            self._fingerprint.observe_failure(plan)
            yield self._decided(plan, None, None)
            return
        ends = {} if decision is None else decision.ends
        result = _result(plan, decision)
        try:
            events = self.scheduler.commit(plan, result)
        except AssertionError as error:
            raise DivergedError(
                self.number, plan.step, f"the recorded results are impossible: {error}", recorded
            ) from None
        if dict(events.finished) != ends:
            here = _ends_text(dict(events.finished))
            self._diverge(f"{_ends_text(ends)} with this step, but here {here}", plan.step)
        self._fingerprint.observe(plan, events)
        yield self._decided(plan, result, events)

    def _decided(self, plan: StepPlan, result: StepResult | None, events: StepEvents | None) -> DecidedStep:
        self.num_steps += 1
        if not self.timings:
            self._diverge("the recording has no turn of this step", plan.step, plan)
        rows = self.tokens.popleft() if events is not None and self.tokens else ()
        tokens = dict(zip(compress(plan.seq_ids, plan.samples), rows, strict=False))
        finished = self.scheduler.drain_finished()
        return DecidedStep(self.number, plan, result, events, finished, self.timings.popleft(), tokens)

    def _apply_due(self, in_step: bool = False) -> Iterator[AppliedCommand]:
        """Apply the commands before the next step, or during the current one."""
        commands = self._commands
        while commands and commands[0].step <= self._next_step:
            command = commands[0]
            if (isinstance(command, Aborted | Named) and command.in_step) != in_step:
                return
            commands.popleft()
            self.apply(command)
            yield AppliedCommand(self.number, command, self.scheduler.drain_finished())

    # -- divergence ---------------------------------------------------------------------------------------------------

    def _diverge(self, what: str, step: int | None = None, recorded: StepPlan | None = None) -> NoReturn:
        raise DivergedError(self.number, self._next_step if step is None else step, what, recorded)

    def _damaged(self, why: str, recorded: StepPlan | None) -> NoReturn:
        """The record of the next step is damaged: report the plan computed here."""
        deque(self._apply_due(), maxlen=0)
        decided = self.scheduler.schedule()
        raise DivergedError(self.number, self._next_step, f"the record is damaged: {why}", recorded, decided)


def _states_of(entry: Checkpoint) -> tuple[SchedulerState, FingerprintState]:
    """Recorded states, with the hashes and tenants of replays.

    Raises:
        TraceError: the checkpoint has no valid state.
    """
    try:
        scheduler = msgspec.msgpack.decode(entry.scheduler, type=SchedulerState)
        fingerprint = msgspec.msgpack.decode(entry.fingerprint, type=FingerprintState)
    except msgspec.MsgspecError as error:
        raise TraceError(f"a checkpoint has no valid scheduler state: {error}") from error
    contents, tenants = tuple(map(content_of, entry.contents)), tuple(map(str, entry.tenants))
    return scheduler._replace(contents=contents, tenants=tenants), fingerprint


def _repeat_of(plan: StepPlan) -> StepPlan:
    starts = tuple([start + 1 for start in plan.starts])
    count = len(starts)
    lengths, samples = (1,) * count, (True,) * count
    return StepPlan(
        plan.step + 1, (), (), (), (), plan.seq_ids, starts, lengths, plan.tables, samples,
        other_tables=plan.other_tables,
    )  # fmt: skip


def _result(plan: StepPlan, decision: StepRecord | None) -> StepResult:
    """Result of the executor and the sampler, without LENGTH, which the scheduler determines."""
    sampling = list(compress(plan.seq_ids, plan.samples))
    if decision is None:
        return StepResult((1,) * len(sampling), (None,) * len(sampling))
    reasons = [decision.ends.get(seq_id) for seq_id in sampling]
    accepted = {plan.seq_ids[row]: count for row, (_, count) in decision.drafts.items()}
    return StepResult(
        tuple([decision.num_tokens.get(seq_id, 1) for seq_id in sampling]),
        tuple([None if reason is FinishReason.LENGTH else reason for reason in reasons]),
        tuple([accepted.get(seq_id, 0) for seq_id in sampling]) if plan.drafts else (),
    )


def _ends_text(ends: dict[int, FinishReason]) -> str:
    return ", ".join(f"{seq_id} ended with {reason.value}" for seq_id, reason in ends.items()) or "no sequence ended"


class NewRow(NamedTuple):
    """A row that does not continue the previous step."""

    position: int
    seq_id: int
    start: int
    length: int
    samples: bool
    num_kept: int
    """Leading blocks that it had in the previous step."""
    blocks: tuple[int, ...]


class StepRecord(NamedTuple):
    """Decoded record of the fingerprint: a step and its repeats. Layout: `lockstep.core.fingerprint`."""

    is_failed: bool
    evicted: tuple[int, ...]
    swap_out: tuple[Pair, ...]
    swap_in: tuple[Pair, ...]
    copies: tuple[Pair, ...]
    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    preempted: tuple[int, ...]
    gone: tuple[int, ...]
    rows: tuple[NewRow, ...]
    num_tokens: dict[int, int]
    """Number of tokens of sequences with more than one."""
    ends: dict[int, FinishReason]
    drafts: dict[int, tuple[int, int]]
    """Index of a row to the number of its drafts, and of the accepted ones."""
    repeats: int

    def plan(self, step: int, before: StepPlan | None, ended: Collection[int], num_groups: int = 1) -> StepPlan:
        """Plan of the record's first step.

        Args:
            before: plan of the previous step; None after a failed one.
            ended: sequences that ended with the previous step.
            num_groups: number of the engine's KV groups.

        Raises:
            ValueError: no valid plan follows.
        """
        rows = {row.position: row for row in self.rows}
        left = {*ended, *self.gone, *(row.seq_id for row in self.rows)}
        known: dict[int, Chunk] = {}
        if before is not None:
            tables_before = row_tables(before)
            known = {
                chunk.seq_id: chunk._replace(table=table)
                for chunk, table in zip(before.chunks(), tables_before, strict=True)
            }
        going_on = [chunk for chunk in known.values() if chunk.seq_id not in left]
        following = iter(going_on)
        columns: list[tuple[int, int, int, tuple[int, ...], bool]] = []
        for position in range(len(rows) + len(going_on)):
            row = rows.get(position)
            if row is None:
                chunk = next(following, None)
                if chunk is None:
                    raise ValueError(f"no sequence continues at row {position}")
                columns.append((chunk.seq_id, chunk.start + chunk.length, 1, chunk.table, True))
                continue
            old = known[row.seq_id].table if row.seq_id in known else ()
            if row.num_kept > len(old):
                raise ValueError(f"sequence {row.seq_id} keeps {row.num_kept} blocks of {len(old)}")
            columns.append((row.seq_id, row.start, row.length, old[: row.num_kept] + row.blocks, row.samples))
        ids, starts, lengths, tables, samples = zip(*columns, strict=True) if columns else ((),) * 5
        moves = self.evicted, self.swap_out, self.swap_in, self.copies
        changes = self.admitted, self.resumed, self.preempted
        firsts, others = split_tables(tables, num_groups)
        if any(row >= len(ids) or count >= lengths[row] for row, (count, _) in self.drafts.items()):
            raise ValueError("a row has as many drafts as tokens, or does not exist")
        drafts = tuple([self.drafts.get(row, (0, 0))[0] for row in range(len(ids))]) if self.drafts else ()
        return StepPlan(
            step, *moves, ids, starts, lengths, firsts, samples, *changes, other_tables=others, drafts=drafts
        )


def decode_record(record: bytes) -> StepRecord:
    """Decode a record.

    Raises:
        ValueError: the bytes are not a record.
    """
    numbers = _numbers(record)
    try:
        tag = next(numbers)
        if not 1 <= tag <= _WITH_DRAFTS + _FAILED:
            raise ValueError(f"a record begins with a byte of 1 to {_WITH_DRAFTS + _FAILED}, not {tag}")
        # Fields in the order of their bytes.
        read = StepRecord(
            tag in (_FAILED, _WITH_DRAFTS + _FAILED),
            _ids(numbers),
            *(_pairs(numbers), _pairs(numbers), _pairs(numbers)),
            *(_ids(numbers), _ids(numbers), _ids(numbers), _ids(numbers)),
            rows=tuple(_row(numbers) for _ in range(next(numbers))),
            num_tokens=dict(_pairs(numbers)),
            ends={seq_id: _REASONS[reason] for seq_id, reason in _pairs(numbers)},
            drafts=_drafts(numbers) if tag > _WITH_DRAFTS else {},
            repeats=next(numbers),
        )
    except (StopIteration, RuntimeError, IndexError) as error:
        raise ValueError("it ends too early, or a sequence ends for an unknown reason") from error
    if next(numbers, None) is not None:
        raise ValueError("it has bytes after its end")
    return read


def _numbers(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
    if shift:
        raise ValueError("it ends inside a number")


def _ids(numbers: Iterator[int]) -> tuple[int, ...]:
    return tuple([next(numbers) for _ in range(next(numbers))])


def _pairs(numbers: Iterator[int]) -> tuple[Pair, ...]:
    return tuple([(next(numbers), next(numbers)) for _ in range(next(numbers))])


def _drafts(numbers: Iterator[int]) -> dict[int, tuple[int, int]]:
    return {next(numbers): (next(numbers), next(numbers)) for _ in range(next(numbers))}


def _row(numbers: Iterator[int]) -> NewRow:
    position, seq_id, start, both, kept = (next(numbers) for _ in range(5))
    return NewRow(position, seq_id, start, both >> 1, bool(both & 1), kept, _ids(numbers))
