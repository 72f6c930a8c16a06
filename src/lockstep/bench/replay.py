"""Replay bench: requests per second with and without computing repeated steps at once; checks that decisions agree."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.replay.configs import config_for
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.simulator import Simulation
from lockstep.report.document import Number, Table, numbers, words
from lockstep.report.text import to_lines

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`."""
_METHODS = {"run_lengths": True, "single_steps": False}
"""Methods of simulation: repeated steps are computed at once, or each step is planned."""


def run_replay_bench(
    path: str,
    overrides: Mapping[str, str],
    reading: ReadOptions,
    num_rounds: int,
    report: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Replay a file several times with each method; the fastest round counts.

    Times are CPU times of this thread, which other work on the machine affects less. Each round reads the file again.
    Returns the metrics, and in ``faults`` messages about wrong results.

    Args:
        report: called with a line about each round.
    """
    result: dict[str, Any] = {"file": path, "num_rounds": num_rounds, "faults": []}
    prints = []
    for name, run_lengths in _METHODS.items():
        times_s = []
        for number in range(num_rounds):
            report(f"{name}, round {number + 1} of {num_rounds}")
            workload = read_workload(path, reading)
            begin_s = time.thread_time()
            simulation = Simulation(workload, config_for(workload, overrides), run_lengths=run_lengths)
            num_decided = 0
            while simulation.step() is not None:
                num_decided += 1
            replay = simulation.replay()
            times_s.append(time.thread_time() - begin_s)
        num_requests = len(replay.outcomes)
        prints.append(replay.fingerprint)
        result[name] = {
            "requests": num_requests,
            "steps": replay.totals.num_steps,
            "decided_steps": num_decided,
            "best_s": round(min(times_s), 3),
            "requests_per_s": round(num_requests / min(times_s), 1),
            "us_per_decided_step": round(min(times_s) * 1e6 / max(1, num_decided), 1),
            "fingerprint": replay.fingerprint,
        }
    result["peak_memory_bytes"] = peak_memory_bytes()
    if prints[0] != prints[1]:
        result["faults"].append(f"the decisions of both methods differ: fingerprints {prints[0]} and {prints[1]}")
    return result


def peak_memory_bytes() -> int:
    """Maximum resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def text_of(result: Mapping[str, Any]) -> str:
    """Table of a result."""
    columns = numbers("requests/s", "best s", "steps", "decided", "us each")
    table = Table("", (*words(""), *columns, *words("fingerprint")))
    for name in _METHODS:
        row, method = result[name], name.replace("_", " ")
        speed, best = f"{row['requests_per_s']:,.0f}", f"{row['best_s']:.2f}"
        steps, decided, each = Number(row["steps"]), Number(row["decided_steps"]), f"{row['us_per_decided_step']:.1f}"
        table.rows.append((method, speed, best, steps, decided, each, row["fingerprint"]))
    return f"{to_lines(table)}\npeak memory {result['peak_memory_bytes'] / 1e6:,.0f} MB"
