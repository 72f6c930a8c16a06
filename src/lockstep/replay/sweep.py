"""Many configs on one workload, each in a replay of its own, in several processes. The order of answers is that of the
configs, whoever was first."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import LockstepError
from lockstep.replay.configs import config_for
from lockstep.replay.cost_file import Priced
from lockstep.replay.extrapolation import Extrapolation
from lockstep.replay.grid import Settings, pareto_front, price
from lockstep.replay.metrics import as_less_is_better, numbers_of
from lockstep.replay.report import report_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one combination came to."""

    settings: Settings
    config: SchedulerConfig | None
    """None: the combination cannot work."""
    figures: Mapping[str, float]
    """Numbers of the report, by their path; empty when there is none."""
    refusal: str = ""
    """Why there is no report."""
    note: str = ""
    """What a reader of its times must know."""

    @property
    def good_share(self) -> float | None:
        """Requests that met every goal, of all that arrived; None without goals."""
        return self.figures.get("goodput.ratio")


@dataclass(frozen=True, slots=True)
class Job:
    """What each process does: everything but the combination."""

    workload: Workload
    """With its requests as a tuple."""
    common: Settings
    """What all combinations share."""
    priced: Priced | None
    goals_ms: Mapping[str, float]


def evaluate(job: Job, settings: Settings) -> Outcome:
    """Replay one combination. What cannot work is an outcome too."""
    config = None
    try:
        config = config_for(job.workload, {**job.common, **settings})
        cost, ranges = job.priced or (None, {})
        extrapolation = Extrapolation(ranges)
        replay = Simulation(job.workload, config, cost, watchers=[extrapolation] if ranges else []).run()
        figures = numbers_of(report_of(replay, job.goals_ms or None))
        return Outcome(settings, config, figures, note=extrapolation.note())
    except LockstepError as error:
        return Outcome(settings, config, {}, str(error))


def sweep(
    job: Job, combinations: Sequence[Settings], num_processes: int, tell: Callable[[], None] = lambda: None
) -> tuple[Outcome, ...]:
    """Replay all combinations.

    Args:
        num_processes: how many at a time; 1: here, without another process.
        tell: called after each.
    """
    job = replace(job, workload=replace(job.workload, requests=tuple(job.workload.requests)))
    outcomes = []
    with _answers(job, combinations, min(num_processes, len(combinations))) as answers:
        for outcome in answers:
            outcomes.append(outcome)
            tell()
    return tuple(outcomes)


@contextmanager
def _answers(job: Job, combinations: Sequence[Settings], num_processes: int) -> Iterator[Iterator[Outcome]]:
    """The outcomes as they are asked for. Whatever ends the asking, ends the processes."""
    if num_processes <= 1:
        yield (evaluate(job, settings) for settings in combinations)
        return
    context = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(num_processes, context, initializer=_end_on_interrupt)
    try:
        futures = [pool.submit(evaluate, job, settings) for settings in combinations]
        yield (future.result() for future in futures)
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _end_on_interrupt() -> None:
    """Ctrl-C reaches every process of the terminal; those of the pool end without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def front(outcomes: Sequence[Outcome], objectives: Sequence[str]) -> tuple[bool, ...]:
    """Which outcomes no other beats in the objectives; whoever lacks one of them is no candidate."""
    return pareto_front(
        [
            [as_less_is_better(each.figures, name) for name in objectives]
            if all(name in each.figures for name in objectives)
            else None
            for each in outcomes
        ]
    )


def cheapest(outcomes: Sequence[Outcome], least_share: float) -> int | None:
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
