"""How fast a workload replays: requests per second with steps counted and with each step planned, and that both decide
the same."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.replay.configs import config_for
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.simulator import Simulation

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that `ru_maxrss` counts."""


def run_replay_bench(
    path: str,
    overrides: Mapping[str, str],
    reading: ReadOptions,
    num_rounds: int,
    report: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Replay a file from its first byte to the last figure, several times each way; the best round counts.

    Times are CPU time of this thread, so that other work on the machine only disturbs them; the file is read anew in
    each round. Returns the figures, ``faults`` among them: what must not be.
    """
    result: dict[str, Any] = {"file": path, "num_rounds": num_rounds, "faults": []}
    prints = []
    for name, run_lengths in (("run_lengths", True), ("single_steps", False)):
        times_s = []
        for number in range(num_rounds):
            report(f"{name}, round {number + 1} of {num_rounds}")
            workload = read_workload(path, reading)
            begin_s = time.thread_time()
            simulation = Simulation(workload, config_for(workload, overrides), run_lengths=run_lengths)
            num_told = 0
            while simulation.step() is not None:
                num_told += 1
            replay = simulation.replay()
            times_s.append(time.thread_time() - begin_s)
        num_requests = len(replay.outcomes)
        prints.append(replay.fingerprint)
        result[name] = {
            "requests": num_requests,
            "steps": replay.totals.num_steps,
            "decided_steps": num_told,
            "best_s": round(min(times_s), 3),
            "requests_per_s": round(num_requests / min(times_s), 1),
            "us_per_decided_step": round(min(times_s) * 1e6 / max(1, num_told), 1),
            "fingerprint": replay.fingerprint,
        }
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    if prints[0] != prints[1]:
        result["faults"].append(f"counted steps decide otherwise than single ones: {prints[0]} and {prints[1]}")
    return result


def text_of(result: Mapping[str, Any]) -> str:
    """The figures as lines."""
    lines = [f"{'':<14}{'requests/s':>12}{'best s':>10}{'steps':>12}{'decided':>12}{'us each':>10}  fingerprint"]
    for name in ("run_lengths", "single_steps"):
        row = result[name]
        lines.append(
            f"{name.replace('_', ' '):<14}{row['requests_per_s']:>12,.0f}{row['best_s']:>10.2f}{row['steps']:>12,}"
            f"{row['decided_steps']:>12,}{row['us_per_decided_step']:>10.1f}  {row['fingerprint']}"
        )
    lines.append(f"peak memory {result['peak_memory_bytes'] / 1e6:,.0f} MB")
    return "\n".join(lines)
