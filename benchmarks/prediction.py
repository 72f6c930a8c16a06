"""How well replay predicts: prices from one live run, the figures of other live runs from their arrivals alone.

    python -m benchmarks.prediction                                 # prints Markdown
    python -m benchmarks.prediction --out docs/prediction.md        # the page that is in the repository
    python -m benchmarks.prediction --model model.gguf --scale 0.1  # a slower model, a tenth of the rates

A run is a real `lockstep serve --trace` under `bench serve`'s load, every request with its full length. Run A is only
calibrated on. Runs B and C have another load and other limits. All are made twice, A B C A B C, each round predicted
from its own A, so that the error of the prediction stands beside the spread of two identical runs. What the prediction
gets is A's prices, the limits, and when which lengths arrived; not one time of a step of the run that it predicts.

Throughput is output tokens by the time from the first arrival to the last end. Times count from a request's arrival in
the worker; what the client saw stands beside them and has HTTP, tokens and text in it. Requests that warm up are served
and simulated, and counted in neither.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from benchmarks.streaming import PATH, serving
from lockstep.bench.samples import RandomLengths
from lockstep.bench.serve import Dataset, ServeOptions, run_serve
from lockstep.replay.calibrate import calibrate
from lockstep.replay.configs import changed_fields, config_for
from lockstep.replay.cost_file import CostFile, MadeOn
from lockstep.replay.latencies import e2e_ps, ttft_ps
from lockstep.replay.render.cost import show_cost
from lockstep.replay.render.tables import Table
from lockstep.replay.render.terminal import to_markdown
from lockstep.replay.simulator import Simulation
from lockstep.replay.trace import Trace, live_requests, live_steps, open_trace, workload_of
from lockstep.version import __version__

MODELS = ("stub://a?step_ms=4&token_us=150", "pocket://")
"""The stub sleeps as long as it says: what remains of the error is not the cost model's."""
NUM_WARMUPS = 4
GOALS = {"output tokens per second": 0.05, "mean end to end, ms": 0.10, "mean time to first token, ms": 0.15}
"""Greatest relative error of each figure that was set as a goal."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load and the limits that it meets."""

    name: str
    words: str
    num_requests: int
    rate: float
    """Requests per second; inf: all at once."""
    input_tokens: int
    output_tokens: int
    seed: int
    flags: tuple[str, ...]


class Figures(dict[str, float]):
    """Throughput and means by the names of ``GOALS``."""

    @classmethod
    def of(cls, num_tokens: int, span_s: float, e2e_ms: Sequence[float], ttft_ms: Sequence[float]) -> Figures:
        return cls(zip(GOALS, (num_tokens / span_s, statistics.mean(e2e_ms), statistics.mean(ttft_ms)), strict=True))


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What one run left behind."""

    trace: Trace
    live: Figures
    client: Figures


def scenarios(scale: float) -> list[Scenario]:
    """The first is calibrated on. ``scale`` multiplies rates, for machines of another speed."""
    return [
        Scenario("A", "varying", 200, 10 * scale, 160, 48, 1, ("--max-num-seqs=16",)),
        Scenario(
            "B",
            "all at once, longer prompts, half the places, a quarter of the budget",
            220,
            float("inf"),
            220,
            40,
            2,
            ("--max-num-seqs=8", "--max-num-batched-tokens=128"),
        ),
        Scenario("C", "steady, shorter prompts, twice the places", 220, 11 * scale, 80, 64, 3, ("--max-num-seqs=32",)),
    ]


def run_live(scenario: Scenario, model: str, folder: Path) -> LiveRun:
    """Serve, load, stop, read."""
    flags = ["--no-probe", "--trace", str(folder), *scenario.flags]
    with serving(model, 64, flags) as (target, _):
        options = ServeOptions(
            target,
            Dataset("random"),
            RandomLengths(scenario.input_tokens, scenario.output_tokens, 0.8),
            backend="openai",
            endpoint=PATH,
            num_prompts=scenario.num_requests,
            request_rate=scenario.rate,
            seed=scenario.seed,
            num_warmups=NUM_WARMUPS,
            ignore_eos=True,
            shows_progress=False,
        )
        with redirect_stdout(sys.stderr):
            result = run_serve(options, lambda words: print(f"{scenario.name}: {words}", file=sys.stderr))
    failed = [outcome.error for outcome in result.outcomes if not outcome.is_success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    trace = open_trace(folder)
    client = Figures.of(
        sum(outcome.output_tokens for outcome in result.outcomes),
        result.figures["duration"],
        [outcome.e2el_s * 1e3 for outcome in result.outcomes],
        [outcome.ttft_s * 1e3 for outcome in result.outcomes],
    )
    return LiveRun(trace, _recorded(trace, scenario.num_requests), client)


def _recorded(trace: Trace, num_requests: int) -> Figures:
    """Figures of the last requests of a recording."""
    measured = sorted(live_requests(trace), key=lambda each: each.seq_id)[-num_requests:]
    span_us = max(each.finished_us for each in measured) - min(each.arrival_us for each in measured)
    return Figures.of(
        sum(each.num_output_tokens for each in measured),
        span_us / 1e6,
        [(each.finished_us - each.arrival_us) / 1e3 for each in measured],
        [(each.first_token_us - each.arrival_us) / 1e3 for each in measured],
    )


def predict(trace: Trace, cost: CostFile, num_requests: int) -> Figures:
    """The same figures, by simulation of the arrivals of a recording."""
    workload = workload_of(trace)
    replay = Simulation(workload, config_for(workload), cost.model()).run()
    measured = replay.outcomes[-num_requests:]
    span_ps = max(each.finished_ps for each in measured) - min(each.arrival_ps for each in measured)
    return Figures.of(
        sum(each.num_output_tokens for each in measured),
        span_ps / 1e12,
        [e2e_ps(each) / 1e9 for each in measured],
        [ttft_ps(each) / 1e9 for each in measured],
    )


def prices_of(run: LiveRun, model: str) -> CostFile:
    engine = run.trace.engines[0]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    made_on = MadeOn(__version__, machine, model, engine.fingerprint, changed_fields(engine.config))
    return calibrate(live_steps(run.trace, engine.number), made_on)


def table_of(scenario: Scenario, runs: Sequence[LiveRun], predictions: Sequence[Figures]) -> Table:
    """Live and predicted, each pair of the same arrivals; errors are of the pairs' means."""
    columns = (
        "figure",
        "live 1",
        "live 2",
        "spread",
        "predicted 1",
        "predicted 2",
        "error",
        "goal",
        "client 1",
        "client 2",
    )
    table = Table(scenario.name, columns)
    for name, goal in GOALS.items():
        live, predicted = [run.live[name] for run in runs], [figures[name] for figures in predictions]
        mean = statistics.mean(live)
        error = statistics.mean(predicted) / mean - 1
        table.rows.append(
            (
                name,
                *(f"{value:,.1f}" for value in live),
                f"{100 * (max(live) - min(live)) / mean:.1f} %",
                *(f"{value:,.1f}" for value in predicted),
                f"{100 * error:+.1f} %",
                f"{100 * goal:.0f} %: {'met' if abs(error) <= goal else 'missed'}",
                *(f"{run.client[name]:,.1f}" for run in runs),
            )
        )
    return table


def study(model: str, scale: float, folder: Path) -> str:
    """Everything of one model, as Markdown."""
    first, *others = scenarios(scale)
    load_before = os.getloadavg()[0]
    costs: list[CostFile] = []
    runs: dict[str, list[LiveRun]] = {scenario.name: [] for scenario in others}
    for number in (1, 2):
        costs.append(prices_of(run_live(first, model, folder / f"A{number}"), model))
        for scenario in others:
            runs[scenario.name].append(run_live(scenario, model, folder / f"{scenario.name}{number}"))
    load = f"Load average of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    parts = [f"## {model}\n", f"Calibrated on {_words(first)}. {load}\n", *map(_cost_text, costs)]
    for scenario in others:
        pairs = zip(runs[scenario.name], costs, strict=True)
        predictions = [predict(run.trace, cost, scenario.num_requests) for run, cost in pairs]
        parts.append(to_markdown(f"{_words(scenario)}:", [table_of(scenario, runs[scenario.name], predictions)]))
    return "\n".join(parts)


def page(models: Sequence[str], scale: float, folder: Path) -> str:
    """The whole page."""
    about = "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip()
    parts = [study(model, scale, folder / str(number)) for number, model in enumerate(models)]
    return "\n".join(
        ["# How well replay predicts\n", about + "\n", "Made by `python -m benchmarks.prediction`.\n", *parts]
    )


def _words(scenario: Scenario) -> str:
    rate = "all at once" if scenario.rate == float("inf") else f"{scenario.rate:g} requests/s (Poisson)"
    return (
        f"run {scenario.name} ({scenario.words}): {scenario.num_requests} requests, {rate}, about "
        f"{scenario.input_tokens} tokens in and {scenario.output_tokens} out, {' '.join(scenario.flags)}"
    )


def _cost_text(cost: CostFile) -> str:
    out = StringIO()
    show_cost(cost, out)
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be repeated; a stub and pocket:// by default")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the rates")
    parser.add_argument("--keep", type=Path, help="a folder for the recordings, which must not exist yet")
    parser.add_argument("--out", type=Path, help="write the page there, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        text = page(arguments.model or MODELS, arguments.scale, folder)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
