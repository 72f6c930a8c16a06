"""LoRA adapters in one batch: steps with eight adapters against the same steps of the base model alone.

    python -m benchmarks.lora                                   135M, Q8_0
    python -m benchmarks.lora --shapes llama-3.2-1b --encodings Q8_0,Q4_0

Weights are random, and adapters of all seven linear layers have 16 bits. Rows have the adapters in turn, so that no two
neighbours have the same one. Steps with and without adapters alternate in one process; a ratio is the median of the
ratios of pairs. The table also has the time to load and unload an adapter, its memory, and the times to load the model
with and without an adapter merged into it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from msgspec.structs import replace as struct_with

from lockstep.artifacts.adapter import MERGED_ENCODINGS, merged, open_adapter
from lockstep.artifacts.model import Artifact, Encoding
from lockstep.artifacts.source import open_artifact
from lockstep.core.step import StepPlan
from lockstep.executors.base import StepBatch
from lockstep.executors.native.executor import NativeExecutor, load_executor
from lockstep.executors.options import ExecutorOptions
from tools.random_adapters import write_peft
from tools.random_models import SHAPES, write_gguf

STEPS = (
    ("x32 at 200, 8 adapters", 32, 200, 1, 8),
    ("x32 at 200, 1 adapter", 32, 200, 1, 1),
    ("x8 at 200, 8 adapters", 8, 200, 1, 8),
    ("x1 at 200, 1 adapter", 1, 200, 1, 1),
    ("prefill 512, 1 adapter", 1, 0, 512, 1),
)
"""Name; streams, context tokens and new tokens of each; and number of adapters."""
NUM_BLOCKS = 32 * 8
NUM_ADAPTERS = 8


def step_of(streams: int, past: int, length: int, vocab_size: int) -> StepBatch:
    num_blocks = -(-(past + length) // 32)
    tables = tuple(tuple(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks)) for i in range(streams))
    ids = tuple(range(streams))
    plan = StepPlan(0, (), (), (), (), ids, (past,) * streams, (length,) * streams, tables, (True,) * len(ids))
    tokens = np.random.default_rng(0).integers(0, vocab_size, streams * length)
    return StepBatch(plan, tokens, np.arange(1, streams + 1) * length - 1)


def seconds(executor: NativeExecutor, batch: StepBatch, repeats: int) -> float:
    """Duration of a step; of one thread its processor time, which other programs disturb less."""
    clock = time.process_time if executor.machine["threads"] == "1" else time.perf_counter
    begin = clock()
    for _ in range(repeats):
        executor.execute(batch)
    return (clock() - begin) / repeats


def measure(executor: NativeExecutor, vocab_size: int, turns: int) -> None:
    """Print a row for each step: milliseconds of the base and with adapters, and the ratio with its quartiles."""
    print("| step | base, ms | with adapters, ms | ratio (quartiles) |\n|---|---|---|---|")
    for name, streams, past, length, num_adapters in STEPS:
        base = step_of(streams, past, length, vocab_size)
        slots = np.repeat(np.arange(streams, dtype=np.int32) % num_adapters + 1, length)
        adapted = struct_with(base, adapters=slots)
        repeats = 1 if streams * length > 64 else 3
        seconds(executor, base, 1), seconds(executor, adapted, 1)
        pairs = [(seconds(executor, base, repeats), seconds(executor, adapted, repeats)) for _ in range(turns)]
        first, middle, last = quantiles([b / a for a, b in pairs], n=4)
        times = [1e3 * median(column) for column in zip(*pairs, strict=True)]
        print(f"| {name} | {times[0]:.2f} | {times[1]:.2f} | {middle:.3f} ({first:.3f} to {last:.3f}) |", flush=True)


def load_seconds(artifact: Artifact, options: ExecutorOptions) -> float:
    begin = time.perf_counter()
    load_executor(artifact, options, lambda stage, share: None).close()
    return time.perf_counter() - begin


def run(shape_name: str, encoding: str, args: Any, folder: Path) -> None:
    shape = replace(SHAPES[shape_name], max_model_len=max(1024, SHAPES[shape_name].max_model_len))
    model = folder / f"{shape_name}-{encoding}.gguf"
    if not model.exists():
        write_gguf(model, shape, encoding)
    artifact = open_artifact(str(model), cache_dir=folder)
    options = ExecutorOptions(threads=args.threads, isa=args.isa, cache_dir=folder)
    executor = load_executor(artifact, options, lambda stage, share: None)
    assert isinstance(executor, NativeExecutor)
    executor.allocate(NUM_BLOCKS, 1)
    for block in range(1, NUM_BLOCKS + 1):
        executor.write_blocks([block], np.zeros((1, executor.geometry.bytes_per_block), np.uint8))
    adapters = []
    for seed in range(NUM_ADAPTERS):
        directory = folder / f"{shape_name}-rank-{args.rank}-{seed}"
        if not directory.exists():
            write_peft(directory, shape, args.rank, seed=seed)
        adapters.append(open_adapter(directory, artifact, cache_dir=folder))
    begin = time.perf_counter()
    for each in adapters:
        executor.load_adapter(each)
    load_ms = 1e3 * (time.perf_counter() - begin) / NUM_ADAPTERS
    weights = executor.geometry.weights_bytes or 0
    machine = executor.machine
    print(
        f"\n{shape_name} {encoding}, {machine['isa']}, {machine['threads']} threads, rank {args.rank}: "
        f"base {weights / 1e6:.1f} MB, {NUM_ADAPTERS} adapters {executor.adapter_bytes / 1e6:.1f} MB, "
        f"{load_ms:.1f} ms to load one\n"
    )
    measure(executor, shape.vocab_size, args.turns)
    begin = time.perf_counter()
    executor.unload_adapter(1)
    print(f"\nunloading one: {1e3 * (time.perf_counter() - begin):.2f} ms", flush=True)
    executor.close()
    if Encoding(encoding) in MERGED_ENCODINGS:
        base, first, later = (load_seconds(each, options) for each in (artifact, *[merged(artifact, adapters[0])] * 2))
        print(f"loading the base: {base:.2f} s; with an adapter merged: {first:.2f} s, and {later:.2f} s the next time")


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps with LoRA adapters against steps of the base model.")
    parser.add_argument("--shapes", default="smollm2-135m", help="comma-separated shapes (default: smollm2-135m)")
    parser.add_argument("--encodings", default="Q8_0", help="comma-separated encodings (default: Q8_0)")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (default: 16)")
    parser.add_argument("--turns", type=int, default=15, help="pairs of measurements of a step (default: 15)")
    parser.add_argument("--threads", type=int, default=None, help="threads (default: all cores)")
    parser.add_argument("--isa", default=None, help="instruction set (default: the fastest one)")
    parser.add_argument("--folder", type=Path, default=None, help="folder that keeps the random files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for shape in args.shapes.split(","):
            for encoding in args.encodings.split(","):
                run(shape, encoding, args, folder)


if __name__ == "__main__":
    main()
