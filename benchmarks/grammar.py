"""Cost of constraints: build time, masks, and their share of a step with many constrained sequences.

    python -m benchmarks.grammar                              # the embedded model
    python -m benchmarks.grammar --model model.gguf --num-seqs 32

Figures are the best of several rounds; compare ratios within one run, because the machine is shared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np

from lockstep import LLM, Constraint, EngineOptions, LoadOptions, SamplingParams
from lockstep.engine.generation import Generation
from lockstep.executors.grammar import Grammar
from lockstep.executors.sampling import SamplerState, sample
from lockstep.executors.sampling_params import ResolvedSampling

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "paid"]}, "minItems": 2, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "choice of 4": Constraint.choice(["billing", "technical", "legal", "none"]),
    "regex": Constraint.regex("[A-Z][a-z]{3,40} [0-9]{4}"),
    "any JSON object": Constraint.json_object(),
    "JSON schema": Constraint.json_schema(SCHEMA),
    "schema of 400 enumerations": Constraint.json_schema(
        {"type": "object", "properties": {f"p{i}": {"enum": [f"v{i}{j}" for j in range(10)]} for i in range(400)}}
    ),
}
ROUNDS = 7


class Meter:
    """Seconds and calls of wrapped functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def wrap(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
                self.calls[name] = self.calls.get(name, 0) + 1

        return timed


@contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()
    with (
        patch.object(Generation, "allowed", meter.wrap("mask", Generation.allowed)),
        patch.object(Grammar, "accept", meter.wrap("accept", Grammar.accept)),
        patch("lockstep.engine.output_processing.sample", meter.wrap("sample", sample)),
    ):
        yield meter


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def builds(llm: LLM) -> None:
    print("build per sequence, checked before (us)")
    for name, constraint in CONSTRAINTS.items():
        llm.model.grammars.build(constraint)
        print(f"  {name:28}{best(partial(llm.model.grammars.build, constraint)) * 1e6:10.0f}")


def seam() -> None:
    print("a constrained row in sample(), over the same row without (us)")
    for vocab in (4_096, 49_152, 151_936):
        logits = np.random.default_rng(0).normal(0, 3, (1, vocab)).astype(np.float32)
        flags = np.zeros((vocab + 31) // 32 * 32, np.uint8)
        flags[100 : vocab - 200] = 1
        bits = np.packbits(flags, bitorder="little")
        state = SamplerState(ResolvedSampling(), 1, [1], vocab)
        free = best(partial(sample, logits, [state], [5]))
        bound = best(partial(sample, logits, [state], [5], None, {0: bits}))
        print(f"  vocabulary {vocab:8,}{free * 1e6:10.0f} -> {bound * 1e6:.0f}")


def steps(llm: LLM, num_seqs: int) -> None:
    prompts = [f"Customer {index}: " for index in range(num_seqs)]

    def run(constraint: Constraint | None, logprobs: int | None = None) -> tuple[float, int, int]:
        params = [
            SamplingParams(
                seed=i, max_tokens=120, constraint=constraint, logprobs=logprobs, ignore_eos=constraint is None
            )
            for i in range(num_seqs)
        ]
        before = llm.engine.metrics().counters["num_steps"]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        taken = time.perf_counter() - started
        return taken, llm.engine.metrics().counters["num_steps"] - before, sum(o.num_output_tokens for o in outputs)

    constraint = CONSTRAINTS["JSON schema"]
    run(constraint)
    rows: list[tuple[float, Meter, float, int, int]] = []
    for _ in range(ROUNDS):
        with metered() as meter:
            taken, num_steps, num_tokens = run(constraint)
        rows.append((taken, meter, taken / num_steps, num_steps, num_tokens))
    taken, meter, step_s, num_steps, num_tokens = min(rows, key=lambda row: row[0])
    free_s, free_steps, free_tokens = min(run(None) for _ in range(3))
    single_s, single_steps, single_tokens = min(run(constraint, 0) for _ in range(3))
    print(f"{num_seqs} constrained sequences, JSON schema, temperature 1")
    for name in ("mask", "accept"):
        us = meter.seconds[name] / meter.calls[name] * 1e6
        print(f"  {name:10}{us:8.1f} us per row and step, {meter.seconds[name] / taken:6.1%} of the time")
    print(f"  sample    {meter.seconds['sample'] / meter.calls['mask'] * 1e6:8.1f} us per row and step")
    print(f"  step      {step_s * 1e3:8.2f} ms; without a constraint {free_s / free_steps * 1e3:.2f} ms")
    print(f"  forced    {num_tokens / num_steps:8.1f} tokens per step, one by one {single_tokens / single_steps:.1f}")
    print(
        f"  tokens/s  {num_tokens / taken:8.0f}, one by one {single_tokens / single_s:.0f}, "
        f"without a constraint {free_tokens / free_s:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket://")
    parser.add_argument("--num-seqs", type=int, default=32)
    options = parser.parse_args()
    engine = EngineOptions(max_num_seqs=options.num_seqs, enable_prefix_caching=False)
    with LLM(options.model, LoadOptions(engine)) as llm:
        builds(llm)
        seam()
        steps(llm, options.num_seqs)


if __name__ == "__main__":
    main()
