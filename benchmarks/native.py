"""The native executor beside OpenVINO's and llama.cpp: whole steps, and products alone.

    python -m benchmarks.native steps model.gguf --peer-python PY           steps, in turns, a process for each
    python -m benchmarks.native steps model.gguf --baseline DIR             OpenVINO's executor of another checkout
    python -m benchmarks.native products                                    Q8_0 and Q4_0, four numbers of rows
    python -m benchmarks.native products --rows 1,8 --types Q4_K --isa avx2     one instruction set of ours

Of products, both sides quantise the activations and multiply them with several matrices, more than the caches hold.
Time is the processor time of this process, the median of the turns. GB/s counts the bytes of our weights; the share of
the peak is that of multiplications and additions in the most that one core's VNNI unit does (``--peak-gops``).
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.native_steps import contenders_of, race
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.products import multiply, quantise
from lockstep.executors.native.weights import pack, packed_bytes
from lockstep.executors.openvino.loading import compile_properties
from lockstep.executors.openvino.precision import precision_of
from lockstep.executors.openvino.runtime import op, ov, the_core
from lockstep.executors.openvino.weights import GroupSums, product
from lockstep.executors.options import ISAS, ExecutorOptions
from tools.random_blocks import random_blocks

SHAPES = ((576, 3072), (1536, 576), (1024, 4096), (3072, 1024))
"""Columns and features."""
WEIGHT_BYTES = 48 << 20
PEAK_GOPS = 465.0
"""One core of an AMD EPYC with Zen 4, measured."""
Floats = npt.NDArray[np.float32]
Run = Callable[[Floats], object]


def matrices(encoding: Encoding, columns: int, features: int) -> list[Tensor]:
    rng = np.random.default_rng(0)
    found: list[Tensor] = []
    num_bytes = 0
    while num_bytes < WEIGHT_BYTES:
        data = random_blocks(rng, (features, columns), encoding.value, 0.05)
        found.append(Tensor(f"w{len(found)}", encoding, (features, columns), data))
        num_bytes += data.nbytes
    return found


def ours(library: NativeLibrary, tensors: Sequence[Tensor]) -> Run:
    sizes = [-(-packed_bytes(library, tensor) // 64) * 64 for tensor in tensors]
    pages = mmap.mmap(-1, sum(sizes) + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    ends = np.cumsum(sizes)
    packed = [
        pack(library, tensor, memory[end - size : end]) for tensor, size, end in zip(tensors, sizes, ends, strict=True)
    ]
    outputs: dict[int, Floats] = {}  # OpenVINO keeps the memory of its outputs, too

    def run(x: Floats) -> list[Floats]:
        out = outputs.setdefault(len(x), np.empty((len(packed), len(x), packed[0].features), np.float32))
        return [
            multiply(library, weights, quantise(library, x), out=place)
            for weights, place in zip(packed, out, strict=True)
        ]

    return run


def openvinos(tensors: Sequence[Tensor]) -> Run:
    x = op.parameter(ov.PartialShape([-1, 1, tensors[0].shape[1]]), np.float32, name="x")
    results = []
    for tensor in tensors:
        shape = (tensor.shape[0], tensor.shape[1])
        precision = precision_of(tensor.name, tensor.encoding, shape[1], None).precision
        results.append(op.result(product(x, tensor, shape, precision, GroupSums())))
    compiled = the_core().compile_model(ov.Model(results, [x]), "CPU", compile_properties(ExecutorOptions(threads=1)))
    request = compiled.create_infer_request()
    return lambda rows: request.infer([rows[:, None, :]], share_inputs=True, share_outputs=True)


def in_turns(runs: Sequence[Run], x: Floats, turns: int) -> list[float]:
    """Median seconds of each."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(turns + 1):
        for run, found in zip(runs, times, strict=True):
            start = time.process_time()
            run(x)
            if turn:  # the first one prepares
                found.append(time.process_time() - start)
    return [median(found) for found in times]


def compare(
    library: NativeLibrary, encodings: Sequence[Encoding], rows: Sequence[int], turns: int, peak: float
) -> None:
    print(f"{library.isa}, one thread, microseconds of one product\n")
    print("| type | columns x features | rows | native | OpenVINO | ratio | GB/s | of the peak | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for encoding in encodings:
        for columns, features in SHAPES:
            tensors = matrices(encoding, columns, features)
            num_bytes = packed_bytes(library, tensors[0])
            runs = ours(library, tensors), openvinos(tensors)
            for count in rows:
                x = np.random.default_rng(1).standard_normal((count, columns)).astype(np.float32)
                mine, theirs = (seconds / len(tensors) for seconds in in_turns(runs, x, turns))
                share = 2e-9 * count * columns * features / mine / peak
                difference = largest_difference(runs, x, len(tensors))
                print(
                    f"| {encoding.value} | {columns} x {features} | {count} | {mine * 1e6:.0f} | {theirs * 1e6:.0f} | "
                    f"{theirs / mine:.2f} | {num_bytes / mine / 1e9:.1f} | {share:.0%} | {difference:.0e} |",
                    flush=True,
                )


def largest_difference(runs: Sequence[Run], x: Floats, num_products: int) -> float:
    """Between results of both, in parts of the largest one."""
    mine, theirs = (runs[0](x), runs[1](x))
    largest = 0.0
    for index in range(num_products):
        first = np.asarray(mine[index])  # type: ignore[index]  # lists of outputs
        second = np.asarray(theirs[index]).reshape(first.shape)  # type: ignore[index]
        largest = max(largest, float(np.abs(first - second).max() / np.abs(second).max()))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "steps"])
    parser.add_argument("model", nargs="?", help="a GGUF file, for steps")
    parser.add_argument("--threads", type=int, default=2, help="of each contender, for steps (default: 2)")
    parser.add_argument("--baseline", type=Path, help="a checkout whose OpenVINO executor takes part, for steps")
    parser.add_argument("--peer-python", help="a Python that has llama-cpp-python, for steps")
    parser.add_argument("--only", default="", help="names of steps, with commas between them")
    parser.add_argument("--rows", default="1,8,32,128", help="numbers of rows (default: 1,8,32,128)")
    parser.add_argument("--types", default="Q8_0,Q4_0", help="encodings of GGUF files (default: Q8_0,Q4_0)")
    parser.add_argument("--isa", choices=ISAS, help="instruction set of ours (default: the fastest)")
    parser.add_argument("--turns", type=int, default=7, help="timed runs of each side (default: 7)")
    parser.add_argument("--peak-gops", type=float, default=PEAK_GOPS, help=f"peak of a core (default: {PEAK_GOPS:.0f})")
    options = parser.parse_args()
    if options.what == "steps":
        if options.model is None:
            parser.error("steps needs a model")
        contenders = contenders_of(options.baseline, options.peer_python, options.isa)
        steps = [name for name in options.only.split(",") if name]
        race(contenders, options.model, options.threads, options.turns, steps)
        return
    library = native_library(options.isa)
    if isinstance(library, str):
        parser.error(library)
    rows = [int(count) for count in options.rows.split(",")]
    compare(library, [Encoding(name) for name in options.types.split(",")], rows, options.turns, options.peak_gops)


if __name__ == "__main__":
    main()
