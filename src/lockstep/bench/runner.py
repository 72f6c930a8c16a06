"""Open loop: sends a run's requests when they are due, whatever the server does."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from lockstep.bench.client import Client, Outcome, TimedExchange, read_exchange
from lockstep.bench.protocol import Target

MAX_KEPT_BYTES = 256 << 20
"""Bytes of requests that are written before the run, and of answers that are kept as they came. Beyond it, a request is
written just before it is due, and an answer is read when its request ends, during the run."""
_REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to come."""

    due_s: float | None
    """After the start of the run; None: at once, as soon as concurrency allows, and measured from when it is sent."""
    write: Callable[[], bytes]
    """Makes the request."""
    prompt_tokens: int | None
    target: int = 0
    """Place of its server among those of the run."""


@dataclass(slots=True)
class Run:
    """Outcomes of a run, also of one that was interrupted."""

    outcomes: list[Outcome | None]
    """By job; None: interrupted before its end."""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of this process while requests were open."""
    was_interrupted: bool = False

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome is not None]


@dataclass(slots=True)
class Watch:
    """Progress of a run, for display."""

    num_jobs: int
    num_done: int = 0
    num_failed: int = 0
    on_report: Callable[[Watch], None] = field(default=lambda watch: None)


class Runner:
    """One run. Cancelling `run` ends it early; what was measured stays in `result`."""

    def __init__(
        self,
        clients: Sequence[Client],
        jobs: Sequence[PlannedRequest],
        max_concurrency: int | None,
        watch: Watch,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._clients = clients
        self._jobs = jobs
        self._places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._watch = watch
        self._exchanges: dict[int, tuple[TimedExchange, float]] = {}
        self._max_kept_bytes = max_kept_bytes
        self._kept_bytes = 0
        self._origin_s = 0.0
        self.result = Run([None] * len(jobs))

    async def run(self) -> None:
        """Send everything and wait for all answers; then read them."""
        prepared = _prepare(self._jobs, self._max_kept_bytes)
        reporter = asyncio.ensure_future(self._report())
        cpu_s, self._origin_s = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, job in enumerate(self._jobs):
                    request = prepared.pop(index, None) or job.write()
                    await self._until(job.due_s)
                    tasks.create_task(self._one(index, job, request))
        except asyncio.CancelledError:
            self.result.was_interrupted = True
            raise
        finally:
            self.result.duration_s = time.perf_counter() - self._origin_s
            self.result.cpu_s = time.process_time() - cpu_s
            reporter.cancel()
            self._read_all()
            self._watch.on_report(self._watch)

    async def _until(self, due_s: float | None) -> None:
        if due_s is None:
            return
        # Again, because timers tick in milliseconds and may be early by half of one.
        while (wait_s := self._origin_s + due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)

    async def _one(self, index: int, job: PlannedRequest, request: bytes) -> None:
        exchange = TimedExchange()
        async with self._places:
            start_s = time.perf_counter() if job.due_s is None else self._origin_s + job.due_s
            await self._clients[job.target].send(request, exchange)
        self._watch.num_done += 1
        self._watch.num_failed += bool(exchange.error) or exchange.status >= 400
        self._exchanges[index] = (exchange, start_s)
        self._kept_bytes += exchange.num_bytes
        if self._kept_bytes > self._max_kept_bytes:
            self._read(index)

    async def _report(self) -> None:
        while True:
            self._watch.on_report(self._watch)
            await asyncio.sleep(_REPORT_INTERVAL_S)

    def _read_all(self) -> None:
        for index in list(self._exchanges):
            self._read(index)

    def _read(self, index: int) -> None:
        exchange, start_s = self._exchanges.pop(index)
        self._kept_bytes -= exchange.num_bytes
        self.result.outcomes[index] = read_exchange(exchange, start_s, self._jobs[index].prompt_tokens)


def _prepare(jobs: Sequence[PlannedRequest], max_bytes: int) -> dict[int, bytes]:
    prepared: dict[int, bytes] = {}
    num_bytes = 0
    for index, job in enumerate(jobs):
        if num_bytes > max_bytes:
            break
        prepared[index] = job.write()
        num_bytes += len(prepared[index])
    return prepared


def run_load(
    targets: Sequence[Target],
    jobs: Sequence[PlannedRequest],
    max_concurrency: int | None,
    watch: Watch,
    max_kept_bytes: int = MAX_KEPT_BYTES,
) -> Run:
    """Run to the end, or to Ctrl-C, in an event loop of its own.

    Args:
        targets: servers, by their places in jobs.
        max_concurrency: requests that are open at once; None: as many as are due.
        max_kept_bytes: limit of what is prepared before the run, and of what is read after it.
    """
    runners: list[Runner] = []

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(target)) for target in targets]
            runners.append(Runner(clients, jobs, max_concurrency, watch, max_kept_bytes))
            await runners[0].run()

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as loop:
            loop.run(whole())
    except KeyboardInterrupt:
        if not runners:
            raise
    return runners[0].result


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The loop that the server has as well."""
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Seconds after the start at which each of ``count`` requests is due, ascending.

    Gaps have the mean ``1 / rate`` and the shape ``burstiness``: 1 is a Poisson process, less comes in bursts, more
    comes evenly, infinity is a metronome. As in `vllm bench serve`, times are scaled so that the last request is due at
    ``count / rate`` whatever the seed: throughputs of two seeds can then be compared.

    Args:
        rate_per_s: above 0; infinity makes everything due at once.
        burstiness: above 0.
    """
    if count == 0 or math.isinf(rate_per_s):
        return (0.0,) * count
    if math.isinf(burstiness):
        return tuple((index + 1) / rate_per_s for index in range(count))
    gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return tuple((times * (count / rate_per_s / times[-1])).tolist())


@contextmanager
def progress(num_jobs: int, is_wanted: bool) -> Iterator[Watch]:
    """A progress bar on standard error, if that is a terminal. The run itself draws it: a thread would slow the run."""
    watch = Watch(num_jobs)
    if not is_wanted or not sys.stderr.isatty():
        yield watch
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bars:
        task = bars.add_task("requests", total=num_jobs)

        def draw(watch: Watch) -> None:
            failed = f" ({watch.num_failed} failed)" if watch.num_failed else ""
            bars.update(task, completed=watch.num_done, description=f"requests{failed}")
            bars.refresh()

        watch.on_report = draw
        yield watch
