"""Engine overhead: cost of each part of a step around the forward pass, and its share of a complete step.

    python -m benchmarks.engine                          # engine alone, with an executor without computation
    python -m benchmarks.engine --model model.gguf       # also the share of a complete step of a model

Every part is measured inside one run; figures are medians over decode steps with all sequences running. Compare ratios,
because the machine is shared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec import structs

from lockstep.core.policy import SchedulerConfig
from lockstep.engine import output_processing
from lockstep.engine.engine import Engine
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.base import Blocks, Geometry, Logits, StepBatch
from lockstep.executors.sampling import likeliest, sample
from lockstep.executors.sampling_params import SamplingParams

PARTS = ("schedule", "build", "execute", "sample", "accept", "commit", "deliver")
ENGINE_PARTS = ("schedule", "build", "accept", "commit", "deliver")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class NullExecutor:
    """Answers every step with the same random logits."""

    def __init__(self, vocab_size: int, num_sequences: int) -> None:
        self.geometry = Geometry(32, 1, 1, 8192, vocab_size)
        self.environment: Mapping[str, str] = {"executor": "null"}
        self.machine: Mapping[str, str] = {}
        self._logits: Logits = np.random.default_rng(0).standard_normal((num_sequences, vocab_size), np.float32)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Nothing to allocate."""

    def prompt_logits(self, first: int, last: int) -> Logits:
        raise NotImplementedError

    def execute(self, batch: StepBatch) -> Logits:
        return self._logits[: len(batch.rows)]

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        return np.zeros((len(blocks), self.geometry.bytes_per_block), np.uint8)

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to release."""


class Stopwatch:
    """Seconds per part of a step, measured by wrapping the functions that the loop calls."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._current: dict[str, float] = {}

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._current[part] = self._current.get(part, 0.0) + time.perf_counter() - started

        return timed

    def close_step(self, total_s: float) -> None:
        self.steps.append(self._current | {"step": total_s})
        self._current = {}

    def median_s(self, part: str) -> float:
        return statistics.median(step.get(part, 0.0) for step in self.steps)


def watch(engine: Engine, watch: Stopwatch) -> None:
    """Wrap each part of the engine's loop with the stopwatch."""
    processor, requests, executor = engine._processor, engine._requests, engine.model.executor
    engine.scheduler.schedule = watch.wrap("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]  # a measurement from outside
    engine.scheduler.commit = watch.wrap("commit", engine.scheduler.commit)  # type: ignore[method-assign]  # measured from outside
    processor.batch = watch.wrap("build", processor.batch)  # type: ignore[method-assign]  # measured from outside
    processor.accept = watch.wrap("accept", processor.accept)  # type: ignore[method-assign]  # measured from outside
    requests._deliver = watch.wrap("deliver", requests._deliver)  # type: ignore[method-assign]  # measured from outside
    executor.execute = watch.wrap("execute", executor.execute)  # type: ignore[method-assign]  # measured from outside


def measure(
    model: LoadedModel, config: SchedulerConfig, num_sequences: int, prompt_tokens: int, steps: int
) -> Stopwatch:
    """Decode ``steps`` steps with all sequences running and every output delivered to a callback."""
    engine = Engine(model, replace(config, max_num_seqs=num_sequences, max_num_batched_tokens=512 + num_sequences))
    stopwatch = Stopwatch()
    rng = np.random.default_rng(1)
    received: list[TokenOutput] = []
    params = structs.replace(GREEDY, max_tokens=steps + 64)
    for _ in range(num_sequences):
        prompt = [int(token) for token in rng.integers(3, model.vocab_size, prompt_tokens)]
        engine.submit(GenerationRequest(prompt, params), received.append)
    while sum(output.token_ids != () for output in received) < num_sequences or len(received) < 2 * num_sequences:
        engine.step()
    watch(engine, stopwatch)
    with (
        patch.object(output_processing, "sample", stopwatch.wrap("sample", sample)),
        patch.object(output_processing, "likeliest", stopwatch.wrap("sample", likeliest)),
    ):
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            stopwatch.close_step(time.perf_counter() - started)
    engine.abort_all()
    vars(model.executor).pop("execute", None)
    return stopwatch


def report(title: str, stopwatch: Stopwatch, num_sequences: int) -> None:
    print(f"\n{title}, {num_sequences} sequences, {len(stopwatch.steps)} steps (medians)")
    for part in (*PARTS, "step"):
        median_us = stopwatch.median_s(part) * 1e6
        print(f"  {part:9} {median_us:10.1f} us  {median_us / num_sequences:8.2f} us per sequence")
    ours = [sum(step.get(part, 0.0) for part in ENGINE_PARTS) for step in stopwatch.steps]
    whole = [step["step"] - step.get("execute", 0.0) for step in stopwatch.steps]
    shares = [(step["step"] - step.get("execute", 0.0)) / step["step"] for step in stopwatch.steps]
    print(
        f"  schedule + build + publish: {statistics.median(ours) * 1e6 / num_sequences:.2f} us per sequence (goal 20)"
    )
    print(f"  everything but the forward pass: {statistics.median(whole) * 1e6:.0f} us, "
          f"{statistics.median(shares):.1%} of the step (goal 5 % at 32 sequences of a 135M shape)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="additional model whose complete step is measured")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    arguments = parser.parse_args()
    stub, config = load_model("stub://null", LoadOptions(EngineOptions(num_blocks=16_384)))
    for count in arguments.sequences:
        executor = NullExecutor(49_152, count)
        null = replace(stub, executor=executor)
        roomy = replace(config, block_size=32, num_blocks=count * 20)
        report("no forward pass", measure(null, roomy, count, arguments.prompt_tokens, arguments.steps), count)
    if arguments.model:
        options = LoadOptions(EngineOptions(max_num_seqs=32))
        model, config = load_model(arguments.model, options)
        for count in (1, 8, 32):
            stopwatch = measure(model, config, count, arguments.prompt_tokens, max(20, arguments.steps // 3))
            report(arguments.model, stopwatch, count)
        model.close()


if __name__ == "__main__":
    main()
