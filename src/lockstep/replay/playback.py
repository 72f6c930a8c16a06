"""Playback of a device's recording: decides the steps of all engines and their turns again, in recorded order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.core.scheduler import Scheduler
from lockstep.errors import TraceError
from lockstep.replay.rerun import (
    AppliedCommand,
    DecidedStep,
    EngineEvent,
    EngineRerun,
    SchedulerOf,
    Timing,
)
from lockstep.replay.trace import CutFile, Trace
from lockstep.replay.trace_integrity import FileNumber, Loss
from lockstep.replay.verify_report import TURNS, DivergedError
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    Arrival,
    CacheReset,
    Checkpoint,
    Closed,
    CreditsEntry,
    End,
    EngineEntry,
    Entry,
    Filled,
    Header,
    Idle,
    Named,
    Pinned,
    Priorities,
    Proposed,
    Record,
    Tokens,
    Turn,
    Unpinned,
    WithWork,
)


class Arrived(NamedTuple):
    """Arrival of a request, before the command that adds it."""

    came: Arrival
    arrival_us: int


Event = DecidedStep | AppliedCommand | Arrived | Entry | CutFile
"""An entry, or an event that follows from it."""


@dataclass(slots=True)
class Tally:
    """Counts of the parts of a recording that were decided again."""

    num_engines: int = 0
    num_steps: int = 0
    """Number of steps decided as recorded."""
    num_turns: int = 0
    """Number of turns chosen as recorded."""
    num_unchecked_steps: int = 0
    """Number of steps without records, which had begun when the recording was cut."""
    num_foreign_checkpoints: int = 0
    """Number of checkpoints from another version's scheduler. They are not compared; the steps before them are."""


class Playback:
    """Plays a recording; raises `DivergedError` at the first difference.

    Args:
        entries: entries of all files.
        scheduler_of: constructor of the schedulers.
    """

    def __init__(self, entries: Iterable[Entry | CutFile], scheduler_of: SchedulerOf = Scheduler) -> None:
        self._entries = entries
        self._scheduler_of = scheduler_of
        self.engines: dict[int, EngineRerun] = {}
        """Engines of the current run, by number."""
        self.tally = Tally()
        self.losses: dict[FileNumber, Loss] = {}
        """Missing steps and turns before files that do not continue the previous file of their run."""
        self._num_reached: dict[int, int] = {}
        self._num_turns_reached = 0
        """Number of steps of each engine, and of turns, at the end of the previous file."""
        self._run: str | None = None
        self._file = 0
        self._is_whole = False
        """True if the previous file is complete and this one follows it."""
        self._can_count_loss = False
        """True if parts before the file are missing, and the position where they begin is known."""
        self._keys: dict[int, str] = {}
        """Keys of the run's engines, by number."""
        self._turns = DeviceScheduler()
        self._classes: dict[str, int] = {}
        self._places: dict[int, int] = {}
        """Loaded engines, by their index in the device scheduler."""
        self._with_work: tuple[int, ...] = (0,)
        """Indices of the engines with work."""
        self._now_us = 0
        self._is_idle = False
        self._coming: list[Arrival] = []
        """Arrivals in the current turn."""

    def play(self) -> Iterator[Event]:
        """Yield each entry, followed by the steps, commands and arrivals that result from it.

        A step follows the commands before it, and has its tokens. A request's entries and its arrival come before the
        command that adds it.

        Raises:
            DivergedError: a decision differs from the recording.
            TraceError: the recording is damaged or incomplete.
        """
        for entry in self._entries:
            yield entry
            match entry:
                case Turn():
                    self._turn(entry)
                    start_us = self._now_us - entry.duration_us
                    yield from [Arrived(came, start_us - came.waited_us) for came in self._coming]
                    self._coming.clear()
                case Record():
                    yield from self._counted(self._engine(entry.engine).record(entry))
                case Added() | Aborted() | Named() | Pinned() | Unpinned() | Filled() | CacheReset() | Proposed():
                    self._engine(entry.engine).command(entry)
                case Arrival():
                    self._coming.append(entry)
                case Tokens():
                    self._engine(entry.engine).tokens.append(entry.tokens)
                case End():
                    for closed in entry.engines:
                        yield from self._counted(self._engine(closed.engine).close(closed))
                    self._is_whole = True
                case Closed():
                    yield from self._counted(self._engine(entry.engine).close(entry))
                    del self.engines[entry.engine]
                case _:
                    self._rare(entry)
        self._drop_unread()

    def _rare(self, entry: Entry | CutFile) -> None:
        match entry:
            case Header():
                self._begin_file(entry.run, entry.file, bool(entry.gap))
            case EngineEntry():
                number = entry.number
                self.tally.num_engines += number not in self._keys
                self._keys[number] = entry.key
                if number not in self.engines:
                    self.engines[number] = EngineRerun(number, entry.config, self._scheduler_of)
            case Checkpoint():
                rerun = self._engine(entry.engine)
                if self._is_whole and rerun.num_steps:
                    self.tally.num_foreign_checkpoints += not rerun.arrive_at(entry)
                else:
                    rerun.begin_at(entry)
                    self._miss({entry.engine: rerun.num_begun - self._num_reached.get(entry.engine, 0)}, 0)
            case CreditsEntry(num_turns, credits):
                if self._is_whole and self.tally.num_turns and self._turns.credit_rows() != (num_turns, credits):
                    what = "the credits at the start of the next file differ from those after the previous turns"
                    raise DivergedError(TURNS, num_turns, what)
                if not self._is_whole:
                    self._miss({}, num_turns - self._num_turns_reached)
                self._turns = DeviceScheduler.of(num_turns, credits)
            case Priorities(classes):
                self._places = dict(enumerate(number for number, _ in classes))
                self._classes = {self._keys[number]: priority for number, priority in classes}
                self._is_idle = False
            case WithWork(places):
                self._with_work = places
            case Idle():
                self._is_idle = True
                chosen = self._turns.choose(self._classes, ())
                assert chosen is None, "no engine has work"
            case CutFile():
                self._is_whole = False

    def _begin_file(self, run: str, number: int, is_behind_gap: bool) -> None:
        is_new = run != self._run or number <= self._file
        self._can_count_loss = False
        if is_new or number != self._file + 1 or is_behind_gap or not self._is_whole:
            self._drop_unread()
            reached = {number: engine.num_begun for number, engine in self.engines.items()}
            self._num_reached = {} if is_new else self._num_reached | reached
            self._num_turns_reached = 0 if is_new else self._turns.credit_rows()[0]
            self._can_count_loss = not is_new or number == 1
            self.engines, self._is_whole = {}, False
        if is_new:
            self._now_us = 0
            self._keys.clear()
        self._run, self._file = run, number
        self._classes, self._places, self._with_work = {}, {}, (0,)

    def _miss(self, num_steps: dict[int, int], num_turns: int) -> None:
        """Count missing steps and turns before the current file."""
        if self._can_count_loss and (num_turns or any(num_steps.values())):
            assert self._run is not None, "a file begins with its header"
            place = self._run, self._file
            known = self.losses.get(place, Loss({}, 0))
            self.losses[place] = Loss({**known.steps, **num_steps}, known.num_turns + num_turns)

    def _drop_unread(self) -> None:
        """Drop steps that had begun when the recording was cut."""
        for engine in self.engines.values():
            self.tally.num_unchecked_steps += len(engine.timings)
            engine.timings.clear()

    def _engine(self, number: int) -> EngineRerun:
        engine = self.engines.get(number)
        if engine is None:
            raise TraceError(f"an entry names engine {number}, which its file does not define")
        return engine

    def _counted(self, events: Iterator[EngineEvent]) -> Iterator[EngineEvent]:
        for event in events:
            self.tally.num_steps += isinstance(event, DecidedStep)
            yield event

    def _turn(self, turn: Turn) -> None:
        if not self._places.keys() >= {turn.place, *self._with_work}:
            raise TraceError(f"turn {self.tally.num_turns} names an unknown replica")
        with_work = {self._keys[self._places[place]] for place in self._with_work}
        number = self._places[turn.place]
        recorded = self._keys[number]
        chosen = self._turns.choose(self._classes, with_work)
        if chosen != recorded:
            what = f"the recorded turn is of {recorded}, but the scheduler chooses {chosen or 'no engine'}"
            raise DivergedError(TURNS, self.tally.num_turns, what)
        self._turns.spend(chosen, turn.duration_us)
        self.tally.num_turns += 1
        start_us = self._now_us + turn.gap_us
        self._now_us = start_us + turn.duration_us
        if turn.stepped:
            timing = Timing(start_us, turn.duration_us, turn.gap_us, self._is_idle)
            self._engine(number).timings.append(timing)
        self._is_idle = False


def played(trace: Trace, playback: Playback | None = None) -> Iterator[Event]:
    """All events of a recording, step by step (`Playback.play`).

    Args:
        playback: a playback of the trace's entries, for callers that read its state meanwhile.

    Raises:
        TraceError: the recording is damaged or incomplete, or differs from this version's decisions.
    """
    try:
        yield from (playback or Playback(trace.entries())).play()
    except DivergedError as diverged:
        raise TraceError(
            f"the recording differs from this version's decisions: engine {diverged.engine}, step {diverged.step}: "
            f"{diverged.what}; `lockstep replay --verify` shows more"
        ) from diverged
