"""Cost of the scheduler: microseconds of CPU time per step (schedule and commit, no model), and token shares.

    python -m benchmarks.scheduler [--sequences 32 256] [--windows 15] [--steps 200]

There are four loads: `steady` decodes the same sequences, `planned` is the same without the counting of repeats,
`shared` gives the sequences half as many places to sample, and `mixed` replaces each ended sequence by a new one with a
prompt of 600 tokens. Each figure is the best and the median of several windows, because the machine has other load. The
second table has the tokens of running requests that share too few places, for each order of decoding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress, product
from typing import Any, get_args

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import DecodeOrder, SchedulerConfig
from lockstep.core.request import Priority, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult


def make_scheduler(num_seqs: int, max_output_tokens: int, num_places: int | None = None) -> Scheduler:
    """Scheduler with ``num_seqs`` sequences past their prompts, with different lengths so that some grow in every step.

    Args:
        num_places: maximum sampling sequences per step; None: all.
    """
    config = SchedulerConfig(
        block_size=32,
        num_blocks=num_seqs * 160,
        max_model_len=5000,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, 4 * num_seqs),
        max_num_decode_seqs=num_places,
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
    """Run one step that is planned row by row."""
    scheduler._is_settled = False
    step(scheduler)


def refill(scheduler: Scheduler, num_seqs: int) -> None:
    """Run one step, then replace the ended requests by new ones."""
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


SHARED: Mapping[str, tuple[Sequence[int], int]] = {
    "3 equal, 2 places": ((Priority.NORMAL,) * 3, 2),
    "64 equal, 32 places": ((Priority.NORMAL,) * 64, 32),
    "2 critical, 1 low, 2 places": ((Priority.CRITICAL, Priority.CRITICAL, Priority.LOW), 2),
    "4 high, 4 low, 4 places": ((Priority.HIGH,) * 4 + (Priority.LOW,) * 4, 4),
}
"""Priorities of concurrent requests, and the number of places that they share."""
MARKS = (50, 100, 250)
"""Steps after which tokens are counted."""


def tokens_over_time(priorities: Sequence[int], num_places: int, **policy: Any) -> tuple[list[list[int]], int]:
    """Tokens of each request at each mark, and the longest wait of a request for a token, in steps."""
    config = SchedulerConfig(
        block_size=32,
        num_blocks=len(priorities) * 10,
        max_model_len=300,
        max_num_seqs=len(priorities),
        max_num_decode_seqs=num_places,
        **policy,
    )
    scheduler = Scheduler(config)
    for priority in priorities:
        scheduler.add(Request(4, 290, priority=priority))
    counts, latest, longest, found = [0] * len(priorities), [-1] * len(priorities), 0, []
    for number in range(MARKS[-1]):
        plan = step(scheduler)
        for seq_id in compress(plan.seq_ids, plan.samples):
            counts[seq_id] += 1
            longest, latest[seq_id] = max(longest, number - latest[seq_id]), number
        if number + 1 in MARKS:
            found.append(list(counts))
    return found, max(longest, number - min(latest))


def print_shares() -> None:
    """Print the second table: minimum and maximum tokens of the requests of each priority."""
    print(f"\n{'requests':<30}{'decode_order':>14}{'aging':>7}{'longest wait':>14}  tokens after {MARKS} steps")
    for name, (priorities, num_places) in SHARED.items():
        agings = (0, 10) if len(set(priorities)) > 1 else (0,)
        for decode_order, aging in product(get_args(DecodeOrder), agings):
            policy = {"decode_order": decode_order, "order": "priority", "priority_aging_steps": aging}
            marks, longest = tokens_over_time(priorities, num_places, **policy)
            texts = []
            for counts in marks:
                groups = [list(compress(counts, [each == one for each in priorities])) for one in sorted({*priorities})]
                texts.append("/".join(f"{min(group)}-{max(group)}" for group in groups))
            print(f"{name:<30}{decode_order:>14}{aging:>7}{longest:>14}  {'  '.join(texts)}")


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
            "shared": partial(step, make_scheduler(num_seqs, 4600, num_seqs // 2)),
            "mixed": partial(refill, make_scheduler(num_seqs, 600), num_seqs),
        }
        for _ in range(600):
            loads["mixed"]()
        for name, work in loads.items():
            best, median = measure(work, options.windows, options.steps)
            print(f"{name:<22}{num_seqs:>10}{best:>10.1f}{median:>11.1f}")
    print_shares()


if __name__ == "__main__":
    main()
