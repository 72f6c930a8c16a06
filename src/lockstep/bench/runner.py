"""Open-loop runner: sends requests at their due times, independent of the server's answers."""

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
"""Maximum bytes of requests that are written before the run, and of answers that are parsed after it. Beyond it,
requests are written just before they are due, and answers are parsed during the run."""
_REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Request with its due time."""

    due_s: float | None
    """Due time in seconds after the run's start; None: as soon as concurrency allows, and measured from its sending."""
    write: Callable[[], bytes]
    """Function that writes the request."""
    prompt_tokens: int | None
    target: int = 0
    """Index of its server in the run's list."""


@dataclass(slots=True)
class Run:
    """Result of a run, which may have been interrupted."""

    outcomes: list[Outcome | None]
    """Outcomes in the order of the jobs; None: interrupted before the end."""
    duration_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of this process while requests were open."""
    was_interrupted: bool = False

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome is not None]


@dataclass(slots=True)
class RunProgress:
    """Progress of a run, for display."""

    num_jobs: int
    num_done: int = 0
    num_failed: int = 0
    on_report: Callable[[RunProgress], None] = field(default=lambda progress: None)


class Runner:
    """One run. Cancelling `run` ends it early; `result` then has the outcomes so far."""

    def __init__(
        self,
        clients: Sequence[Client],
        jobs: Sequence[PlannedRequest],
        max_concurrency: int | None,
        state: RunProgress,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._clients = clients
        self._jobs = jobs
        self._concurrency = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._progress = state

        self._exchanges: dict[int, tuple[TimedExchange, float]] = {}
        self._max_kept_bytes = max_kept_bytes
        self._unread_bytes = 0
        self._origin_s = 0.0
        self.result = Run([None] * len(jobs))

    async def run(self) -> None:
        """Send all requests, wait for their answers, and parse them."""
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
            self._progress.on_report(self._progress)

    async def _until(self, due_s: float | None) -> None:
        if due_s is None:
            return
        # In a loop, because timers have a resolution of milliseconds and may be early by half of one.
        while (wait_s := self._origin_s + due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)

    async def _one(self, index: int, job: PlannedRequest, request: bytes) -> None:
        exchange = TimedExchange()
        async with self._concurrency:
            start_s = time.perf_counter() if job.due_s is None else self._origin_s + job.due_s
            await self._clients[job.target].send(request, exchange)
        self._progress.num_done += 1
        self._progress.num_failed += bool(exchange.error) or exchange.status >= 400
        self._exchanges[index] = (exchange, start_s)
        self._unread_bytes += exchange.num_bytes
        if self._unread_bytes > self._max_kept_bytes:
            self._read(index)

    async def _report(self) -> None:
        while True:
            self._progress.on_report(self._progress)
            await asyncio.sleep(_REPORT_INTERVAL_S)

    def _read_all(self) -> None:
        for index in list(self._exchanges):
            self._read(index)

    def _read(self, index: int) -> None:
        exchange, start_s = self._exchanges.pop(index)
        self._unread_bytes -= exchange.num_bytes
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
    progress: RunProgress,
    max_kept_bytes: int = MAX_KEPT_BYTES,
) -> Run:
    """Run all jobs, or those until Ctrl-C, in a new event loop.

    Args:
        targets: servers, in the order of the jobs' indices.
        max_concurrency: maximum number of open requests; None: no limit.
        max_kept_bytes: limit of what is written before the run, and of what is parsed after it.
    """
    runners: list[Runner] = []

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(target)) for target in targets]
            runners.append(Runner(clients, jobs, max_concurrency, progress, max_kept_bytes))
            await runners[0].run()

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as loop:
            loop.run(whole())
    except KeyboardInterrupt:
        if not runners:
            raise
    return runners[0].result


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Factory of the event loop that the server uses, too; None: asyncio's."""
    try:
        import uvloop
    except ImportError:  # uvloop does not support Windows
        return None
    return uvloop.new_event_loop


def arrival_times(count: int, rate_per_s: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Due times of ``count`` requests in seconds after the start, ascending.

    Gaps have the mean ``1 / rate`` and the shape ``burstiness``: 1 is a Poisson process, less is burstier, more is more
    even, and infinity is a constant gap. As in `vllm bench serve`, times are scaled so that the last request is due at
    ``count / rate`` for every seed, so that throughputs of different seeds are comparable.

    Args:
        rate_per_s: requests per second, above 0; infinity makes all requests due at once.
        burstiness: shape of the gaps, above 0.
    """
    if count == 0 or math.isinf(rate_per_s):
        return (0.0,) * count
    if math.isinf(burstiness):
        return tuple((index + 1) / rate_per_s for index in range(count))
    gaps = np.random.default_rng([seed, 0]).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    return tuple((times * (count / rate_per_s / times[-1])).tolist())


@contextmanager
def shown_progress(num_jobs: int, is_shown: bool) -> Iterator[RunProgress]:
    """Progress with a bar on standard error if that is a terminal. The run draws it: a thread would slow the run."""
    run_progress = RunProgress(num_jobs)
    if not is_shown or not sys.stderr.isatty():
        yield run_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bars:
        task = bars.add_task("requests", total=num_jobs)

        def draw(current: RunProgress) -> None:
            failed = f" ({current.num_failed} failed)" if current.num_failed else ""
            bars.update(task, completed=current.num_done, description=f"requests{failed}")
            bars.refresh()

        run_progress.on_report = draw
        yield run_progress
