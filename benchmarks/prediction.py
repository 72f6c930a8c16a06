"""Accuracy of replay predictions: prices from one live run predict other live runs from their arrivals alone.

    python -m benchmarks.prediction                                 # prints Markdown
    python -m benchmarks.prediction --out docs/prediction.md        # the page that is in the repository
    python -m benchmarks.prediction --model model.gguf --scale 0.1  # a slower model, a tenth of the rates

A run is a real `lockstep serve --trace` under the load of `bench serve`, every request with its full length. Run A is
only used for calibration. Runs B and C have another load and other limits. All are made twice, and each round is
predicted from its own A, so that the error of the prediction can be compared with the spread of two identical runs. The
inputs of the prediction are the costs from A, the limits, and the arrival times and lengths; no time of a step of the
predicted run is used. "Error, alike" is the error of the same prediction with costs of the identical run of the other
round: a load like the one to predict.

Calibrate under a load like the one to predict. Costs depend on the state of the machine, and a server that is often
idle is in another state than a saturated one, which shares its cores with its clients. A user who calibrated on a light
load measured errors of +15.9 % of throughput and -14.4 % of end-to-end time on a saturated run. Run B is such a pair,
too, and has missed its goals in the other direction: not even the sign is the same on all machines. A replay reports if
its steps are larger than those of the calibration; it has no information about other load on the machine.

A similar load does not help if the machine itself stalls: at a load average of 20, in three slices of pocket whose two
rounds were 23 % apart, costs of the identical run predicted 25 % too much throughput of run B, and those of run A 3 %.
The likely reason, not yet proven, is that the fit cuts steps that stalled. So calibrate on a machine that is as quiet
as the one to predict.

The speed of a shared machine varies over time: identical runs, one after the other, have differed by 40 %. So all six
servers are up, and the runs take turns in slices of a few seconds, A B C A B C, so that other load affects all of them
alike. Each slice begins and ends with an idle server.

Throughput is output tokens divided by the time from the first arrival to the last end of each slice. Times count from a
request's arrival in the worker; the times that the client measured stand beside them and include HTTP, tokens and text.
Warm-up requests are served and simulated, and counted in neither.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

from benchmarks.streaming import PATH, serving
from lockstep.bench.samples import RandomLengths
from lockstep.bench.serve import Dataset, ServeOptions, ServeResult, run_serve
from lockstep.replay.calibrate import calibrate
from lockstep.replay.configs import changed_fields, config_for
from lockstep.replay.cost_file import CostFile, MadeOn, cost_document
from lockstep.replay.live import live_requests, live_steps, workload_of
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace, open_trace
from lockstep.report.document import Document, Section, Table, numbers, words
from lockstep.report.text import to_markdown
from lockstep.version import __version__

T = TypeVar("T")
MODELS = ("stub://a?step_ms=4&token_us=150", "pocket://")
"""Models to measure. The stub's steps take exactly its model of time, so its error is not that of the cost model."""
NUM_ROUNDS = 2
NUM_SLICES = 10
NUM_WARMUPS = 120
NUM_ASKED = 1
"""Number of requests by which ``bench serve`` finds out, before each load, whether prompts may be token ids."""
GOALS = {"output tokens per second": 0.05, "mean end to end, ms": 0.10, "mean time to first token, ms": 0.15}
"""Maximum relative error of each figure, set as a goal."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load with the limits of its server."""

    name: str
    words: str
    num_requests: int
    """Number of requests per slice."""
    rate: float
    """Requests per second; inf: all at once."""
    input_tokens: int
    output_tokens: int
    seed: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Totals of one slice, measured or predicted."""

    num_tokens: int
    span_s: float
    e2e_ms: Sequence[float]
    ttft_ms: Sequence[float]


class Figures(dict[str, float]):
    """Throughput and means by the names of ``GOALS``."""

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Figures:
        parts = list(slices)
        rate = sum(part.num_tokens for part in parts) / sum(part.span_s for part in parts)
        e2e_ms = statistics.mean(chain.from_iterable(part.e2e_ms for part in parts))
        ttft_ms = statistics.mean(chain.from_iterable(part.ttft_ms for part in parts))
        return cls(zip(GOALS, (rate, e2e_ms, ttft_ms), strict=True))


def scenarios(scale: float) -> list[Scenario]:
    """Scenarios; the first one is for calibration. ``scale`` multiplies rates, for machines of another speed."""
    return [
        Scenario("A", "varying", 20, 10 * scale, 160, 48, 1, ("--max-num-seqs=16",)),
        Scenario(
            "B",
            "all at once, longer prompts, half the places, a quarter of the budget",
            22,
            float("inf"),
            220,
            40,
            2,
            ("--max-num-seqs=8", "--max-num-batched-tokens=128"),
        ),
        Scenario("C", "steady, shorter prompts, twice the places", 22, 11 * scale, 80, 64, 3, ("--max-num-seqs=32",)),
    ]


class LiveRun:
    """A recording server with its clients' measurements."""

    def __init__(self, scenario: Scenario, model: str, folder: Path, opened: ExitStack) -> None:
        self.scenario = scenario
        self._folder = folder
        self._target, _ = opened.enter_context(serving(model, 64, ["--trace", str(folder), *scenario.flags]))
        self._client: list[Slice] = []
        self._serve(NUM_WARMUPS, scenario.rate, seed=0)

    def serve_slice(self, number: int) -> None:
        """Run the load of one slice."""
        scenario = self.scenario
        result = self._serve(scenario.num_requests, scenario.rate, scenario.seed * NUM_SLICES + number)
        self._client.append(
            Slice(
                sum(outcome.output_tokens for outcome in result.outcomes),
                result.figures["duration"],
                [outcome.e2el_s * 1e3 for outcome in result.outcomes],
                [outcome.ttft_s * 1e3 for outcome in result.outcomes],
            )
        )

    def _serve(self, num_requests: int, rate: float, seed: int) -> ServeResult:
        options = ServeOptions(
            self._target,
            Dataset("random"),
            RandomLengths(self.scenario.input_tokens, self.scenario.output_tokens, 0.8),
            backend="openai",
            endpoint=PATH,
            num_prompts=num_requests,
            request_rate=rate,
            seed=seed,
            ignore_eos=True,
            shows_progress=False,
        )
        with redirect_stdout(sys.stderr):
            result = run_serve(options, lambda words: None)
        failed = [outcome.error for outcome in result.outcomes if not outcome.is_success]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        return result

    @property
    def client(self) -> Figures:
        return Figures.of(self._client)

    def trace(self) -> Trace:
        """Recording of the server, after it has stopped."""
        return open_trace(self._folder)


def recorded(trace: Trace, scenario: Scenario) -> Figures:
    """Figures of a recording, without its warm-up."""
    return _figures(sorted(live_requests(trace), key=lambda each: each.seq_id), scenario)


def predict(trace: Trace, cost: CostFile, scenario: Scenario) -> Figures:
    """Figures of a simulation of a recording's arrivals."""
    workload = workload_of(trace)
    return _figures(Simulation(workload, config_for(workload), cost.model()).run().outcomes, scenario)


def _figures(outcomes: Sequence[RequestOutcome], scenario: Scenario) -> Figures:
    slices = [[each.in_ps for each in part] for part in _slices(outcomes, scenario)]
    return Figures.of(
        Slice(
            sum(each.num_output_tokens for each in part),
            (max(each.finished for each in part) - min(each.arrival for each in part)) / 1e12,
            [each.e2e / 1e9 for each in part],
            [each.ttft / 1e9 for each in part],
        )
        for part in slices
    )


def _slices(requests: Sequence[T], scenario: Scenario) -> list[Sequence[T]]:
    """Measured requests by slice, from all requests in the order of arrival."""
    size = NUM_ASKED + scenario.num_requests
    begins = range(NUM_ASKED + NUM_WARMUPS, len(requests), size)
    assert len(begins) == NUM_SLICES, f"unexpected number of recorded requests: {len(requests)}"
    return [requests[begin + NUM_ASKED : begin + size] for begin in begins]


def prices_of(trace: Trace, model: str) -> CostFile:
    engine = trace.engines[0]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    made_on = MadeOn(__version__, machine, model, engine.fingerprint, changed_fields(engine.config))
    return calibrate(live_steps(trace, engine.number), made_on)


def table_of(
    name: str,
    lives: Sequence[Figures],
    predictions: Sequence[Figures],
    alike: Sequence[Figures],
    clients: Sequence[Figures],
) -> Table:
    """Table of measured and predicted figures; each pair has the same arrivals, and errors are those of the pairs'
    means.

    Args:
        alike: predictions with prices of the identical run.
    """
    columns = numbers(
        "live 1",
        "live 2",
        "spread",
        "predicted 1",
        "predicted 2",
        "error",
        "goal",
        "error, alike",
        "client 1",
        "client 2",
    )
    table = Table(name, (*words("figure"), *columns))
    for name, goal in GOALS.items():
        live, predicted = [figures[name] for figures in lives], [figures[name] for figures in predictions]
        mean = statistics.mean(live)
        error = statistics.mean(predicted) / mean - 1
        error_alike = statistics.mean(figures[name] for figures in alike) / mean - 1
        table.rows.append(
            (
                name,
                *(f"{value:,.1f}" for value in live),
                f"{100 * (max(live) - min(live)) / mean:.1f} %",
                *(f"{value:,.1f}" for value in predicted),
                f"{100 * error:+.1f} %",
                f"{100 * goal:.0f} %: {'met' if abs(error) <= goal else 'missed'}",
                f"{100 * error_alike:+.1f} %",
                *(f"{figures[name]:,.1f}" for figures in clients),
            )
        )
    return table


def study(model: str, scale: float, folder: Path) -> str:
    """Results of one model as Markdown."""
    load_before = os.getloadavg()[0]
    with ExitStack() as opened:
        rounds = [
            [LiveRun(scenario, model, folder / f"{scenario.name}{number}", opened) for scenario in scenarios(scale)]
            for number in range(NUM_ROUNDS)
        ]
        for number in range(NUM_SLICES):
            print(f"{model}: slice {number + 1} of {NUM_SLICES}", file=sys.stderr)
            for run in chain.from_iterable(rounds):
                run.serve_slice(number)
    load = f"Load average of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    costs = [prices_of(calibrated.trace(), model) for calibrated, *_ in rounds]
    parts = [f"## {model}\n", f"Calibrated on {_words(rounds[0][0].scenario)}. {load}\n", *map(_cost_text, costs)]
    for identical in list(zip(*rounds, strict=True))[1:]:
        scenario, traces = identical[0].scenario, [run.trace() for run in identical]
        table = table_of(
            scenario.name,
            [recorded(trace, scenario) for trace in traces],
            [predict(trace, cost, scenario) for trace, cost in zip(traces, costs, strict=True)],
            [
                predict(trace, prices_of(twin, model), scenario)
                for trace, twin in zip(traces, traces[::-1], strict=True)
            ],
            [run.client for run in identical],
        )
        parts.append(to_markdown(Document(f"{_words(scenario)}:", [Section("", (table,))])))
    return "\n".join(parts)


def page(models: Sequence[str], scale: float, folder: Path) -> str:
    """Page with all results."""
    about = "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip()
    parts = [study(model, scale, folder / str(number)) for number, model in enumerate(models)]
    return "\n".join(
        ["# How well replay predicts\n", about + "\n", "Made by `python -m benchmarks.prediction`.\n", *parts]
    )


def _words(scenario: Scenario) -> str:
    rate = "all at once" if scenario.rate == float("inf") else f"{scenario.rate:g} requests/s (Poisson)"
    return (
        f"run {scenario.name} ({scenario.words}): {NUM_SLICES} x {scenario.num_requests} requests, {rate}, about "
        f"{scenario.input_tokens} tokens in and {scenario.output_tokens} out, {' '.join(scenario.flags)}"
    )


def _cost_text(cost: CostFile) -> str:
    return to_markdown(cost_document(cost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="model; may be repeated (default: a stub and pocket://)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the request rates (default: 1)")
    parser.add_argument("--keep", type=Path, help="new folder for the recordings (default: temporary)")
    parser.add_argument("--out", type=Path, help="file to which the page is also written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        text = page(arguments.model or MODELS, arguments.scale, folder)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
