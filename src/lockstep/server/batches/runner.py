"""Runner of batches: takes each from its checking to its end, in turns in which nothing else waits for an answer.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp

from lockstep.errors import LockstepError, ModelNotFoundError, StorageError, StorageFullError
from lockstep.server.batches.answering import InProcessServer, answer
from lockstep.server.batches.input_file import BatchRequest, CheckedInput, Fault, checked_input
from lockstep.server.batches.job import Job, Reply
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
MAX_REFUSED_S = 15.0
"""Longest time between two tries to write what the disk has refused; the first is after `TEND_S`, each next one after
twice as long."""
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


@dataclass(slots=True)
class RunnerCounts:
    """Counts since the start."""

    num_completed: int = 0
    num_failed: int = 0
    num_set_back: int = 0


class _Answer(NamedTuple):
    """An answer that is to be kept."""

    number: int
    """Of its request, from 0."""
    request: BatchRequest
    reply: Reply


@dataclass(slots=True, eq=False)
class _Open:
    """A batch that has not ended."""

    tenant: str
    batch: Batch
    saved: Batch
    """As the store has it."""
    job: Job | None = None
    set_backs: dict[int, int] = field(default_factory=dict)
    """By request that was aborted and waits or runs again, how often."""
    answers: list[_Answer] = field(default_factory=list)
    """Answers that the disk refused, at most as many as requests run at once; no other request begins meanwhile."""
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while answers are written, so that each is written once."""
    faults: tuple[Fault, ...] = ()
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

    def __init__(
        self,
        serving: Serving,
        store: BatchStore,
        app: ASGIApp,
        clock: Callable[[], float] = time.monotonic,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._now_s, self.unix_time_s = clock, unix_time_s
        self.counts = RunnerCounts()
        self._serving = serving
        self._server = InProcessServer(app)
        self._open: dict[str, _Open] = {}
        self._running: list[RunningRequest] = []
        self._wake = asyncio.Event()
        self._turn = 0
        self._busy_s = 0.0
        """When a client's request was open last, on the monotonic clock."""
        self._handed_in_s = 0.0
        """When requests were handed in last."""
        self._num_refused = 0
        """Rounds in a row in which the disk refused something."""
        self._refused_until_s = 0.0
        """When the next one is, on the monotonic clock."""
        serving.traffic.watcher = self._traffic_changed

    # -- what the routes ask --------------------------------------------------------------------------------------

    def add(self, tenant: str, batch: Batch) -> None:
        """Run a batch that is in the store."""
        self._open[batch.id] = _Open(tenant, batch, batch)
        self.look()

    def current(self, batch: Batch) -> Batch:
        """A batch of the store, as far as it has come by now, and why it waits if the disk refuses its answers."""
        found = self._open.get(batch.id)
        if found is None:
            return batch
        shown, refusal = _counted(found.batch, found.job), self.store.fault
        if refusal is None or shown.has_ended:
            return shown
        code = "storage_full" if isinstance(refusal, StorageFullError) else "storage_unavailable"
        return msgspec.structs.replace(shown, faults=(Fault(code, f"the batch waits: {refusal}"),))

    async def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch; one that has ended, or ends already, stays as it is.

        Its requests are aborted at once. Where the disk refuses it, the cancellation is in memory until it does not.
        """
        found = self._open.get(batch.id)
        if found is None or found.batch.status not in ("validating", "in_progress"):
            return self.current(batch)
        found.batch = found.batch.moved("cancelling", self.unix_time_s())
        for running in self._running_of(found):
            running.abort()
        with suppress(StorageError):
            await self._save(found)
        self.look()
        return self.current(batch)

    def look(self) -> None:
        """Look at all batches now, also where the disk has refused something: it may have room again."""
        self._refused_until_s = 0.0
        self._wake.set()

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
                self._open[batch.id] = _Open(tenant, batch, batch)
            if self._open:
                log.info("%d batches go on", len(self._open))
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
                    log.warning("%s: %d answers are lost, as they could not be kept", each.batch.id, len(each.answers))
                if each.job is not None:
                    await self.store.run(each.job.close)

    async def _stop(self, running: Iterable[RunningRequest]) -> None:
        """Abort requests, and wait until those that have their answer have kept it."""
        tasks = [each.task for each in running if each.task is not None]
        for each in list(running):
            each.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _running_of(self, owner: _Open) -> list[RunningRequest]:
        return [running for running in self._running if running.owner is owner]

    async def _round(self) -> float:
        """Bring batches on, and begin to answer a request; returns the seconds after which to look again.

        Nothing begins while the disk refuses something, since no answer could be kept.
        """
        wait_s = self._refused_until_s - self._now_s()
        if wait_s > 0:
            return wait_s
        if await self._tend_all():
            self._num_refused = 0
            return self._hand_in()
        wait_s = min(MAX_REFUSED_S, TEND_S * 2.0 ** min(self._num_refused, 8))
        self._num_refused += 1
        self._refused_until_s = self._now_s() + wait_s
        return wait_s

    # -- who is handed in, and who is set back --------------------------------------------------------------------

    def _traffic_changed(self) -> None:
        """A client's request came, or the last one ended."""
        self._busy_s = self._now_s()
        if self._serving.traffic.num_open:
            for each in to_set_back(self._running):
                each.abort()
        else:
            self._wake.set()

    def _hand_in(self) -> float:
        """Begin to answer a request if nothing else waits; returns the seconds after which to look again."""
        if self._serving.traffic.num_open or not self._serving.lifecycle.is_admitting:
            return TEND_S
        now_s = self._now_s()
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
        """Answer a request and keep the answer; False if the disk refused it, so that it is kept later."""
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
        """Keep the answers of a batch that are not kept yet.

        Raises:
            StorageError: the disk refuses one.
        """
        async with owner.keeping:
            while owner.answers:
                each = owner.answers[0]
                await self.store.run(partial(_keep, owner.job, each))
                del owner.answers[0]
                owner.set_backs.pop(each.number, None)
                self.counts.num_completed += each.reply.is_success
                self.counts.num_failed += not each.reply.is_success

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
        if error is not None:  # whatever it is, the batch reports it
            log.error("%s cannot go on", job.name, exc_info=error)
            owner.faults = (Fault("storage_error", f"request {index + 1} could not be answered or kept: {error}"),)

    # -- the states of a batch ------------------------------------------------------------------------------------

    async def _tend_all(self) -> bool:
        """Bring every batch into its next state, if it is time for it; False: the disk refuses something."""
        is_kept = True
        for each in list(self._open.values()):
            is_kept &= await self._tend(each)
        if is_kept and self.store.fault is not None:  # also of an upload: nothing else of ours would try it again
            await self.store.probe()
            is_kept = self.store.fault is None
        return is_kept

    async def _tend(self, each: _Open) -> bool:
        """Bring a batch into its next state, if it is time for it; False: the disk refuses something."""
        try:
            await self._advance(each, self.unix_time_s())
        except StorageError:  # what was to be kept still is
            return False
        except (OSError, sqlite3.Error, LockstepError) as error:
            if not each.faults:
                log.error("%s cannot go on: %s", each.batch.id, error)
            each.faults = each.faults or (Fault("storage_error", f"the batch cannot be worked on: {error}"),)
        return True

    async def _advance(self, each: _Open, now_s: float) -> None:
        if not (each.faults or each.batch.has_ended):
            await self._keep(each)
            await self._save(each)
            await self._go_on(each, now_s)
        if each.faults and not each.batch.has_ended:
            await self._fail(each, now_s)
        await self._save(each)
        if each.batch.has_ended:
            self._close(each)

    async def _go_on(self, each: _Open, now_s: float) -> None:
        is_over = has_expired(each.batch, now_s)
        if each.job is None and not (each.batch.status == "validating" and (is_over or self._num_jobs >= MAX_JOBS)):
            await self._begin(each)
        batch = each.batch
        if each.faults:
            return
        if batch.status == "cancelling":
            await self._end(each, batch.moved("cancelled", now_s), None)
        elif each.job is not None and each.job.journal.is_whole:
            if batch.status == "in_progress":
                each.batch = batch = batch.moved("finalizing", now_s)
                await self._save(each)
            await self._end(each, batch.moved("completed", now_s), None)
        elif is_over:
            await self._end(each, batch.moved("expired", now_s), EXPIRED)

    async def _save(self, each: _Open) -> None:
        """Have the store know how far a batch has come; StorageError: the disk refuses it."""
        batch = each.batch
        if batch is not each.saved:
            await self.store.save(batch)
            each.saved = batch

    def _close(self, each: _Open) -> None:
        """Forget a batch that has ended."""
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
            each.faults = tuple(sorted(faults, key=lambda fault: fault.line or 0))
            return
        offsets: array[int] = checked.offsets
        each.job = await self.store.run(lambda: self.store.open_job(each.tenant, batch, offsets))
        if each.batch.status == "validating":  # it may have been cancelled meanwhile
            models = list(checked.models)
            model = models[0] if len(models) == 1 else None
            each.batch = each.batch.moved("in_progress", self.unix_time_s(), num_requests=len(offsets), model=model)
            await self._save(each)

    def _unknown_models(self, checked: CheckedInput) -> Iterable[Fault]:
        for model, line in checked.models.items():
            try:
                self._serving.cluster.card(model)
            except ModelNotFoundError as error:
                yield Fault("model_not_found", str(error), "body.model", line)
            except LockstepError:  # unknown yet; the request itself will fail with it
                return

    async def _fail(self, each: _Open, now_s: float) -> None:
        await self._stop(self._running_of(each))
        each.answers.clear()
        each.batch = _counted(each.batch, each.job).moved("failed", now_s, faults=each.faults)
        job, each.job = each.job, None
        if job is not None:
            await self.store.run(job.close)

    async def _end(self, each: _Open, ended: Batch, of_others: tuple[str, str] | None) -> None:
        """Bring a batch to its end, with the files of what was answered."""
        await self._stop(self._running_of(each))
        await self._keep(each)
        job, store = each.job, self.store
        if job is None:
            each.batch = ended
        else:
            whole = _counted(ended, job, with_others=of_others is not None)
            each.batch = each.saved = await store.run(lambda: store.finish(job, whole, self.unix_time_s(), of_others))


def has_expired(batch: Batch, now_s: float) -> bool:
    """True if the time of a batch is over before all of it is answered."""
    return now_s >= batch.expires_at and batch.status in ("validating", "in_progress")


def _keep(job: Job | None, each: _Answer) -> None:
    """Keep an answer, unless it was kept by a task that was then cancelled. On the store's thread."""
    assert job is not None, "a batch with answers is worked on"
    if not job.journal.has(each.number):
        job.answer(*each)


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
