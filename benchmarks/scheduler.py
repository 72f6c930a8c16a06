"""Microseconds of CPU time per step of the scheduler alone (schedule + commit, no model).

    python benchmarks/scheduler.py [--sequences 32 256] [--windows 15] [--steps 200]

Three loads: `steady` decodes the same sequences, `planned` is the same with the counting of repeats switched off, and
`mixed` keeps the number of sequences by a new 600-token prompt for each that ends. Each figure is the best and the
median of several windows, because the machine has other things to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult


def make_scheduler(num_seqs: int, max_output_tokens: int) -> Scheduler:
    """``num_seqs`` sequences past their prompts, of different lengths so that some grow in every step."""
    config = SchedulerConfig(
        block_size=32,
        num_blocks=num_seqs * 160,
        max_model_len=5000,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, 4 * num_seqs),
    )
    scheduler = Scheduler(config)
    for index in range(num_seqs):
        scheduler.add(Request(64 + index, max_output_tokens - index))
    while any(view.num_computed < view.num_prompt_tokens for view in map(scheduler.view, range(num_seqs)) if view):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler, fingerprint: Fingerprint | None = None) -> StepPlan:
    plan = scheduler.schedule()
    count = plan.num_samples
    events = scheduler.commit(plan, StepResult((1,) * count, (None,) * count))
    if fingerprint is not None:
        fingerprint.observe(plan, events)
    return plan


def without_repeats(scheduler: Scheduler) -> None:
    """One step, planned row by row."""
    scheduler._is_settled = False
    step(scheduler)


def refill(scheduler: Scheduler, num_seqs: int) -> None:
    """One step, after which new requests take the place of those that ended."""
    step(scheduler)
    while scheduler.num_running + scheduler.num_waiting < num_seqs:
        scheduler.add(Request(600, 300))


def measure(work: Callable[[], object], windows: int, steps: int) -> tuple[float, float]:
    """Best and median over windows, in microseconds per step."""
    figures = []
    for _ in range(windows):
        begin = time.thread_time_ns()
        for _ in range(steps):
            work()
        figures.append((time.thread_time_ns() - begin) / steps / 1000)
    return min(figures), statistics.median(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--windows", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(f"{'load':<22}{'sequences':>10}{'best us':>10}{'median us':>11}")
    for num_seqs in options.sequences:
        loads: dict[str, Callable[[], object]] = {
            "steady": partial(step, make_scheduler(num_seqs, 4600)),
            "steady + fingerprint": partial(step, make_scheduler(num_seqs, 4600), Fingerprint()),
            "planned": partial(without_repeats, make_scheduler(num_seqs, 4600)),
            "mixed": partial(refill, make_scheduler(num_seqs, 600), num_seqs),
        }
        for _ in range(600):
            loads["mixed"]()
        for name, work in loads.items():
            best, median = measure(work, options.windows, options.steps)
            print(f"{name:<22}{num_seqs:>10}{best:>10.1f}{median:>11.1f}")


if __name__ == "__main__":
    main()
