"""Recording of a simulated run, in the format of `lockstep serve --trace`, with times of the logical clock.

It has one file and one engine, in the entries of worker/flight/entries.py. All readers of recordings accept it: `replay
--verify`, `diff`, `calibrate`, and `replay`, as a workload. The same replay gives the same bytes. Times are rounded
down to microseconds, the unit of recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import zstandard

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel
from lockstep.replay.timeline import Tick
from lockstep.replay.workload import PS_PER_US, Workload, content_number
from lockstep.version import __version__
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.chunks import ChunkWriter
from lockstep.worker.flight.entries import (
    MARK_BYTES,
    SCHEMA_VERSION,
    Added,
    Arrival,
    Closed,
    CreditsEntry,
    End,
    EngineEntry,
    Header,
    Idle,
    Priorities,
    Record,
    Turn,
)
from lockstep.worker.flight.files import LEVEL, MAX_FRAME_BYTES

RUN = "simulated"
"""Name of the run, a constant so that equal replays give equal bytes."""
_ENGINE = 0


class RunRecording:
    """A watcher of ticks and arrivals that writes them to a file; each simulation needs its own.

    A context manager. The file is complete if the block ends without an exception, and otherwise readable up to the
    last written entry.

    Args:
        workload, config, cost: inputs of the simulation.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, path: Path | str, workload: Workload, config: SchedulerConfig, cost: CostModel) -> None:
        self._cost = cost
        self._per_content = workload.content_size // config.block_size
        try:
            self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise UsageError(f"{path}: cannot write the recording: {error.strerror}") from None
        self._path = path
        self._chunk = ChunkWriter()
        self._written = b""
        """Chunks of the next frame."""
        self._tenants: dict[str, int] = {}
        self._coming: list[tuple[int, int]] = []
        """Arrivals since the last step: sequence id, and time in microseconds."""
        self._fingerprint = Fingerprint()
        self._num_steps = 0
        self._end_us = 0
        """End of the previous step."""
        self._begin(workload.name, config)

    def __enter__(self) -> RunRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._end()
            self._flush()
        finally:
            self._file.close()

    def arrived(self, seq_id: int, request: Request, arrival_ps: int) -> None:
        """Record a queued request; called before the first step that can include it."""
        tenant = self._tenants.setdefault(request.tenant, len(self._tenants))
        contents = (content_number(each, self._per_content) for each in request.block_hashes)
        self._chunk.put(Added.of(_ENGINE, self._num_steps, seq_id, request, tenant, contents))
        self._coming.append((seq_id, arrival_ps // PS_PER_US))

    def __call__(self, tick: Tick) -> None:
        """Write a step, or each step of a run."""
        if tick.plan is None or tick.events is None:
            return
        start_us = tick.start_ps // PS_PER_US
        for seq_id, arrival_us in self._coming:
            self._chunk.put(Arrival(_ENGINE, seq_id, start_us - arrival_us, 0))
        self._coming.clear()
        record = self._fingerprint.observe(tick.plan, tick.events)
        if record is not None:
            self._chunk.put(Record(_ENGINE, record, self._fingerprint.chain[:MARK_BYTES]))
        if tick.num_ticks > 1:
            self._fingerprint.repeat(tick.num_ticks - 1)
        self._num_steps += tick.num_ticks
        if start_us > self._end_us:
            self._chunk.put(Idle())
        for end_us in self._ends_us(tick):
            self._chunk.put(Turn(0, end_us - start_us, start_us - self._end_us, True))
            start_us = self._end_us = end_us
        if self._chunk.num_bytes >= MAX_FRAME_BYTES:
            self._flush()

    def _ends_us(self, tick: Tick) -> Iterator[int]:
        """End of each step of a run, in microseconds."""
        if tick.num_ticks > 1:
            assert tick.plan is not None
            num_seqs, num_tokens = len(tick.plan.seq_ids), tick.plan.num_tokens
            num_context = sum(tick.plan.starts) + num_tokens
            first_ps = self._cost.step_ps(tick.num_prefill_tokens, num_tokens - tick.num_prefill_tokens, num_context)
            for number in range(tick.num_ticks - 1):
                passed_ps = first_ps + self._cost.run_ps(number, num_seqs, num_context + num_seqs)
                yield (tick.start_ps + passed_ps) // PS_PER_US
        yield (tick.start_ps + tick.duration_ps) // PS_PER_US

    def _begin(self, name: str, config: SchedulerConfig) -> None:
        put = self._chunk.put
        self._written = self._chunk.begin_file(Header(SCHEMA_VERSION, __version__, RUN, 1, is_simulated=True))
        put(EngineEntry(_ENGINE, name, name, "", config, {}, {}, 0))
        put(CreditsEntry(*DeviceScheduler().credit_rows()))
        put(Priorities(((_ENGINE, 0),)))

    def _end(self) -> None:
        self._chunk.put(End((Closed.of(_ENGINE, self._num_steps, self._fingerprint),), goes_on=False))

    def _flush(self) -> None:
        if not self._chunk.num_bytes:
            return
        frame = zstandard.ZstdCompressor(LEVEL, write_checksum=True).compress(self._written + self._chunk.take())
        self._written = b""
        try:
            self._file.write(frame)
        except OSError as error:
            raise UsageError(f"{self._path}: cannot continue the recording: {error.strerror}") from None
