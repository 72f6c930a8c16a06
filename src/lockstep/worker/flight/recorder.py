"""What a device worker's replicas and turns tell, as entries of a recording.

One recorder per device, so that the order in which replicas took turns is the order of the entries. The step thread
calls everything here but `Recorder.tape` and `Recorder.report`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.loading import LoadedModel
from lockstep.executors.machine import machine_name
from lockstep.version import __version__
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.files import TraceFiles, TraceReport
from lockstep.worker.flight.format import (
    OTHER_MASK,
    OTHER_PLACE,
    SCHEMA_VERSION,
    STEPPED,
    Kind,
    put_bytes,
    put_ints,
    signed,
)
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.tape import EngineTape, guarded

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
"""What is recorded reaches the disk about as often."""
MAX_CHUNK_BYTES = 1 << 16
"""More is handed over at once."""
MAX_CONTENTS = 1 << 18
"""Ids of block hashes that are remembered; with more, the next file begins, with those that are in use."""
DEFECT = "a defect of the recorder, which the log shows, ended the recording"
Key = TypeVar("Key", bytes, str)


class _Ids(Generic[Key]):
    """Dense numbers, counted as keys come; forgotten ones come again under new numbers."""

    def __init__(self) -> None:
        self._ids: dict[Key, int] = {}
        self._kept: dict[Key, int] | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._ids)

    def of(self, key: Key) -> int:
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = self._next
            self._next += 1
        if self._kept is not None:
            self._kept[key] = number
        return number

    def forget_others(self) -> None:
        """From now on remember what is asked for; `end_forgetting` drops the rest."""
        self._kept = {}

    def end_forgetting(self) -> None:
        assert self._kept is not None, "forgetting ends once it has begun"
        self._ids, self._kept = self._kept, None


class Recorder:
    """Records one device.

    Args:
        options: what, and where.
        turns: the device's.
    """

    def __init__(self, options: TraceOptions, turns: DeviceScheduler) -> None:
        self.has_content = options.has_content
        self.out = bytearray()
        """Entries that were not handed over yet."""
        self.is_on = False
        """Whether there is a file to write to."""
        self.contents: _Ids[bytes] = _Ids()
        self.tenants: _Ids[str] = _Ids()
        self.has_stepped = False
        self._has_given_up = False
        self._lock = threading.Lock()
        self._files = TraceFiles(options)
        self._turns = turns
        self._tapes: dict[str, EngineTape] = {}
        """Of the replicas that are there, by key; as the device, replaced and never changed."""
        self._num_engines = 0
        self._priorities: dict[str, int] | None = None
        self._with_work: Collection[str] = ()
        self._place = 0
        self._mask = 0
        self._is_idle = False
        self._ended_us = 0
        self._flush_s = 0.0

    # -- any thread ---------------------------------------------------------------------------------------------------

    def tape(self, key: str, model: LoadedModel, config: SchedulerConfig) -> EngineTape:
        """What an engine that is about to be made tells."""
        tape = EngineTape(self, key, model, config)
        with self._lock:
            self._tapes = {**self._tapes, key: tape}
        return tape

    def report(self) -> TraceReport:
        report = self._files.report()
        return replace(report, fault=DEFECT) if self._has_given_up else report

    # -- the step thread ----------------------------------------------------------------------------------------------

    @guarded
    def begin_turn(self) -> None:
        """Before commands are obeyed and somebody steps: begin a file if one is due, hand over what was recorded."""
        if self._has_given_up:
            return
        if self._files.is_steady:
            if self.out and (len(self.out) >= MAX_CHUNK_BYTES or time.monotonic() >= self._flush_s):
                if len(self.contents) > MAX_CONTENTS:
                    self._begin_file()
                else:
                    self._flush()
            return
        if self.is_on and not self._files.is_open:
            self._stop()
        if self._files.wants_file():
            self._begin_file()

    @guarded
    def turn(
        self, priorities: Mapping[str, int], with_work: Collection[str], chosen: str, started_us: int, ended_us: int
    ) -> None:
        """The turn of a replica has ended.

        Args:
            priorities, with_work, chosen: as they went into, and came out of, `DeviceScheduler.choose`.
        """
        stepped, self.has_stepped = self.has_stepped, False
        gap_us, self._ended_us = started_us - (self._ended_us or started_us), ended_us
        if not self.is_on:
            return
        self._tell_priorities(priorities)
        out = self.out
        place, mask = self._place, self._mask
        if len(priorities) > 1:
            if with_work != self._with_work:
                self._with_work = with_work
                mask = sum(1 << index for index, key in enumerate(priorities) if key in with_work)
            place = list(priorities).index(chosen)
        else:
            place, mask = 0, 1
        flags = STEPPED * stepped + OTHER_PLACE * (place != self._place) + OTHER_MASK * (mask != self._mask)
        out.append(Kind.TURN)
        put_ints(out, (ended_us - started_us) << 3 | flags, gap_us)
        if place != self._place:
            put_ints(out, place)
            self._place = place
        if mask != self._mask:
            put_ints(out, mask)
            self._mask = mask
        self._is_idle = False

    @guarded
    def idle(self, priorities: Mapping[str, int]) -> None:
        """Nobody has work."""
        if self.is_on:
            self._tell_priorities(priorities)
            if not self._is_idle:
                self.out.append(Kind.IDLE)
                self._is_idle = True

    @guarded
    def closed(self, key: str) -> None:
        """A replica is unloaded; its engine does nothing any more."""
        with self._lock:
            tape = self._tapes.get(key)
            self._tapes = {other: kept for other, kept in self._tapes.items() if other != key}
        self._priorities = None
        if tape is not None:
            tape.close()

    @guarded
    def close(self) -> None:
        """The device ends."""
        if self.is_on:
            self._end_file()
            self._flush()
        self._files.close()

    def give_up(self) -> None:
        """A defect of ours: say so once, and record nothing any more. Within an ``except``."""
        if not self._has_given_up:
            log.exception("the recording ends here; requests are served all the same")
        self._has_given_up = True
        self._stop()

    def open_engine(self, tape: EngineTape) -> None:
        """An engine has to do with the device for the first time in this file."""
        if tape.number < 0:
            tape.number = self._num_engines
            self._num_engines += 1
        out = self.out
        out.append(Kind.ENGINE)
        put_bytes(out, msgspec.msgpack.encode(tape.facts()))

    def _tell_priorities(self, priorities: Mapping[str, int]) -> None:
        if priorities == self._priorities:
            return
        self._priorities, self._is_idle, self._with_work = dict(priorities), False, ()
        classes: list[int] = []
        for key, priority in priorities.items():
            tape = self._tapes[key]
            tape.open()
            classes += (tape.number, signed(priority))
        self.out.append(Kind.PRIORITIES)
        put_ints(self.out, len(priorities), *classes)

    # -- files --------------------------------------------------------------------------------------------------------

    def _begin_file(self) -> None:
        """End the file, if there is one, and begin the next with the state of everything."""
        out = self.out
        if self.is_on:
            out.append(Kind.GOES_ON)
            self._end_file()
            self._flush()
        self.is_on = True
        facts = {
            "schema": SCHEMA_VERSION,
            "lockstep": __version__,
            "run": self._files.run,
            "file": self._files.num_files + 1,
            "has_content": self.has_content,
            "machine": machine_name(),
        }
        if self._files.gap:
            facts["gap"] = self._files.gap
        out.append(Kind.HEADER)
        put_bytes(out, msgspec.msgpack.encode(facts))
        self.contents.forget_others()
        self.tenants.forget_others()
        for tape in self._tapes.values():
            tape.begin_file()
        self.contents.end_forgetting()
        self.tenants.end_forgetting()
        out.append(Kind.SEATS)
        put_bytes(out, msgspec.msgpack.encode(self._turns.seats()))
        self._priorities, self._place, self._mask = None, 0, 0
        self._files.begin(bytes(out))
        out.clear()
        self._flush_s = time.monotonic() + FLUSH_INTERVAL_S

    def _end_file(self) -> None:
        ends = [tape.end() for tape in self._tapes.values() if tape.is_open]
        self.out.append(Kind.END)
        put_ints(self.out, len(ends))
        for end in ends:
            self.out += end

    def _flush(self) -> None:
        self._files.put(bytes(self.out))
        self.out.clear()
        self._flush_s = time.monotonic() + FLUSH_INTERVAL_S

    def _stop(self) -> None:
        """Nothing can be written: forget what was recorded, until a file can be begun again."""
        self.is_on = False
        self.out.clear()
        for tape in self._tapes.values():
            tape.is_open = False
