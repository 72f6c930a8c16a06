"""Runner of batches: takes each from its checking to its end, in turns in which nobody else waits for an answer.

Requests of batches are handed in while no client's request is open, a bounded number at once. When one comes, they are
aborted and wait again; but none oftener than `MAX_SET_BACKS` times: one such request at a time runs on to its end, so
that batches get on beside any load that has a gap now and then. What was answered is durable before it counts.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.types import ASGIApp

from lockstep.errors import LockstepError, ModelNotFoundError
from lockstep.server.batches.answering import Door, answer
from lockstep.server.batches.input_file import CheckedInput, Fault, checked_input
from lockstep.server.batches.job import Job
from lockstep.server.batches.schema import Batch
from lockstep.server.batches.store import BatchStore
from lockstep.server.serving import Serving

log = logging.getLogger(__name__)

MAX_JOBS = 64
"""Batches whose requests take turns; later ones wait to be checked."""
MAX_SET_BACKS = 2
"""Times that one request is aborted for others; then it runs to its end."""
MAX_BESIDE = 1
"""Requests that run on beside those of clients."""
SETTLE_S = 0.02
"""Idle time before requests are handed in: a client often sends its next one at once."""
STAGGER_S = 0.01
"""Time between requests that are handed in: a client's that comes while one is taken in waits, and for two it would
wait twice as long."""
TEND_S = 1.0
"""Time after which batches are looked at although nothing happened: one may have expired."""
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


@dataclass(slots=True)
class RunnerCounts:
    """Counts since the start."""

    num_completed: int = 0
    num_failed: int = 0
    num_set_back: int = 0


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that has not ended."""

    tenant: str
    batch: Batch
    job: Job | None = None
    set_backs: dict[int, int] = field(default_factory=dict)
    """By request that was aborted and waits or runs again, how often."""
    fault: Fault | None = None
    """Why it cannot go on."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that is being answered."""

    owner: _Open
    job: Job
    index: int
    num_set_backs: int
    task: asyncio.Task[bool] | None = None
    is_answered: bool = False
    """From here on it is not aborted: its answer is being kept."""

    def abort(self) -> None:
        if self.task is not None and not self.is_answered:
            self.task.cancel()


def to_set_back(running: Iterable[RunningRequest]) -> list[RunningRequest]:
    """Requests that are aborted for a client's: all but the few that were aborted as often as they may be."""
    spared = [each for each in running if each.num_set_backs >= MAX_SET_BACKS][:MAX_BESIDE]
    return [each for each in running if each not in spared]


class BatchRunner:
    """All batches of one server. Used from its event loop."""

    def __init__(self, serving: Serving, store: BatchStore, app: ASGIApp) -> None:
        self.store = store
        self.counts = RunnerCounts()
        self._serving = serving
        self._door = Door(app)
        self._open: dict[str, _Open] = {}
        self._running: list[RunningRequest] = []
        self._wake = asyncio.Event()
        self._turn = 0
        self._busy_s = 0.0
        """When a client's request was open last, on the monotonic clock."""
        self._handed_in_s = 0.0
        """When requests were handed in last."""
        serving.traffic.watcher = self._traffic_changed

    # -- what the routes ask --------------------------------------------------------------------------------------

    def add(self, tenant: str, batch: Batch) -> None:
        """Run a batch that is in the store."""
        self._open[batch.id] = _Open(tenant, batch)
        self._wake.set()

    def current(self, batch: Batch) -> Batch:
        """A batch of the store, as far as it has come by now."""
        found = self._open.get(batch.id)
        return batch if found is None else _counted(found.batch, found.job)

    async def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch; one that has ended, or ends already, stays as it is."""
        found = self._open.get(batch.id)
        if found is None or found.batch.status not in ("validating", "in_progress"):
            return self.current(batch)
        found.batch = found.batch.moved("cancelling", time.time())
        await self.store.save(found.batch)
        self._wake.set()
        return self.current(batch)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_of(self) -> dict[str, int]:
        """Number of batches by status, of those that have not ended."""
        numbers = dict.fromkeys(("validating", "in_progress", "finalizing", "cancelling"), 0)
        for each in self._open.values():
            numbers[each.batch.status] = numbers.get(each.batch.status, 0) + 1
        return numbers

    @property
    def num_waiting(self) -> int:
        """Requests of checked batches that are neither answered nor being answered."""
        jobs = [each.job for each in self._open.values() if each.job is not None]
        unanswered = sum(j.journal.num_requests - j.journal.num_completed - j.journal.num_failed for j in jobs)
        return unanswered - len(self._running)

    # -- its life -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run batches until it is cancelled; what has no answer then waits in the store."""
        try:
            for tenant, batch in await self.store.open_batches():
                self._open[batch.id] = _Open(tenant, batch)
            if self._open:
                log.info("%d batches go on", len(self._open))
            while True:
                self._wake.clear()
                for each in list(self._open.values()):
                    await self._tend(each)
                timeout_s = self._hand_in()
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):  # `wait_for` of 3.11 may lose a cancellation
                        await self._wake.wait()
        finally:
            await self._stop(self._running)
            for each in self._open.values():
                if each.job is not None:
                    await self.store.database.run(each.job.close)

    async def _stop(self, running: Iterable[RunningRequest]) -> None:
        """Abort requests, and wait until those that have their answer have kept it."""
        tasks = [each.task for each in running if each.task is not None]
        for each in list(running):
            each.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- who is handed in, and who is set back --------------------------------------------------------------------

    def _traffic_changed(self) -> None:
        """A client's request came, or the last one ended."""
        self._busy_s = time.monotonic()
        if self._serving.traffic.num_open:
            for each in to_set_back(self._running):
                each.abort()
        else:
            self._wake.set()

    def _hand_in(self) -> float:
        """Begin to answer a request if nobody else waits; returns the seconds after which to look again."""
        if self._serving.traffic.num_open or not self._serving.lifecycle.is_admitting:
            return TEND_S
        now_s = time.monotonic()
        wait_s = max(self._busy_s + SETTLE_S, self._handed_in_s + STAGGER_S) - now_s
        if wait_s > 0:
            return wait_s
        if len(self._running) >= self._serving.options.max_batch_requests or (found := self._next()) is None:
            return TEND_S
        self._handed_in_s = now_s
        self._running.append(found)
        found.task = asyncio.create_task(self._answer(found), name="batch request")
        found.task.add_done_callback(partial(self._ended, found))
        return STAGGER_S

    def _next(self) -> RunningRequest | None:
        """The next request: batches take turns."""
        at_work = [each for each in self._open.values() if each.batch.status == "in_progress" and each.job is not None]
        for place in range(len(at_work)):
            owner = at_work[(self._turn + place) % len(at_work)]
            assert owner.job is not None, "it was looked at above"
            index = owner.job.take()
            if index is not None:
                self._turn = (self._turn + place + 1) % len(at_work)
                return RunningRequest(owner, owner.job, index, owner.set_backs.get(index, 0))
        return None

    async def _answer(self, running: RunningRequest) -> bool:
        """Answer a request and keep the answer; True if it was answered well."""
        job, index, database = running.job, running.index, self.store.database
        request = await database.run(lambda: job.request(index))
        reply = await answer(self._door, job, index, request)
        running.is_answered = True
        await database.run(lambda: job.answer(index, request, reply))
        return reply.is_success

    def _ended(self, running: RunningRequest, task: asyncio.Task[bool]) -> None:
        """Take down what became of a request, also of one that was aborted before it began."""
        job, index, owner = running.job, running.index, running.owner
        self._running.remove(running)
        self._wake.set()
        if task.cancelled():
            job.set_back(index)
            owner.set_backs[index] = running.num_set_backs + 1
            self.counts.num_set_back += 1
            return
        error = task.exception()
        if error is not None:  # whatever it is, it is told by the batch
            log.error("%s cannot go on", job.name, exc_info=error)
            owner.fault = Fault("storage_error", f"request {index + 1} could not be answered or kept: {error}")
            return
        owner.set_backs.pop(index, None)
        self.counts.num_completed += task.result()
        self.counts.num_failed += not task.result()

    # -- the states of a batch ------------------------------------------------------------------------------------

    async def _tend(self, each: _Open) -> None:
        """Bring a batch into its next state, if it is time for it."""
        try:
            await self._advance(each, time.time())
        except (OSError, sqlite3.Error, LockstepError) as error:
            log.error("%s cannot go on: %s", each.batch.id, error)
            await self._fail(each, (Fault("storage_error", f"the batch cannot be worked on: {error}"),))

    async def _advance(self, each: _Open, now_s: float) -> None:
        batch = each.batch
        if each.fault is not None:
            await self._fail(each, (each.fault,))
            return
        is_over = now_s >= batch.expires_at and batch.status in ("validating", "in_progress")
        if each.job is None and not (batch.status == "validating" and (is_over or self._num_jobs >= MAX_JOBS)):
            await self._begin(each)
            batch = each.batch
        if is_over:
            await self._end(each, batch.moved("expired", now_s), EXPIRED)
        elif batch.status == "cancelling":
            await self._end(each, batch.moved("cancelled", now_s), None)
        elif each.job is not None and each.job.journal.is_whole:
            if batch.status == "in_progress":
                each.batch = batch = batch.moved("finalizing", now_s)
                await self.store.save(batch)
            await self._end(each, batch.moved("completed", now_s), None)

    @property
    def _num_jobs(self) -> int:
        return sum(each.job is not None for each in self._open.values())

    async def _begin(self, each: _Open) -> None:
        """Check a batch's input, and open the work on it where the last process left it."""
        batch = each.batch
        if batch.status == "cancelling" and "in_progress_at" not in batch.times:
            return
        path, most = self.store.path_of(batch.input_file_id), self._serving.options.max_body_bytes

        def check() -> CheckedInput:
            with path.open("rb") as file:
                return checked_input(file, batch.endpoint, most)

        checked = await asyncio.to_thread(check)
        faults = [*checked.faults, *(self._unknown_models(checked) if batch.status == "validating" else ())]
        if faults:
            await self._fail(each, tuple(sorted(faults, key=lambda fault: fault.line or 0)))
            return
        offsets: array[int] = checked.offsets
        job = await self.store.database.run(lambda: self.store.open_job(each.tenant, batch, offsets))
        if each.batch.status == "validating":  # it may have been cancelled meanwhile
            models = list(checked.models)
            model = models[0] if len(models) == 1 else None
            each.batch = each.batch.moved("in_progress", time.time(), num_requests=len(offsets), model=model)
            await self.store.save(each.batch)
        each.job = job

    def _unknown_models(self, checked: CheckedInput) -> Iterable[Fault]:
        for model, line in checked.models.items():
            try:
                self._serving.cluster.card(model)
            except ModelNotFoundError as error:
                yield Fault("model_not_found", str(error), "body.model", line)
            except LockstepError:  # nobody knows yet; the request itself will be told
                return

    async def _fail(self, each: _Open, faults: tuple[Fault, ...]) -> None:
        await self._stop([running for running in self._running if running.owner is each])
        batch = _counted(each.batch, each.job).moved("failed", time.time(), faults=faults)
        if each.job is not None:
            await self.store.database.run(each.job.close)
        self._open.pop(batch.id, None)
        await self.store.save(batch)

    async def _end(self, each: _Open, ended: Batch, of_others: tuple[str, str] | None) -> None:
        """Bring a batch to its end, with the files of what was answered."""
        await self._stop([running for running in self._running if running.owner is each])
        job, store = each.job, self.store
        if job is None:
            await store.save(ended)
        else:
            whole = _counted(ended, job, with_others=of_others is not None)
            await store.database.run(lambda: store.finish(job, whole, time.time(), of_others))
        self._open.pop(ended.id, None)
        shown = _counted(ended, job)
        log.info("%s %s: %d of %d answered", shown.id, shown.status, shown.num_completed, shown.num_requests)


def _counted(batch: Batch, job: Job | None, *, with_others: bool = False) -> Batch:
    """The batch with its requests counted.

    Args:
        with_others: those without an answer have failed.
    """
    if job is None:
        return batch
    journal = job.journal
    num_failed = journal.num_requests - journal.num_completed if with_others else journal.num_failed
    return msgspec.structs.replace(
        batch, num_requests=journal.num_requests, num_completed=journal.num_completed, num_failed=num_failed
    )
