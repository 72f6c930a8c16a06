"""Short benchmark of the most important figures, with one value per round, for comparisons between days.

    python -m benchmarks.short today.json && lockstep bench compare yesterday.json today.json

Workloads alternate, round by round, so that other load affects all of them. Two figures of the machine itself help to
detect changes of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparison.backends import own_server, start_server
from benchmarks.comparison.workloads import Workload, figures
from benchmarks.sampling import CASES, peaked, states_of
from benchmarks.scheduler import make_scheduler, step
from lockstep.bench.compare import MACHINE
from lockstep.bench.prompts import Units
from lockstep.bench.throughput import ThroughputOptions, run_throughput
from lockstep.engine.llm import LLM
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.executors.machine import available_cores, machine_name
from lockstep.executors.sampling import sample
from lockstep.report.document import Table, numbers, words
from lockstep.report.text import to_lines
from lockstep.version import __version__

VOCABULARY, SEQUENCES = 49_152, 32
SERVED = Workload(200, SEQUENCES, 64)
Figures = Mapping[str, float]
UNITS: Mapping[str, bool] = {
    "GFLOP/s": True,
    "GB/s": True,
    "us": False,
    "tok/s": True,
    "ms": False,
    "ms CPU/token": False,
}
"""Unit at the end of a figure's name; True: more is better."""


def machine() -> Figures:
    """Figures of work that is the same in every version: a product and a copy by numpy."""
    square, long = np.ones((1024, 1024), np.float32), np.ones(16 << 20, np.float32)
    product_s, copy_s = seconds(lambda: square @ square), seconds(long.copy)
    return {
        f"{MACHINE}product GFLOP/s": 2 * 1024**3 / product_s / 1e9,
        f"{MACHINE}copy GB/s": 2 * long.nbytes / copy_s / 1e9,
    }


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Minimum wall time of several repetitions."""
    spent = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin_s)
    return min(spent)


def schedule() -> Figures:
    """Processor time of one decode step of 256 sequences in the scheduler."""
    scheduler = make_scheduler(256, 2000)
    begin_s = time.thread_time()
    for _ in range(300):
        step(scheduler)
    return {"schedule and commit x256 us": (time.thread_time() - begin_s) / 300 * 1e6}


def sampling() -> Figures:
    """Processor time of sampling one of 32 sequences."""
    rows, found = peaked(SEQUENCES, VOCABULARY), {}
    for name in ("greedy", "top-k 40, top-p 0.95"):
        states = states_of(CASES[name], SEQUENCES, VOCABULARY)
        begin_s = time.thread_time()
        for _ in range(10):
            sample(rows, states, list(range(SEQUENCES)))
        found[f"sample {name} us"] = (time.thread_time() - begin_s) / 10 / SEQUENCES * 1e6
    return found


def engine(llm: LLM, number: int) -> Figures:
    """Figures of the engine in this process at three loads, and the time to the first token of a longer prompt."""
    found = {}
    for streams, output_len in ((1, 64), (8, 64), (SEQUENCES, 64)):
        options = ThroughputOptions(streams, 200, output_len, streams, seed=number, num_warmups=0)
        result = run_throughput(llm, options)
        found[f"engine 200 x{streams} tok/s"] = result["output_throughput"]
        found[f"engine 200 x{streams} ms CPU/token"] = result["cpu_s_per_token"] * 1e3
    first = replace(options, num_prompts=1, input_len=1000, output_len=1, concurrency=1, seed=1000 + number)
    found["engine TTFT of 1,000 tokens ms"] = run_throughput(llm, first)["duration"] * 1e3
    return found


def rounds(model: str, num_rounds: int) -> dict[str, list[float]]:
    """Values of all figures by name; the first round is a warm-up and omitted."""
    values: dict[str, list[float]] = {}
    with ExitStack() as stack:
        loading = LoadOptions(EngineOptions(max_num_seqs=SEQUENCES))
        llm = stack.enter_context(LLM(model, loading))
        server = start_server("served", own_server(model, available_cores(), SEQUENCES))
        stack.callback(server.close)
        server.warm(SERVED, Units())

        def served(number: int) -> Figures:
            found = figures(SERVED, server.run(SERVED, Units(), number))
            return {
                f"served 200 x{SEQUENCES} tok/s": found["output_throughput"],
                f"served 200 x{SEQUENCES} TTFT ms": found["ttft_ms"],
                f"served 200 x{SEQUENCES} ms CPU/token": found["cpu_ms_per_token"],
            }

        for number in range(num_rounds + 1):
            print(f"round {number} of {num_rounds}" if number else "warming", file=sys.stderr)
            for work in (machine, schedule, sampling, partial(engine, llm, number), partial(served, number)):
                for name, value in work().items():
                    values.setdefault(name, []).append(value)
    return {name: found[1:] for name, found in values.items()}


def is_more_better(name: str) -> bool:
    """True if more of the figure is better, by the longest unit that ends its name."""
    unit = max((unit for unit in UNITS if name.endswith(f" {unit}")), key=len)
    return UNITS[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="output file (JSON)")
    parser.add_argument("--model", default="pocket://")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    values = rounds(arguments.model, arguments.rounds)
    table = Table("", (*words("figure"), *numbers("median", "least", "greatest")))
    for name, found in values.items():
        table.rows.append((name, *(f"{value:,.4g}" for value in (statistics.median(found), min(found), max(found)))))
    print(f"{machine_name()}, Lockstep {__version__}, {arguments.model}, {arguments.rounds} rounds")
    print(to_lines(table))
    named = {
        name: {"values": found, "better": "more" if is_more_better(name) else "less"} for name, found in values.items()
    }
    result = {
        "kind": "short",
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "machine": machine_name(),
        "version": __version__,
        "model": arguments.model,
        "figures": named,
    }
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.monotonic() - started_s:.0f} s; lockstep bench compare YESTERDAY.json {arguments.result}")


if __name__ == "__main__":
    main()
