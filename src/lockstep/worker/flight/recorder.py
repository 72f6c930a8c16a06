"""Recorders of a device and of its engines, which write commands, steps and turns as entries of a recording.

A device has one recorder, so that the entries are in the order of its turns. The step thread calls all methods except
`Recorder.of_engine` and `Recorder.report`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import msgspec

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.state import STATE_VERSION
from lockstep.core.step import StepResult
from lockstep.engine.drafter import Drafts
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel
from lockstep.system import SYSTEM, System
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.content import (
    Digests,
    Numbers,
    encode_request,
    secret_of,
    text_path,
    tokens_of,
    vector_of,
    write_text,
)
from lockstep.worker.flight.entries import (
    MARK_BYTES,
    SUFFIX,
    Aborted,
    Added,
    Arrival,
    CacheReset,
    Checkpoint,
    Closed,
    CreditsEntry,
    Dispatched,
    EngineEntry,
    Entry,
    Filled,
    Idle,
    Named,
    OutputDigest,
    Pinned,
    Priorities,
    Proposed,
    Record,
    RequestDigest,
    RequestEntry,
    Shown,
    Tokens,
    Turn,
    Unpinned,
    Vector,
    WithWork,
    runs_of,
)
from lockstep.worker.flight.files import TraceReport
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.writer import RecordingWriter, guarded
from lockstep.worker.messages import AnswerShown, DispatchDecided, TokenizerPayload

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1 << 16
"""Size of collected entries in bytes from which they are queued for the disk at once."""
DEFECT = "a defect of the recorder ended the recording; the log has the exception"


class Recorder:
    """Records one device.

    Args:
        options: options of the recording.
        turns: scheduler of the device.
    """

    def __init__(self, options: TraceOptions, turns: DeviceScheduler, system: System = SYSTEM) -> None:
        self.has_content = options.has_content
        self._options = options
        self.digests = Digests(secret_of(options))
        self._writer = RecordingWriter(options, SUFFIX, self.digests.key_name, system)
        self._files, self.chunk = self._writer.files, self._writer.chunk
        self._now_s = system.now_s
        self.is_on = False
        """True if there is a file to write to."""
        self.contents: Numbers[bytes] = Numbers()
        self.tenants: Numbers[str] = Numbers()
        self.has_stepped = False
        self._has_given_up = False
        self._lock = threading.Lock()
        self._turns = turns
        self._engines: dict[str, EngineRecorder] = {}
        """Recorders of the loaded replicas by key. Any thread may read the mapping, which is replaced and never
        modified."""
        self._needs: dict[str, None] = {}
        """Texts of the engines that were loaded since the file began. The mapping is replaced and never modified."""
        self._num_engines = 0
        self._priorities: dict[str, int] | None = None
        self._with_work: Collection[str] = ()
        self._places: tuple[int, ...] = (0,)
        """Indexes of the replicas with work, as last written."""
        self._is_idle = False
        self._ended_us = 0
        self._flush_s = 0.0

    # -- any thread ---------------------------------------------------------------------------------------------------

    def of_engine(self, key: str, model: LoadedModel, config: SchedulerConfig, speculation: str = "") -> EngineRecorder:
        """Create the recorder of an engine that is about to be loaded.

        Args:
            speculation: `Speculator.text` of its drafter; empty: it has none.
        """
        engine = EngineRecorder(self, key, model, config, speculation)
        with self._lock:
            self._engines = {**self._engines, key: engine}
            self._needs = {**self._needs, **engine.needs}
        return engine

    def keep_text(self, model: LoadedModel) -> str:
        """Write a model's vocabulary and template; returns their name, or an empty string if they cannot be written."""
        try:
            return write_text(self._files.manifest, TokenizerPayload.of(model.tokenizer.parts))
        except OSError as error:
            what = "the vocabulary of %s cannot be written to %s, so this recording cannot be served: %s"
            log.warning(what, model.name, self._options.directory, error.strerror)
            return ""

    def report(self) -> TraceReport:
        report = self._files.report()
        return replace(report, fault=DEFECT) if self._has_given_up else report

    # -- the step thread ----------------------------------------------------------------------------------------------

    @guarded
    def begin_turn(self) -> None:
        """Called before the commands and steps of a turn: begin a file if one is due, and queue the collected
        entries."""
        if self._has_given_up:
            return
        if self._files.is_steady:
            num_bytes = self.chunk.num_bytes
            if num_bytes and (num_bytes >= MAX_CHUNK_BYTES or self._now_s() >= self._flush_s):
                if len(self.contents) > self._options.max_contents:
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
        """Record the end of a replica's turn.

        Args:
            priorities, with_work: arguments of `DeviceScheduler.choose`.
            chosen: result of `DeviceScheduler.choose`.
        """
        stepped, self.has_stepped = self.has_stepped, False
        gap_us, self._ended_us = started_us - (self._ended_us or started_us), ended_us
        if not self.is_on:
            return
        self._put_priorities(priorities)
        place = 0
        if len(priorities) > 1:
            if with_work != self._with_work:
                self._with_work = with_work
                self._put_places(tuple([at for at, key in enumerate(priorities) if key in with_work]))
            place = list(priorities).index(chosen)
        else:
            self._put_places((0,))
        self.chunk.put(Turn(place, ended_us - started_us, gap_us, stepped))
        self._is_idle = False

    @guarded
    def idle(self, priorities: Mapping[str, int]) -> None:
        """Record that no engine has work."""
        if self.is_on:
            self._put_priorities(priorities)
            if not self._is_idle:
                self.chunk.put(Idle())
                self._is_idle = True

    @guarded
    def shown(self, shown: AnswerShown) -> None:
        """Record how an answer was sent to its client, if the recording has content and the replica is still loaded."""
        engine = self._engines.get(shown.replica)
        if engine is not None and self.is_on and self.has_content:
            engine.open()
            self.chunk.put(Shown(engine.number, shown.seq_id, shown.chunks))

    @guarded
    def dispatched(self, decided: DispatchDecided) -> None:
        """Record a decision by nearest examples, if its replica is still loaded."""
        engine = self._engines.get(decided.replica)
        if engine is not None and self.is_on:
            engine.open()
            self.chunk.put(Dispatched(engine.number, decided.seq_id, decided.target, decided.scores))

    @guarded
    def closed(self, key: str) -> None:
        """Record that a replica is unloaded, after which its engine does nothing."""
        with self._lock:
            engine = self._engines.get(key)
            self._engines = {other: kept for other, kept in self._engines.items() if other != key}
        self._priorities = None
        if engine is not None and self.is_on and engine.is_open:
            self.chunk.put(engine.closed())

    @guarded
    def close(self) -> None:
        """End the recording."""
        if self.is_on:
            self._end_file(goes_on=False)
        self._files.close()

    def give_up(self) -> None:
        """End the recording after a defect of the recorder, and log it once. Called within an ``except``."""
        if not self._has_given_up:
            log.exception("the recording ends here; requests are not affected")
        self._has_given_up = True
        self._stop()

    def next_number(self) -> int:
        """Number for an engine that uses the device for the first time."""
        self._num_engines += 1
        return self._num_engines - 1

    def _put_priorities(self, priorities: Mapping[str, int]) -> None:
        if priorities == self._priorities:
            return
        self._priorities, self._is_idle, self._with_work = dict(priorities), False, ()
        for key in priorities:
            self._engines[key].open()
        classes = [(self._engines[key].number, priority) for key, priority in priorities.items()]
        self.chunk.put(Priorities(tuple(classes)))

    def _put_places(self, places: tuple[int, ...]) -> None:
        if places != self._places:
            self._places = places
            self.chunk.put(WithWork(places))

    # -- files --------------------------------------------------------------------------------------------------------

    def _begin_file(self) -> None:
        """End the open file, if any, and begin the next one with the state of all engines."""
        if self.is_on:
            self._end_file(goes_on=True)
        self.is_on = True
        with self._lock:
            self._needs = {name: None for engine in self._engines.values() for name in engine.needs}
        self._writer.begin(self._put_state, tuple(self._needs))
        self._flush_s = self._now_s() + self._options.flush_interval_s

    def _put_state(self) -> None:
        self.contents.forget_others()
        self.tenants.forget_others()
        for engine in self._engines.values():
            engine.begin_file()
        self.contents.end_forgetting()
        self.tenants.end_forgetting()
        self.chunk.put(CreditsEntry(*self._turns.credit_rows()))
        self._priorities, self._places = None, (0,)

    def _end_file(self, goes_on: bool) -> None:
        engines = tuple([engine.closed() for engine in self._engines.values() if engine.is_open])
        self._writer.end(goes_on=goes_on, engines=engines, needs=tuple(self._needs))

    def _flush(self) -> None:
        self._writer.flush(tuple(self._needs))
        self._flush_s = self._now_s() + self._options.flush_interval_s

    def _stop(self) -> None:
        """Discard the collected entries because nothing can be written, until a file can be begun again."""
        self.is_on = False
        self.chunk.clear()
        for engine in self._engines.values():
            engine.is_open = False


class EngineRecorder:
    """Records one engine of a device; implements `lockstep.engine.open_requests.RecorderHook`."""

    def __init__(
        self, recorder: Recorder, key: str, model: LoadedModel, config: SchedulerConfig, speculation: str
    ) -> None:
        self._recorder = recorder
        self._speculation = speculation
        self._drafted: Drafts = {}
        """Drafts whose numbers are proposed next."""
        self._key = key
        self._model = model
        self._config = config
        self._text = recorder.keep_text(model) if recorder.has_content else ""
        self.needs = {text_path(Path(), self._text).name: None} if self._text else {}
        """Names of the files without which the engine's recording cannot be served."""
        self.number = -1
        """Number of the engine; -1: it has not used the device yet."""
        self.is_open = False
        """True if the open file contains an entry of the engine."""
        self._num_lost_steps = 0
        self._has_begun = False
        """True if the engine has had any command, recorded or not."""
        self._scheduler: Scheduler | None = None
        self._fingerprint: Fingerprint | None = None

    def lost(self) -> dict[str, int]:
        """Counters of lost parts of the recording. For any thread."""
        return {"trace_lost_steps": self._num_lost_steps, "trace_gaps": self._recorder.report().num_gaps}

    @property
    def is_recorded(self) -> bool:
        """True if the engine's steps reach a file now. For any thread."""
        return not self._recorder.report().fault

    def open(self) -> None:
        """Add the engine to the open file, if it is not there yet."""
        if self.is_open:
            return
        self.is_open = True
        if self.number < 0:
            self.number = self._recorder.next_number()
        executor = self._model.executor
        entry = EngineEntry(
            self.number,
            self._key,
            self._model.name,
            self._model.fingerprint,
            self._config,
            dict(executor.environment),
            dict(executor.machine),
            executor.geometry.bytes_per_block,
            self._text,
            executor.geometry.num_stages,
            self._speculation,
        )
        self._recorder.chunk.put(entry)

    def begin_file(self) -> None:
        """Write the engine's checkpoint at the beginning of a file; an engine without commands so far needs none."""
        self.is_open = False
        if not self._has_begun:
            return
        self.open()
        assert self._scheduler is not None
        assert self._fingerprint is not None
        recorder, state, encode = self._recorder, self._scheduler.state(), msgspec.msgpack.encode
        checkpoint = Checkpoint(
            self.number,
            STATE_VERSION,
            runs_of(map(recorder.contents.of, state.contents)),
            tuple(map(recorder.tenants.of, state.tenants)),
            msgspec.Raw(encode(state._replace(contents=(), tenants=()))),
            msgspec.Raw(encode(self._fingerprint.state())),
        )
        recorder.chunk.put(checkpoint)

    def closed(self) -> Closed:
        """Position of the engine now."""
        assert self._scheduler is not None
        assert self._fingerprint is not None
        return Closed.of(self.number, self._scheduler.stats().num_steps, self._fingerprint)

    # -- RecorderHook -------------------------------------------------------------------------------------------------

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None:
        self._scheduler, self._fingerprint = scheduler, fingerprint

    @guarded
    def added(self, seq_id: int, request: Request, step: int) -> None:
        if self._records():
            recorder = self._recorder
            tenant, contents = recorder.tenants.of(request.tenant), map(recorder.contents.of, request.block_hashes)
            self._put(Added.of(self.number, step, seq_id, request, tenant, contents))

    @guarded
    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None:
        if self._records():
            self._put(Aborted(self.number, step, seq_id, reason, in_step))

    @guarded
    def answer_named(self, seq_id: int, hashes: Seq[bytes], step: int, in_step: bool) -> None:
        if self._records():
            runs = runs_of(map(self._recorder.contents.of, hashes))
            self._put(Named(self.number, step, seq_id, runs, in_step))

    @guarded
    def pinned(self, hashes: Seq[bytes], borders: Seq[int], step: int) -> None:
        if self._records():
            self._put(Pinned(self.number, step, runs_of(map(self._recorder.contents.of, hashes)), tuple(borders)))

    @guarded
    def unpinned(self, hashes: Seq[bytes], borders: Seq[int], step: int) -> None:
        if self._records():
            self._put(Unpinned(self.number, step, runs_of(map(self._recorder.contents.of, hashes)), tuple(borders)))

    @guarded
    def filled(self, hashes: Seq[bytes], start: int, group: int, step: int) -> None:
        if self._records():
            self._put(Filled(self.number, step, runs_of(map(self._recorder.contents.of, hashes)), start, group))

    @guarded
    def cache_reset(self, step: int) -> None:
        if self._records():
            self._put(CacheReset(self.number, step))

    @guarded
    def drafted(self, drafts: Drafts) -> None:
        self._drafted = drafts

    @guarded
    def proposed(self, drafts: Mapping[int, int], step: int) -> None:
        if self._records():
            content = [tuple(self._drafted[seq_id]) for seq_id in drafts] if self._recorder.has_content else []
            self._put(Proposed(self.number, step, tuple(drafts.items()), tuple(content)))

    @guarded
    def joined(self, generation: Generation, waited_s: float) -> None:
        if not self._records():
            return
        live, seq_id = generation.live, generation.seq_id
        request = live.request
        deadlines = _ms(request.deadline_s), _ms(request.queue_deadline_s)
        self._put(Arrival(self.number, seq_id, round(waited_s * 1e6), live.seed, *deadlines))
        if generation.index:
            return
        digests = self._recorder.digests
        prompt, parameters = digests.prompt(live.prompt_ids), digests.parameters(request)
        draws = not live.sampling.is_greedy
        adapter = (request.adapter, "" if live.adapter is None else live.adapter.fingerprint)
        labels = (request.external_id, request.segment)
        self._put(RequestDigest(self.number, seq_id, prompt, parameters, *labels, draws, *adapter))
        if self._recorder.has_content:
            self._put(RequestEntry(self.number, seq_id, encode_request(live, self._recorder.tenants.of)))

    @guarded
    def committed(self, record: bytes | None, result: StepResult, touched: Seq[Generation]) -> None:
        self._step(record)
        if self._recorder.has_content and self._records():
            self._put(Tokens(self.number, tuple(tokens_of(result, touched))))

    @guarded
    def ended(self, generation: Generation) -> None:
        if self._records():
            assert generation.finish_reason is not None, "it has ended"
            output = self._recorder.digests.output(generation)
            entry = OutputDigest(
                self.number, generation.seq_id, generation.finish_reason, generation.num_output, output
            )
            self._put(entry)
            if self._recorder.has_content and (vector := vector_of(generation)) is not None:
                self._put(Vector(self.number, generation.seq_id, vector))

    @guarded
    def failed(self, record: bytes | None) -> None:
        self._step(record)

    def give_up(self) -> None:
        self._recorder.give_up()

    def _step(self, record: bytes | None) -> None:
        self._recorder.has_stepped = True
        self._num_lost_steps += not self._recorder.is_on
        if record is not None and self._records():
            assert self._fingerprint is not None
            self._put(Record(self.number, record, self._fingerprint.chain[:MARK_BYTES]))

    def _records(self) -> bool:
        """True if the recording is on, in which case the engine is added to the file."""
        self._has_begun = True
        if self._recorder.is_on:
            self.open()
        return self._recorder.is_on

    def _put(self, entry: Entry) -> None:
        self._recorder.chunk.put(entry)


def _ms(seconds: float | None) -> int | None:
    """Milliseconds, rounded, at least 1; None: no limit."""
    return None if seconds is None else max(1, round(seconds * 1e3))
