"""Sweeps: replays one workload with many configs in several processes, and finds the best and the cheapest.

Results have the order of the configs, independent of the order of completion.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import LockstepError
from lockstep.replay.configs import Settings, config_for
from lockstep.replay.cost import Extrapolation
from lockstep.replay.cost_file import Priced
from lockstep.replay.metrics import as_less_is_better, numbers_of
from lockstep.replay.report import report_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import Workload
from lockstep.worker.parent_death import die_with_parent


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """Result of one combination."""

    settings: Settings
    config: SchedulerConfig | None
    """Config of the combination; None: it is invalid."""
    figures: Mapping[str, float]
    """Numeric figures of the report by path; empty: no report."""
    refusal: str = ""
    """Reason why there is no report."""
    note: str = ""
    """Warning about its times."""

    @property
    def good_share(self) -> float | None:
        """Share of arrived requests that met every goal; None: no goals."""
        return self.figures.get("goodput.ratio")


@dataclass(frozen=True, slots=True)
class SweepJob:
    """Common inputs of all combinations, for each process."""

    workload: Workload
    """Workload; its requests are a tuple."""
    common: Settings
    """Settings that all combinations share."""
    priced: Priced | None
    goals_ms: Mapping[str, float]


def evaluate(job: SweepJob, settings: Settings) -> SweepOutcome:
    """Replay one combination. An invalid combination is an outcome with a refusal."""
    config = None
    try:
        config = config_for(job.workload, {**job.common, **settings})
        cost, ranges = job.priced or (None, {})
        extrapolation = Extrapolation(ranges)
        replay = Simulation(job.workload, config, cost, watchers=[extrapolation] if ranges else []).run()
        figures = numbers_of(report_of(replay, job.goals_ms or None))
        return SweepOutcome(settings, config, figures, note=extrapolation.note())
    except LockstepError as error:
        return SweepOutcome(settings, config, {}, str(error))


def sweep(
    job: SweepJob, combinations: Sequence[Settings], num_processes: int, on_outcome: Callable[[], None] = lambda: None
) -> tuple[SweepOutcome, ...]:
    """Replay all combinations.

    Args:
        num_processes: number of processes; 1: the calling process only.
        on_outcome: function called after each replay.
    """
    job = replace(job, workload=replace(job.workload, requests=tuple(job.workload.requests)))
    outcomes = []
    with _answers(job, combinations, min(num_processes, len(combinations))) as answers:
        for outcome in answers:
            outcomes.append(outcome)
            on_outcome()
    return tuple(outcomes)


@contextmanager
def _answers(job: SweepJob, combinations: Sequence[Settings], num_processes: int) -> Iterator[Iterator[SweepOutcome]]:
    """Outcomes in the order of requests for them. Leaving the block in any way ends the processes.

    Each process has every n-th combination and its own pipe. A process pool would send the whole job with each
    combination, and would wait forever if its processes had ended.
    """
    if num_processes <= 1:
        yield (evaluate(job, settings) for settings in combinations)
        return
    context = multiprocessing.get_context("spawn")
    processes, readers = [], []
    try:
        with _delayed_interrupt():
            for first in range(num_processes):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(os.getpid(), job, combinations[first::num_processes], writer), daemon=True
                )
                process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
        yield (_received(readers[index % num_processes]) for index in range(len(combinations)))
    finally:
        for process, reader in zip(processes, readers, strict=True):
            process.kill()
            process.join()
            reader.close()


def _work(parent_pid: int, job: SweepJob, combinations: Sequence[Settings], answers: Connection) -> None:
    die_with_parent(parent_pid)
    for settings in combinations:
        answers.send(evaluate(job, settings))


def _received(answers: Connection) -> SweepOutcome:
    try:
        outcome: SweepOutcome = answers.recv()
    except EOFError:
        raise LockstepError(
            "a process of the sweep was killed; run the sweep again, with fewer --jobs if memory was short"
        ) from None
    return outcome


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, because a process that is only partly started could not be ended.

    A terminal sends the signal also to the new processes. They ignore it, and their parent ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if interrupted.is_set():
            signal.raise_signal(signal.SIGINT)


def front(outcomes: Sequence[SweepOutcome], objectives: Sequence[str]) -> tuple[bool, ...]:
    """True for each outcome that no other dominates in the objectives; False for outcomes without a figure."""
    return pareto_front(
        [
            [as_less_is_better(each.figures, name) for name in objectives]
            if all(name in each.figures for name in objectives)
            else None
            for each in outcomes
        ]
    )


def cheapest(outcomes: Sequence[SweepOutcome], least_share: float) -> int | None:
    """Index of the cheapest outcome with enough requests that meet the goals; None: none.

    Args:
        least_share: minimum share of arrived requests, including refused ones, that must meet every goal.
    """
    good = [
        (price(each.config), index)
        for index, each in enumerate(outcomes)
        if each.config is not None and each.good_share is not None and each.good_share >= least_share
    ]
    return min(good)[1] if good else None


def pareto_front(points: Sequence[Sequence[float] | None]) -> tuple[bool, ...]:
    """True for each point that is not dominated: no other is at least as good in everything and better in something.

    Args:
        points: one value per objective, less is better; None: not a candidate.
    """
    return tuple(
        point is not None and not any(other is not None and _beats(other, point) for other in points)
        for point in points
    )


def _beats(other: Sequence[float], point: Sequence[float]) -> bool:
    pairs = list(zip(other, point, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def price(config: SchedulerConfig) -> tuple[int, ...]:
    """Price of a config, for comparisons: KV memory in tokens, then host memory, then sequences, then tokens per
    step."""
    return (
        config.num_blocks * config.block_size,
        config.num_host_blocks * config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
