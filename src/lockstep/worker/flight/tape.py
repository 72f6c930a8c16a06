"""What one engine tells, as entries of its device's recording."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

import msgspec

from lockstep.core.checkpoint import freeze
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepResult
from lockstep.engine.generation import Generation
from lockstep.engine.loading import LoadedModel
from lockstep.worker.flight.content import encode_request, tokens_of
from lockstep.worker.flight.format import (
    MARK_BYTES,
    Kind,
    put_bytes,
    put_ids,
    put_ints,
    put_request,
    signed,
)

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import Recorder

_REASONS = {reason: index for index, reason in enumerate(FinishReason)}


Told = ParamSpec("Told")


def guarded(method: Callable[Told, None]) -> Callable[Told, None]:
    """A defect of the recorder ends the recording, and never a request. For methods of what has a ``give_up``."""

    @wraps(method)
    def call(*arguments: Told.args, **named: Told.kwargs) -> None:
        try:
            method(*arguments, **named)
        except Exception:  # whatever it is: the engine goes on
            arguments[0].give_up()  # type: ignore[attr-defined]  # self

    return call


class EngineTape:
    """What one engine tells; implements `lockstep.engine.taped.Tape`."""

    def __init__(self, recorder: Recorder, key: str, model: LoadedModel, config: SchedulerConfig) -> None:
        self._recorder = recorder
        self._key = key
        self._model = model
        self._config = config
        self.number = -1
        """Of the engine, once it had to do with the device."""
        self.is_open = False
        """Whether the file knows the engine."""
        self._num_lost_steps = 0
        self._has_begun = False
        """Whether it was told anything, recorded or not."""
        self._scheduler: Scheduler | None = None
        self._fingerprint: Fingerprint | None = None

    def facts(self) -> dict[str, object]:
        executor = self._model.executor
        return {
            "number": self.number,
            "key": self._key,
            "name": self._model.name,
            "fingerprint": self._model.fingerprint,
            "config": asdict(self._config),
            "geometry": asdict(executor.geometry),
            "environment": dict(executor.environment),
        }

    def lost(self) -> dict[str, int]:
        """What the recording lacks, as counters; for any thread."""
        return {"trace_lost_steps": self._num_lost_steps, "trace_gaps": self._recorder.report().num_gaps}

    @property
    def is_recorded(self) -> bool:
        """Whether its steps reach a file now; for any thread."""
        return not self._recorder.report().fault

    def open(self) -> None:
        """Let the file know the engine, if it does not."""
        if not self.is_open:
            self.is_open = True
            self._recorder.open_engine(self)

    def begin_file(self) -> None:
        """A file begins; an engine that was told nothing yet needs no checkpoint."""
        self.is_open = False
        if not self._has_begun:
            return
        self.open()
        recorder = self._recorder
        assert self._scheduler is not None
        assert self._fingerprint is not None
        scheduler = freeze(self._scheduler, recorder.contents.of, recorder.tenants.of)
        out = recorder.out
        out.append(Kind.CHECKPOINT)
        put_ints(out, self.number)
        put_bytes(out, msgspec.msgpack.encode(scheduler))
        put_bytes(out, msgspec.msgpack.encode(freeze(self._fingerprint)))

    def end(self) -> bytes:
        """How far the engine has come."""
        assert self._scheduler is not None
        assert self._fingerprint is not None
        out = bytearray()
        put_ints(out, self.number, self._scheduler.stats().num_steps)
        put_bytes(out, self._fingerprint.open_record or b"")
        out += bytes.fromhex(self._fingerprint.hexdigest())
        return bytes(out)

    def close(self) -> None:
        """The engine does nothing any more."""
        if self._recorder.is_on and self.is_open:
            self._recorder.out.append(Kind.CLOSED)
            self._recorder.out += self.end()

    # -- Tape ---------------------------------------------------------------------------------------------------------

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None:
        self._scheduler, self._fingerprint = scheduler, fingerprint

    @guarded
    def added(self, seq_id: int, request: Request, step: int) -> None:
        out = self._entry(Kind.ADDED)
        if out is None:
            return
        recorder = self._recorder
        tenant = recorder.tenants.of(request.tenant)
        put_request(out, step, seq_id, request, tenant, map(recorder.contents.of, request.block_hashes))

    @guarded
    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None:
        out = self._entry(Kind.ABORTED)
        if out is not None:
            put_ints(out, step, seq_id, 2 * _REASONS[reason] + in_step)

    @guarded
    def pinned(self, hashes: Seq[bytes], step: int) -> None:
        self._hashes(Kind.PINNED, hashes, step)

    @guarded
    def swept(self, hashes: Seq[bytes], step: int) -> None:
        self._hashes(Kind.SWEPT, hashes, step)

    @guarded
    def cache_reset(self, step: int) -> None:
        out = self._entry(Kind.RESET)
        if out is not None:
            put_ints(out, step)

    @guarded
    def came(self, generation: Generation, waited_s: float) -> None:
        out = self._entry(Kind.CAME)
        if out is None:
            return
        prepared = generation.live.prepared
        request = prepared.request
        put_ints(out, generation.seq_id, round(waited_s * 1e6), signed(prepared.seed + generation.index))
        put_ints(out, _ms(request.deadline_s), _ms(request.queue_deadline_s))
        if self._recorder.has_content and generation.index == 0:
            out.append(Kind.REQUEST)
            put_ints(out, self.number, generation.seq_id)
            put_bytes(out, encode_request(prepared, self._recorder.tenants.of))

    @guarded
    def committed(self, record: bytes | None, result: StepResult, touched: Seq[Generation]) -> None:
        self._recorder.has_stepped = True
        self._record(record)
        if self._recorder.has_content:
            out = self._entry(Kind.TOKENS)
            if out is not None:
                rows = tokens_of(result, touched)
                put_ints(out, len(rows))
                for row in rows:
                    put_ints(out, len(row), *row)

    @guarded
    def failed(self, record: bytes | None) -> None:
        self._recorder.has_stepped = True
        self._record(record)

    def give_up(self) -> None:
        self._recorder.give_up()

    def _record(self, record: bytes | None) -> None:
        self._num_lost_steps += not self._recorder.is_on
        if record is None:
            return
        out = self._entry(Kind.RECORD)
        if out is not None:
            assert self._fingerprint is not None
            put_bytes(out, record)
            out += self._fingerprint.chain[:MARK_BYTES]

    def _hashes(self, kind: Kind, hashes: Seq[bytes], step: int) -> None:
        out = self._entry(kind)
        if out is not None:
            put_ints(out, step)
            put_ids(out, map(self._recorder.contents.of, hashes))

    def _entry(self, kind: Kind) -> bytearray | None:
        """Begin an entry; None: nothing is recorded now."""
        self._has_begun = True
        recorder = self._recorder
        if not recorder.is_on:
            return None
        if not self.is_open:
            self.open()
        recorder.out.append(kind)
        put_ints(recorder.out, self.number)
        return recorder.out


def _ms(seconds: float | None) -> int:
    """0: none; the least is 1."""
    return 0 if seconds is None else max(1, round(seconds * 1e3))
