"""Raw steps of the OpenVINO executor: prefill, decode at several widths, the cost of building inputs, swapping.

    python -m tools.random_models gguf smollm2-135m Q8_0 model.gguf
    python -m benchmarks.executor model.gguf

Speed does not depend on what the weights say, so random ones do. Medians, and the best in brackets; on a shared machine
compare ratios of runs made one after the other, never single figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.artifacts.source import open_artifact
from lockstep.core.step import StepPlan
from lockstep.executors.base import Executor, StepBatch
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.inputs import build_inputs
from lockstep.executors.options import INFERENCE_PRECISIONS, KV_CACHE_PRECISIONS, ExecutorOptions
from lockstep.executors.step_inputs import Limits, TableRows


def step(num_seqs: int, past: int, length: int, blocks_per_seq: int, block_size: int, vocab_size: int) -> StepBatch:
    """``num_seqs`` chunks of ``length`` tokens, each after ``past`` tokens and in blocks of its own."""
    num_needed = -(-(past + length) // block_size)
    tables = tuple(tuple(range(1 + i * blocks_per_seq, 1 + i * blocks_per_seq + num_needed)) for i in range(num_seqs))
    plan = StepPlan(
        step=0,
        evicted=(),
        swap_out=(),
        swap_in=(),
        copies=(),
        seq_ids=tuple(range(num_seqs)),
        starts=(past,) * num_seqs,
        lengths=(length,) * num_seqs,
        tables=tables,
        samples=(True,) * num_seqs,
    )
    token_ids = np.random.default_rng(0).integers(0, vocab_size, num_seqs * length)
    return StepBatch(plan, token_ids, np.arange(1, num_seqs + 1) * length - 1)


def timed_s(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and least time of one call, after one call to warm up."""
    action()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(times)


def show(what: str, num_tokens: int, times: tuple[float, float]) -> None:
    median, least = times
    rates = f"{num_tokens / median:8.0f} tok/s   (best {least * 1e3:8.2f} ms {num_tokens / least:8.0f} tok/s)"
    print(f"{what}: {median * 1e3:8.2f} ms {rates}")


def measure_steps(executor: Executor, args: argparse.Namespace) -> None:
    size, vocab = executor.geometry.block_size, executor.geometry.vocab_size
    longest = max([*args.prefill, args.past + 1])
    per_seq = -(-longest // size)
    executor.allocate(per_seq * max(args.decode), 64)
    for length in args.prefill:
        batch = step(1, 0, length, per_seq, size, vocab)
        repeats = max(3, args.repeats // 4)
        show(f"prefill {length:4}", length, timed_s(partial(executor.execute, batch), repeats))
    for width in args.decode:
        batch = step(width, args.past, 1, per_seq, size, vocab)
        show(f"decode x{width:4}", width, timed_s(partial(executor.execute, batch), args.repeats))


def measure_inputs(args: argparse.Namespace, block_size: int) -> None:
    """Checking and building the inputs of a decode step, without the forward pass."""
    for context in (500, 2000, 8000):
        per_seq = -(-(context + 1) // block_size)
        batch = step(args.sequences, context, 1, per_seq, block_size, 1000)
        limits = Limits(block_size, per_seq * args.sequences, 0, context + 1, 1000)
        for name, rows in (("new tables", None), ("kept tables", TableRows())):
            median, least = timed_s(partial(build_inputs, batch, limits, rows), 50)
            each = f"{median / args.sequences * 1e6:.2f} us each (best {least / args.sequences * 1e6:.2f})"
            print(f"inputs of {args.sequences} sequences, context {context:4}, {name:11}: {each}")


def measure_swaps(executor: Executor, num_blocks: int = 32) -> None:
    executor.allocate(num_blocks, num_blocks)
    pairs = tuple((block + 1, block) for block in range(num_blocks))
    nothing = np.zeros(0, np.int64)
    megabytes = num_blocks * executor.geometry.bytes_per_block / 1e6
    for name in ("out", "in"):
        out = pairs if name == "out" else ()
        back = () if name == "out" else tuple((host, device) for device, host in pairs)
        plan = StepPlan(0, (), out, back, (), (), (), (), (), ())
        batch = StepBatch(plan, nothing, nothing)
        median, least = timed_s(partial(executor.execute, batch), 20)
        print(f"swap {name}: {megabytes / median:.0f} MB/s (best {megabytes / least:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or Hugging Face directory")
    parser.add_argument("--prefill", type=int, nargs="+", default=[128, 512], help="prompt lengths")
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="sequences per step")
    parser.add_argument("--past", type=int, default=200, help="tokens in each decoding sequence's context")
    parser.add_argument("--sequences", type=int, default=256, help="sequences of the input-building measurement")
    parser.add_argument("--repeats", type=int, default=15, help="steps per figure")
    parser.add_argument("--threads", type=int, help="threads of a forward pass; default: all cores")
    parser.add_argument("--kv-cache-precision", choices=KV_CACHE_PRECISIONS, default="f16")
    parser.add_argument("--inference-precision", choices=INFERENCE_PRECISIONS, default="f32")
    parser.add_argument("--dynamic-quantization-group-size", type=int, choices=(0, 32), default=32)
    parser.add_argument("--cache-dir", type=Path, help="where the built graph is kept; default: nowhere")
    args = parser.parse_args()
    options = ExecutorOptions(
        threads=args.threads,
        kv_cache_precision=args.kv_cache_precision,
        inference_precision=args.inference_precision,
        dynamic_quantization_group_size=args.dynamic_quantization_group_size,
        cache_dir=args.cache_dir,
    )
    begin = time.perf_counter()
    executor = load_executor(open_artifact(str(args.model)), options)
    print(f"load: {time.perf_counter() - begin:.2f} s   {dict(executor.environment)}")
    measure_steps(executor, args)
    measure_swaps(executor)
    measure_inputs(args, executor.geometry.block_size)
    executor.close()


if __name__ == "__main__":
    main()
