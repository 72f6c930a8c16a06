"""Batch runner: takes each batch from validation to its end, using only the time in which no client request is open.

Batch requests are started while no client request is open, up to a limit of concurrent requests. When a client request
arrives, running batch requests are aborted and queued again. A request that was aborted `MAX_ABORTS` times runs to
its end, one such request at a time. So batches make progress under any load that has occasional gaps. A result is
written to disk before it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp

from lockstep.errors import LockstepError, ModelNotFoundError, StorageError, StorageFullError
from lockstep.server.batches.answering import InProcessServer, answer
from lockstep.server.batches.input_file import BatchRequest, CheckedInput, Fault, checked_input
from lockstep.server.batches.job import BatchJob, Reply
from lockstep.server.batches.schema import Batch
from lockstep.server.batches.store import BatchStore
from lockstep.server.serving import Serving

log = logging.getLogger(__name__)

MAX_JOBS = 64
"""Maximum number of batches that are worked on at once. Later batches wait for validation."""
MAX_ABORTS = 2
"""Maximum number of times that one request is aborted for client requests. Then it runs to its end."""
MAX_BESIDE = 1
"""Maximum number of batch requests that keep running beside client requests."""
SETTLE_S = 0.02
"""Idle time, in seconds, before a batch request is started. A client often sends its next request immediately."""
STAGGER_S = 0.01
"""Seconds between two starts of batch requests. A client request that arrives during a start waits for it, and would
wait twice as long for two."""
CHECK_INTERVAL_S = 1.0
"""Interval, in seconds, at which batches are checked when nothing has happened. A batch may have expired."""
MAX_REFUSED_S = 15.0
"""Maximum time, in seconds, between two attempts to write to a failing disk.

The first retry is after `CHECK_INTERVAL_S`; the delay doubles with each attempt."""
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


@dataclass(slots=True)
class RunnerCounts:
    """Counters since the server started."""

    num_completed: int = 0
    num_failed: int = 0
    num_aborted: int = 0


class _Answer(NamedTuple):
    """A result that has not been written to disk yet."""

    number: int
    """Index of the request, from 0."""
    request: BatchRequest
    reply: Reply


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that has not ended."""

    tenant: str
    batch: Batch
    saved: Batch
    """The batch as it was last saved in the store."""
    job: BatchJob | None = None
    aborts: dict[int, int] = field(default_factory=dict)
    """Number of aborts, by index of a request that is waiting or running again."""
    answers: list[_Answer] = field(default_factory=list)
    """Results that could not be written to disk. There are at most as many as concurrent requests, because no request
    is started meanwhile."""
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while results are written, so that each is written once."""
    faults: tuple[Fault, ...] = ()
    """Reasons why the batch cannot continue."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A batch request that is being executed."""

    owner: _Open
    job: BatchJob
    index: int
    num_aborts: int
    task: asyncio.Task[bool] | None = None
    is_answered: bool = False
    """True once the result is being written. The request is not aborted after this point."""

    def abort(self) -> None:
        if self.task is not None and not self.is_answered:
            self.task.cancel()


def to_abort(running: Iterable[RunningRequest]) -> list[RunningRequest]:
    """Requests to abort for a client request: all except up to `MAX_BESIDE` that have reached `MAX_ABORTS`."""
    spared = [each for each in running if each.num_aborts >= MAX_ABORTS][:MAX_BESIDE]
    return [each for each in running if each not in spared]


class BatchRunner:
    """Runs all batches of one server. Used from the server's event loop."""

    def __init__(self, serving: Serving, store: BatchStore, app: ASGIApp) -> None:
        self.store, system = store, store.system
        self._now_s, self.unix_time_s = system.now_s, system.unix_time_s
        self.counts = RunnerCounts()
        self._serving = serving
        self._server = InProcessServer(app, system)
        self._open: dict[str, _Open] = {}
        self._running: list[RunningRequest] = []
        self._wake = asyncio.Event()
        self._turn = 0
        self._busy_s = 0.0
        """When a client request was last open, on the monotonic clock."""
        self._started_s = 0.0
        """When a batch request was last started, on the monotonic clock."""
        self._num_refused = 0
        """Number of consecutive rounds with a disk error."""
        self._refused_until_s = 0.0
        """Time of the next round after a disk error, on the monotonic clock."""
        serving.traffic.watcher = self._traffic_changed

    # -- interface for the routes ---------------------------------------------------------------------------------

    def add(self, tenant: str, batch: Batch) -> None:
        """Start to run a batch that is in the store."""
        self._open[batch.id] = _Open(tenant, batch, batch)
        self.check_now()

    def current(self, batch: Batch) -> Batch:
        """Current state of a batch. If it waits because of a disk error, the error is in its faults."""
        found = self._open.get(batch.id)
        if found is None:
            return batch
        shown, refusal = _counted(found.batch, found.job), self.store.fault
        if refusal is None or shown.has_ended:
            return shown
        code = "storage_full" if isinstance(refusal, StorageFullError) else "storage_unavailable"
        return msgspec.structs.replace(shown, faults=(Fault(code, f"the batch waits: {refusal}"),))

    async def cancel(self, batch: Batch) -> Batch:
        """Start to cancel a batch. A batch that has ended or is ending is returned unchanged.

        The batch's requests are aborted immediately. If the cancellation cannot be written to disk, it is kept in
        memory and written later.
        """
        found = self._open.get(batch.id)
        if found is None or found.batch.status not in ("validating", "in_progress"):
            return self.current(batch)
        found.batch = found.batch.in_state("cancelling", self.unix_time_s())
        for running in self._running_of(found):
            running.abort()
        with suppress(StorageError):
            await self._save(found)
        self.check_now()
        return self.current(batch)

    def check_now(self) -> None:
        """Check all batches now, even after a disk error: there may be space again."""
        self._refused_until_s = 0.0
        self._wake.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_of(self) -> dict[str, int]:
        """Numbers of batches that have not ended, by status."""
        numbers = dict.fromkeys(("validating", "in_progress", "finalizing", "cancelling"), 0)
        for each in self._open.values():
            numbers[each.batch.status] = numbers.get(each.batch.status, 0) + 1
        return numbers

    @property
    def num_waiting(self) -> int:
        """Number of requests of validated batches that are neither finished nor running."""
        jobs = [each.job for each in self._open.values() if each.job is not None]
        unanswered = sum(j.journal.num_requests - j.journal.num_completed - j.journal.num_failed for j in jobs)
        return unanswered - len(self._running)

    # -- main loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run batches until cancelled. Unfinished requests stay in the store."""
        try:
            for tenant, batch in await self.store.open_batches():
                self._open[batch.id] = _Open(tenant, batch, batch)
            if self._open:
                log.info("resuming %d batches", len(self._open))
            while True:
                self._wake.clear()
                timeout_s = await self._round()
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):  # `wait_for` of 3.11 may lose a cancellation
                        await self._wake.wait()
        finally:
            await self._stop(self._running)
            for each in self._open.values():
                with suppress(StorageError):
                    await self._keep(each)
                if each.answers:
                    log.warning("%s: %d results are lost: the disk failed", each.batch.id, len(each.answers))
                if each.job is not None:
                    await self.store.run(each.job.close)

    async def _stop(self, running: Iterable[RunningRequest]) -> None:
        """Abort requests, and wait until results that are being written are on disk."""
        tasks = [each.task for each in running if each.task is not None]
        for each in list(running):
            each.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running_of(self, owner: _Open) -> list[RunningRequest]:
        return [running for running in self._running if running.owner is owner]

    async def _round(self) -> float:
        """Advance all batches, then start one request. Return the seconds until the next round.

        No request is started while the disk returns errors, since its result could not be written.
        """
        wait_s = self._refused_until_s - self._now_s()
        if wait_s > 0:
            return wait_s
        if await self._advance_all():
            self._num_refused = 0
            return self._start_next()
        wait_s = min(MAX_REFUSED_S, CHECK_INTERVAL_S * 2.0 ** min(self._num_refused, 8))
        self._num_refused += 1
        self._refused_until_s = self._now_s() + wait_s
        return wait_s

    # -- starting and aborting requests ---------------------------------------------------------------------------

    def _traffic_changed(self) -> None:
        """Handle the arrival of a client request, or the end of the last open one."""
        self._busy_s = self._now_s()
        if self._serving.traffic.num_open:
            for each in to_abort(self._running):
                each.abort()
        else:
            self._wake.set()

    def _start_next(self) -> float:
        """Start one request if no client request is open. Return the seconds until the next round."""
        if self._serving.traffic.num_open or not self._serving.lifecycle.is_admitting:
            return CHECK_INTERVAL_S
        now_s = self._now_s()
        wait_s = max(self._busy_s + SETTLE_S, self._started_s + STAGGER_S) - now_s
        if wait_s > 0:
            return wait_s
        if len(self._running) >= self._serving.options.max_batch_requests or (found := self._next()) is None:
            return CHECK_INTERVAL_S
        self._started_s = now_s
        self._running.append(found)
        found.task = asyncio.create_task(self._answer(found), name="batch request")
        found.task.add_done_callback(partial(self._ended, found))
        return STAGGER_S

    def _next(self) -> RunningRequest | None:
        """Return the next request, taken from the batches in round-robin order."""
        at_work = [each for each in self._open.values() if each.batch.status == "in_progress" and each.job is not None]
        for place in range(len(at_work)):
            owner = at_work[(self._turn + place) % len(at_work)]
            assert owner.job is not None, "checked above"
            index = owner.job.take()
            if index is not None:
                self._turn = (self._turn + place + 1) % len(at_work)
                return RunningRequest(owner, owner.job, index, owner.aborts.get(index, 0))
        return None

    async def _answer(self, running: RunningRequest) -> bool:
        """Execute a request and write its result. Return False on a disk error; the result is then written later."""
        job, index = running.job, running.index
        request = await self.store.run(lambda: job.request(index))
        reply = await answer(self._server, job, index, request)
        running.is_answered = True
        running.owner.answers.append(_Answer(index, request, reply))
        try:
            await self._keep(running.owner)
        except StorageError:
            return False
        return True

    async def _keep(self, owner: _Open) -> None:
        """Write the results of a batch that have not been written yet.

        Raises:
            StorageError: a result cannot be written.
        """
        async with owner.keeping:
            while owner.answers:
                each = owner.answers[0]
                assert owner.job is not None, "a batch with results has a job"
                await self.store.run(partial(owner.job.answer, *each))
                del owner.answers[0]
                owner.aborts.pop(each.number, None)
                self.counts.num_completed += each.reply.is_success
                self.counts.num_failed += not each.reply.is_success

    def _ended(self, running: RunningRequest, task: asyncio.Task[bool]) -> None:
        """Record the outcome of a request, even if it was aborted before it started."""
        job, index, owner = running.job, running.index, running.owner
        self._running.remove(running)
        self._wake.set()
        if task.cancelled():
            job.requeue(index)
            owner.aborts[index] = running.num_aborts + 1
            self.counts.num_aborted += 1
            return
        error = task.exception()
        if error is not None:  # the batch reports any error
            log.error("%s cannot continue", job.name, exc_info=error)
            owner.faults = (Fault("storage_error", f"request {index + 1} cannot be executed or stored: {error}"),)

    # -- states of a batch ----------------------------------------------------------------------------------------

    async def _advance_all(self) -> bool:
        """Advance the state of every batch that is due. Return False on a disk error."""
        is_kept = True
        for each in list(self._open.values()):
            is_kept &= await self._try_advance(each)
        if is_kept and self.store.fault is not None:  # an upload may have failed; nothing else here retries it
            await self.store.probe()
            is_kept = self.store.fault is None
        return is_kept

    async def _try_advance(self, each: _Open) -> bool:
        """Advance the state of a batch if it is due. Return False on a disk error."""
        try:
            await self._advance(each, self.unix_time_s())
        except StorageError:  # the data stays in memory for the next attempt
            return False
        except (OSError, sqlite3.Error, LockstepError) as error:
            if not each.faults:
                log.error("%s cannot continue: %s", each.batch.id, error)
            each.faults = each.faults or (Fault("storage_error", f"the batch cannot continue: {error}"),)
        return True

    async def _advance(self, each: _Open, now_s: float) -> None:
        if not (each.faults or each.batch.has_ended):
            await self._keep(each)
            await self._save(each)
            await self._continue(each, now_s)
        if each.faults and not each.batch.has_ended:
            await self._fail(each, now_s)
        await self._save(each)
        if each.batch.has_ended:
            self._close(each)

    async def _continue(self, each: _Open, now_s: float) -> None:
        is_over = has_expired(each.batch, now_s)
        if each.job is None and not (each.batch.status == "validating" and (is_over or self._num_jobs >= MAX_JOBS)):
            await self._begin(each)
        batch = each.batch
        if each.faults:
            return
        if batch.status == "cancelling":
            await self._end(each, batch.in_state("cancelled", now_s), None)
        elif each.job is not None and each.job.journal.is_complete:
            if batch.status == "in_progress":
                each.batch = batch = batch.in_state("finalizing", now_s)
                await self._save(each)
            await self._end(each, batch.in_state("completed", now_s), None)
        elif is_over:
            await self._end(each, batch.in_state("expired", now_s), EXPIRED)

    async def _save(self, each: _Open) -> None:
        """Save the state of a batch in the store, if it changed. Raises StorageError on a disk error."""
        batch = each.batch
        if batch is not each.saved:
            await self.store.save(batch)
            each.saved = batch

    def _close(self, each: _Open) -> None:
        """Remove a batch that has ended."""
        del self._open[each.batch.id]
        job = each.job
        if job is None or each.batch.status == "failed":
            return
        shown = _counted(each.batch, job)
        log.info("%s %s: %d of %d answered", shown.id, shown.status, shown.num_completed, shown.num_requests)

    @property
    def _num_jobs(self) -> int:
        return sum(each.job is not None for each in self._open.values())

    async def _begin(self, each: _Open) -> None:
        """Validate a batch's input file, and open its job where the previous process stopped."""
        batch = each.batch
        if batch.status == "cancelling" and "in_progress_at" not in batch.times:
            return
        path, most = self.store.path_of(batch.input_file_id), self._serving.options.max_body_bytes

        def check() -> CheckedInput:
            with path.open("rb") as file:
                return checked_input(file, batch.endpoint, most)

        checked = await self.store.system.run_in_thread(check)
        faults = [*checked.faults, *(self._unknown_models(checked) if batch.status == "validating" else ())]
        if faults:
            each.faults = tuple(sorted(faults, key=lambda fault: fault.line or 0))
            return
        offsets: array[int] = checked.offsets
        each.job = await self.store.run(lambda: self.store.open_job(each.tenant, batch, offsets))
        if each.batch.status == "validating":  # it may have been cancelled meanwhile
            models = list(checked.models)
            model = models[0] if len(models) == 1 else None
            each.batch = each.batch.in_state("in_progress", self.unix_time_s(), num_requests=len(offsets), model=model)
            await self._save(each)

    def _unknown_models(self, checked: CheckedInput) -> Iterable[Fault]:
        for model, line in checked.models.items():
            try:
                self._serving.cluster.card(model)
            except ModelNotFoundError as error:
                yield Fault("model_not_found", str(error), "body.model", line)
            except LockstepError:  # not known yet; the request itself will report this error
                return

    async def _fail(self, each: _Open, now_s: float) -> None:
        await self._stop(self._running_of(each))
        each.answers.clear()
        each.batch = _counted(each.batch, each.job).in_state("failed", now_s, faults=each.faults)
        job, each.job = each.job, None
        if job is not None:
            await self.store.run(job.close)

    async def _end(self, each: _Open, ended: Batch, unanswered: tuple[str, str] | None) -> None:
        """End a batch and write its result files."""
        await self._stop(self._running_of(each))
        await self._keep(each)
        job, store = each.job, self.store
        if job is None:
            each.batch = ended
        else:
            whole = _counted(ended, job, counts_unanswered=unanswered is not None)
            now_s = self.unix_time_s()
            each.batch = each.saved = await store.run(lambda: store.finish(job, whole, now_s, unanswered))


def has_expired(batch: Batch, now_s: float) -> bool:
    """True if the completion window of a batch is over before all of its requests are finished."""
    return now_s >= batch.expires_at and batch.status in ("validating", "in_progress")


def _counted(batch: Batch, job: BatchJob | None, *, counts_unanswered: bool = False) -> Batch:
    """Return the batch with its request counts filled in.

    Args:
        counts_unanswered: count requests without a result as failed.
    """
    if job is None:
        return batch
    journal = job.journal
    num_failed = journal.num_requests - journal.num_completed if counts_unanswered else journal.num_failed
    return msgspec.structs.replace(
        batch, num_requests=journal.num_requests, num_completed=journal.num_completed, num_failed=num_failed
    )
