"""A device's recording, played again: all its engines and the turns that they took, in recorded order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lockstep.core.scheduler import Scheduler
from lockstep.errors import TraceError
from lockstep.replay.rerun import EngineRerun, Obeyed, PartedError, Ran, SchedulerOf
from lockstep.replay.trace import Cut, Trace
from lockstep.replay.wholeness import Loss, Place
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    CacheReset,
    Came,
    Checkpoint,
    Closed,
    End,
    EngineEntry,
    Entry,
    Header,
    Idle,
    Pinned,
    Priorities,
    Record,
    RequestEntry,
    SeatsEntry,
    Swept,
    Tokens,
    Turn,
    WithWork,
)

TURNS = -1
"""In the place of an engine's number."""


class Timing(NamedTuple):
    """When a step ran, in microseconds from the beginning of its run."""

    start_us: int
    duration_us: int
    gap_us: int
    is_after_idle: bool


class Played(NamedTuple):
    """One step, decided again as it was recorded."""

    ran: Ran
    timing: Timing


class Arrived(NamedTuple):
    """A request has come; told before the command that adds it is given."""

    came: Came
    arrival_us: int


class Playback:
    """Plays a recording; stops with `PartedError` where it cannot go on as recorded.

    Args:
        entries: of all its files.
        scheduler_of: makes the schedulers that decide again.
    """

    def __init__(self, entries: Iterable[Entry | Cut], scheduler_of: SchedulerOf = Scheduler) -> None:
        self._entries = entries
        self._scheduler_of = scheduler_of
        self.engines: dict[int, EngineRerun] = {}
        """Of the run that is being played."""
        self.num_engines = 0
        self.num_steps = 0
        """Decided again as recorded."""
        self.num_turns = 0
        """Taken again as recorded."""
        self.num_unchecked_steps = 0
        """That had begun when a recording broke off, and whose records were not written."""
        self.num_foreign_checkpoints = 0
        """That another version's scheduler made, so that they cannot be compared."""
        self.losses: dict[Place, Loss] = {}
        """What is missing in front of files that do not go on where the one of their run before them ends."""
        self._num_reached: dict[int, int] = {}
        self._num_turns_reached = 0
        """How far the steps of each engine, and the turns, had come in that one."""
        self._run: str | None = None
        self._file = 0
        self._is_whole = False
        """The file before came to its end, and this one follows it."""
        self._can_tell_loss = False
        """Whether something is missing in front of the file, and where that begins was seen."""
        self._keys: dict[int, str] = {}
        self._known: set[int] = set()
        """Engines of the run."""
        self._turns = DeviceScheduler()
        self._classes: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._with_work: tuple[int, ...] = (0,)
        """Places of those who have work."""
        self._now_us = 0
        self._is_idle = False
        self._timings: dict[int, deque[Timing]] = {}
        self._coming: list[Came] = []
        """In the turn that is being read."""

    def play(self) -> Iterator[Played | Obeyed | Arrived | RequestEntry | Tokens]:
        """Everything that happened, in order: a step follows the commands that came before it, and what is told of
        a request comes before the command that adds it takes effect.

        Raises:
            PartedError: what is decided again is not what was recorded.
            TraceError: the recording cannot be read on.
        """
        for entry in self._entries:
            match entry:
                case Turn():
                    self._turn(entry)
                    start_us = self._now_us - entry.duration_us
                    yield from [Arrived(came, start_us - came.waited_us) for came in self._coming]
                    self._coming.clear()
                case Record():
                    yield from self._timed(entry.engine, self._engine(entry.engine).record(entry))
                case Added() | Aborted() | Pinned() | Swept() | CacheReset():
                    self._engine(entry.engine).command(entry)
                case Came():
                    self._coming.append(entry)
                case RequestEntry() | Tokens():
                    yield entry
                case End():
                    for closed in entry.engines:
                        yield from self._close(closed)
                    self._is_whole = True
                case Closed():
                    yield from self._close(entry)
                    del self.engines[entry.engine]
                case _:
                    self._rare(entry)
        self._forget_rest()

    def _rare(self, entry: Entry | Cut) -> None:
        match entry:
            case Header():
                self._begin_file(entry.run, entry.file, bool(entry.gap))
            case EngineEntry():
                number = entry.number
                self._keys[number] = entry.key
                if number not in self.engines:
                    self.engines[number] = EngineRerun(number, entry.config, self._scheduler_of)
                    self.num_engines += number not in self._known
                    self._known.add(number)
            case Checkpoint():
                rerun = self._engine(entry.engine)
                if self._is_whole and rerun.num_steps:
                    self.num_foreign_checkpoints += not rerun.arrive_at(entry)
                else:
                    rerun.begin_at(entry)
                    self._miss({entry.engine: rerun.num_begun - self._num_reached.get(entry.engine, 0)}, 0)
            case SeatsEntry(num_turns, seats):
                if self._is_whole and self.num_turns and self._turns.seats() != (num_turns, seats):
                    what = "the next file begins with other credits than the turns before it lead to"
                    raise PartedError(TURNS, num_turns, what)
                if not self._is_whole:
                    self._miss({}, num_turns - self._num_turns_reached)
                self._turns = DeviceScheduler.of(num_turns, seats)
            case Priorities(classes):
                self._numbers = {self._keys[number]: number for number, _ in classes}
                self._classes = {self._keys[number]: priority for number, priority in classes}
                self._is_idle = False
            case WithWork(places):
                self._with_work = places
            case Idle():
                self._is_idle = True
                chosen = self._turns.choose(self._classes, ())
                assert chosen is None, "nobody has work"
            case Cut():
                self._is_whole = False

    def _begin_file(self, run: str, number: int, is_behind_gap: bool) -> None:
        is_new = run != self._run or number <= self._file
        self._can_tell_loss = False
        if is_new or number != self._file + 1 or is_behind_gap or not self._is_whole:
            self._forget_rest()
            self._num_reached = {} if is_new else self._num_reached | self._ends()
            self._num_turns_reached = 0 if is_new else self._turns.seats()[0]
            self._can_tell_loss = not is_new or number == 1
            self.engines, self._is_whole = {}, False
        if is_new:
            self._now_us = 0
            self._keys.clear()
            self._known.clear()
        self._run, self._file = run, number
        self._classes, self._numbers, self._with_work = {}, {}, (0,)

    def _ends(self) -> dict[int, int]:
        """How many steps each engine had begun when its file ended."""
        return {number: rerun.num_begun for number, rerun in self.engines.items()}

    def _miss(self, num_steps: dict[int, int], num_turns: int) -> None:
        """Count what lies before the file that is being read."""
        if self._can_tell_loss and (num_turns or any(num_steps.values())):
            assert self._run is not None, "a file begins with its header"
            place = self._run, self._file
            known = self.losses.get(place, Loss({}, 0))
            self.losses[place] = Loss({**known.steps, **num_steps}, known.num_turns + num_turns)

    def _forget_rest(self) -> None:
        """What was going on when the recording broke off stays open."""
        self.num_unchecked_steps += sum(map(len, self._timings.values()))
        self._timings.clear()

    def _engine(self, number: int) -> EngineRerun:
        engine = self.engines.get(number)
        if engine is None:
            raise TraceError(f"an entry is of engine {number}, which the file does not know")
        return engine

    def _close(self, closed: Closed) -> Iterator[Played | Obeyed]:
        yield from self._timed(closed.engine, self._engine(closed.engine).close(closed))
        rest = self._timings.pop(closed.engine, ())
        if rest:
            what = f"{len(rest)} turns in which a step began have no step in the records"
            raise PartedError(closed.engine, closed.num_steps, what)

    def _timed(self, number: int, steps: Iterator[Ran | Obeyed]) -> Iterator[Played | Obeyed]:
        """Steps with their turns, which were recorded before the record that they are part of had closed."""
        timings = self._timings.setdefault(number, deque())
        for step in steps:
            if isinstance(step, Obeyed):
                yield step
                continue
            if not timings:
                raise PartedError(number, step.plan.step, "the recording has no turn for this step", step.plan)
            self.num_steps += 1
            yield Played(step, timings.popleft())

    def _turn(self, turn: Turn) -> None:
        places = dict(enumerate(self._classes))
        if not places.keys() >= {turn.place, *self._with_work}:
            raise TraceError(f"turn {self.num_turns} is of a replica that is not there")
        with_work = {places[place] for place in self._with_work}
        recorded = places[turn.place]
        chosen = self._turns.choose(self._classes, with_work)
        if chosen != recorded:
            what = f"in this turn {recorded} stepped, but it is the turn of {chosen or 'nobody'}"
            raise PartedError(TURNS, self.num_turns, what)
        self._turns.spend(chosen, turn.duration_us)
        self.num_turns += 1
        start_us = self._now_us + turn.gap_us
        self._now_us = start_us + turn.duration_us
        if turn.stepped:
            timing = Timing(start_us, turn.duration_us, turn.gap_us, self._is_idle)
            self._timings.setdefault(self._numbers[recorded], deque()).append(timing)
        self._is_idle = False


def played(trace: Trace, playback: Playback | None = None) -> Iterator[object]:
    """Everything that a recording tells, step by step (`Playback.play`).

    Args:
        playback: what plays it, for who wants to look into it meanwhile; it has the trace's entries.

    Raises:
        TraceError: it cannot be read on, or is not what this version decides.
    """
    try:
        yield from (playback or Playback(trace.entries())).play()
    except PartedError as parted:
        raise TraceError(
            f"the recording is not what this version decides: engine {parted.engine}, step {parted.step}: "
            f"{parted.what}; `lockstep replay --verify` shows more"
        ) from parted
