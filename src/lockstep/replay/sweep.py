"""Sweeps: many configs on one workload, each in a replay of its own, in several processes; the best and the cheapest.

Results have the order of the configs, whichever replay ends first.
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
    """None: the combination cannot work."""
    figures: Mapping[str, float]
    """Numbers of the report, by their path; empty when there is none."""
    refusal: str = ""
    """Why there is no report."""
    note: str = ""
    """Caveat of its times."""

    @property
    def good_share(self) -> float | None:
        """Requests that met every goal, of all that arrived; None without goals."""
        return self.figures.get("goodput.ratio")


@dataclass(frozen=True, slots=True)
class SweepJob:
    """Work of each process: everything but the combination."""

    workload: Workload
    """With its requests as a tuple."""
    common: Settings
    """Settings that all combinations share."""
    priced: Priced | None
    goals_ms: Mapping[str, float]


def evaluate(job: SweepJob, settings: Settings) -> SweepOutcome:
    """Replay one combination. What cannot work is an outcome too."""
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
        num_processes: how many at a time; 1: here, without another process.
        on_outcome: called after each.
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
    """The outcomes as they are requested. The end of the block, however it comes, ends the processes.

    Each process has every n-th combination from the start and a pipe of its own: a pool sends each combination with
    the whole job, and waits for ever to send it once its processes are gone.
    """
    if num_processes <= 1:
        yield (evaluate(job, settings) for settings in combinations)
        return
    context = multiprocessing.get_context("spawn")
    processes, readers = [], []
    try:
        with _interrupt_kept_back():
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
            "a process of the sweep was ended from outside; run it again, with fewer --jobs if memory was short"
        ) from None
    return outcome


@contextmanager
def _interrupt_kept_back() -> Iterator[None]:
    """Delay Ctrl-C until the block ends: nothing could end a process that is only half started.

    A terminal sends the signal to the new processes as well. They ignore it, and their parent ends them.
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
    """True for outcomes that no other beats in the objectives; one that lacks a figure is no candidate."""
    return pareto_front(
        [
            [as_less_is_better(each.figures, name) for name in objectives]
            if all(name in each.figures for name in objectives)
            else None
            for each in outcomes
        ]
    )


def cheapest(outcomes: Sequence[SweepOutcome], least_share: float) -> int | None:
    """Index of the cheapest outcome in which enough requests meet the goals; None: there is none.

    Args:
        least_share: requests that must meet every goal, of all that arrived, refused ones too.
    """
    good = [
        (price(each.config), index)
        for index, each in enumerate(outcomes)
        if each.config is not None and each.good_share is not None and each.good_share >= least_share
    ]
    return min(good)[1] if good else None


def pareto_front(points: Sequence[Sequence[float] | None]) -> tuple[bool, ...]:
    """True for points that are not beaten: no other is at least as good in everything and better in something.

    Args:
        points: one value per objective, less is better; None: no candidate.
    """
    return tuple(
        point is not None and not any(other is not None and _beats(other, point) for other in points)
        for point in points
    )


def _beats(other: Sequence[float], point: Sequence[float]) -> bool:
    pairs = list(zip(other, point, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def price(config: SchedulerConfig) -> tuple[int, ...]:
    """Price of a config, for comparing: first KV memory in tokens, then host memory, then sequences at once, then
    tokens of a step."""
    return (
        config.num_blocks * config.block_size,
        config.num_host_blocks * config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
