"""Recorded steps are decided again one by one, and differences are located at their step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lockstep.cli.main import invoke
from lockstep.core import planner, victims
from lockstep.core.policy import SchedulerConfig
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan
from lockstep.replay.playback import Playback
from lockstep.replay.rerun import AppliedCommand, DecidedStep, EngineRerun, decode_record
from lockstep.replay.trace import Trace, open_trace
from lockstep.replay.verify import verify
from lockstep.replay.verify_report import side_by_side
from lockstep.worker.flight.entries import Entry, Idle, Record, Turn, WithWork
from tests.core.drive import needs_interpreted
from tests.replay.live import entry_counts
from tests.replay.recordings import entries_in, files_of, record, rewrite_entries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded"), 60)


@pytest.fixture
def trace(folder: Path) -> Trace:
    return open_trace(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Copy the recording's only file."""
    [path] = files_of(folder)
    copied = tmp_path / path.name
    copied.write_bytes(path.read_bytes())
    return copied


def test_a_recording_with_all_kinds_of_events_is_identical(trace: Trace) -> None:
    found = verify(trace)
    assert found.is_identical, found.diverged
    seen = entry_counts(trace)
    assert found.counts["steps"] == seen["steps"] > 300
    assert found.counts["engines"] == 2
    assert found.counts["turns"] >= found.counts["steps"]
    for what in ("preemptions", "swaps", "evictions", "hits", "abort", "failures", "resets", "priority -1"):
        assert seen[what] > 0, what


def test_the_command_prints_identical(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", "--verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("replay: ")
    assert said.endswith(" turns, identical\n")
    assert " steps of 2 engines, " in said


def records_of(path: Path) -> list[tuple[int, int, int]]:
    """(index among the entries, engine, first step) of every record."""
    next_step = {0: 0, 1: 0}
    found = []
    for place, entry in enumerate(entries_in(path)):
        if isinstance(entry, Record):
            found.append((place, entry.engine, next_step[entry.engine]))
            next_step[entry.engine] += 1 + decode_record(entry.record).repeats
    return found


def flip(path: Path, place: int, at: int, bit: int = 1) -> None:
    """Change a bit of a record."""

    def change(entries: list[Entry]) -> None:
        entry = entries[place]
        assert isinstance(entry, Record)
        record = bytearray(entry.record)
        record[at] ^= bit
        entries[place] = replace(entry, record=bytes(record))

    rewrite_entries(path, change)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("offset", [0, 3, -1])
def test_a_flipped_byte_in_a_record_is_found_at_its_step(copy: Path, share: float, offset: int) -> None:
    records = records_of(copy)
    place, engine, step = records[int(share * len(records))]
    flip(copy, place, offset)
    diverged = verify(open_trace(copy)).diverged
    assert diverged is not None
    assert (diverged.engine, diverged.step) == (engine, step)
    assert "damaged" in diverged.what
    assert diverged.decided is not None, "what is decided here is shown beside it"


def test_the_command_shows_both_plans(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(copy)
    place, engine, step = records[len(records) // 2]
    flip(copy, place, 2, 2)
    assert invoke(["replay", "--verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert f"are identical, but step {step} of engine {engine} (" in said
    assert "decided here" in said


def contended_turn(entries: Sequence[Entry]) -> int:
    """Turn after which the same replica has another one while both have work; after a longer turn it would wait."""
    places: tuple[int, ...] = (0,)
    before = -1
    for number, entry in enumerate(entries):
        match entry:
            case WithWork():
                places, before = entry.places, -1
            case Idle():
                before = -1
            case Turn():
                last = entries[before]
                if before >= 0 and len(places) > 1 and isinstance(last, Turn) and last.place == entry.place:
                    return before
                before = number
    raise AssertionError("nobody waited for the device")


def test_turns_are_decided_again(copy: Path) -> None:
    """A replica that spent more would have waited: one turn with an additional second is detected."""
    entries = entries_in(copy)
    longer = contended_turn(entries)

    def lengthen(entries: list[Entry]) -> None:
        entry = entries[longer]
        assert isinstance(entry, Turn)
        entries[longer] = replace(entry, duration_us=entry.duration_us + 1_000_000)

    rewrite_entries(copy, lengthen)
    diverged = verify(open_trace(copy)).diverged
    assert diverged is not None
    assert diverged.engine == -1
    assert diverged.step > sum(isinstance(entry, Turn) for entry in entries[:longer])
    assert "the scheduler chooses" in diverged.what


MUTATIONS = {
    "victims from the best": (victims, "refs(table[-1 - count]) == 1", "refs(table[-1 - count]) != 1"),
    "growth": (
        planner,
        "or not self._hold_by_force(builder, seq, length)",
        "or self._hold_by_force(builder, seq, length)",
    ),
    "admission": (planner, "queue.effective_priority(seq, builder.step) >= blocked_from", "blocked_from >= 0"),
    "resumption": (planner, "if missing <= 0:", "if missing > 0:"),
    "slots": (planner, "elif num_running >= most:", "elif num_running < most:"),
}


MAX_ROUNDS = 100_000
"""Maximum rounds of allocation by one scheduler, since a wrong one may never complete a decision."""


def mutated(name: str) -> Callable[[SchedulerConfig], Scheduler]:
    """A scheduler whose planner has one inverted comparison."""
    module, old, new = MUTATIONS[name]
    source = inspect.getsource(module)
    assert source.count(old) == 1, "the mutation has one place"
    namespace: dict[str, Any] = {"__name__": "mutated"}
    exec(source.replace(old, new), namespace)
    if module is victims:
        changed: dict[str, Any] = {"__name__": "mutated"}
        exec(inspect.getsource(planner), changed)
        changed["choose_tails"] = namespace["choose_tails"]
        namespace = changed
    wrong: type[Any] = namespace["StepPlanner"]

    class Bounded(wrong):  # type: ignore[misc]  # its base is made here
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._rounds = count()

        def _take_blocks(self, *args: Any) -> bool:
            assert next(self._rounds) < MAX_ROUNDS, "it takes blocks for ever"
            return bool(super()._take_blocks(*args))

    class Mutated(Scheduler):
        def __init__(self, config: SchedulerConfig) -> None:
            super().__init__(config)
            self._planner = Bounded(config, self._kv, self._queue, self._ledger, self._running, self._sequences)

    return Mutated


def first_difference(trace: Trace, scheduler_of: Callable[[SchedulerConfig], Scheduler]) -> tuple[int, int]:
    """First difference, determined by giving the events of a correct replay to the other scheduler too."""
    others = {engine.number: EngineRerun(engine.number, engine.config, scheduler_of) for engine in trace.engines}
    for event in Playback(trace.entries()).play():
        if isinstance(event, AppliedCommand):
            others[event.engine].apply(event.command)
        elif isinstance(event, DecidedStep):
            scheduler = others[event.engine].scheduler
            try:
                plan: StepPlan | None = scheduler.schedule()
            except AssertionError:
                plan = None
            if plan != event.plan or plan is None:
                return event.engine, event.plan.step
            if event.result is None:
                scheduler.fail(plan)
            else:
                scheduler.commit(plan, event.result)
    raise AssertionError("the mutation changes nothing here")


@needs_interpreted
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_scheduler_with_an_inverted_comparison_is_detected_at_the_right_step(trace: Trace, name: str) -> None:
    scheduler_of = mutated(name)
    diverged = verify(trace, scheduler_of).diverged
    assert diverged is not None, "the recording has no step that shows it"
    assert (diverged.engine, diverged.step) == first_difference(trace, scheduler_of)


def test_plans_side_by_side_mark_differing_lines() -> None:
    a = StepPlan(3, (), (), (), (), (1, 2), (4, 0), (1, 5), ((1,), (2, 3)), (True, False), admitted=(2,))
    b = StepPlan(3, (), (), (), (), (1,), (4,), (1,), ((1,),), (True,))
    lines = list(side_by_side(a, b))
    assert [line[0] for line in lines] == [" ", ">", " ", ">", ">"]
    assert "sequence 2: 0..4, blocks [2, 3]" in lines[3]
    assert list(side_by_side(None, None)) == []
