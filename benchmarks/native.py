"""Native executor against llama.cpp and its own older versions: whole steps, products alone, and each weight type.

    python -m benchmarks.native steps model.gguf --peer-python PY           whole steps, in one process each
    python -m benchmarks.native steps model.gguf --baseline DIR             the executor of another checkout
    python -m benchmarks.native products                                    Q8_0 and Q4_0, four numbers of rows
    python -m benchmarks.native products --rows 1,8 --types Q4_K --isa avx2     one instruction set
    python -m benchmarks.native types                                       bits per weight in file, pack and memory

For products, activations are quantised and multiplied with several matrices that exceed the caches together. Time is
the processor time of one thread, the median of the turns. GB/s counts the bytes of the weights. The share of the peak
is multiplications and additions relative to the maximum of one core's VNNI unit (``--peak-gops``).
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.native_steps import Backend, Running, backends_of, run_in_turns
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.source import open_artifact
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.packs import load_weights
from lockstep.executors.native.products import multiply, quantise
from lockstep.executors.native.weights import pack, packed_bytes
from lockstep.executors.options import ISAS
from tools.random_blocks import BLOCKS, random_blocks
from tools.random_models import MIXES, write_gguf

SHAPES = ((576, 3072), (1536, 576), (1024, 4096), (3072, 1024))
"""Columns and features of the matrices."""
WEIGHT_BYTES = 48 << 20
PEAK_GOPS = 465.0
"""Measured peak of one core of an AMD EPYC with Zen 4, in operations per nanosecond."""
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


def run_of(library: NativeLibrary, tensors: Sequence[Tensor]) -> Run:
    sizes = [-(-packed_bytes(library, tensor) // 64) * 64 for tensor in tensors]
    pages = mmap.mmap(-1, sum(sizes) + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    ends = np.cumsum(sizes)
    packed = [
        pack(library, tensor, memory[end - size : end]) for tensor, size, end in zip(tensors, sizes, ends, strict=True)
    ]
    outputs: dict[int, Floats] = {}

    def run(x: Floats) -> None:
        out = outputs.setdefault(len(x), np.empty((len(packed), len(x), packed[0].features), np.float32))
        for weights, place in zip(packed, out, strict=True):
            multiply(library, weights, quantise(library, x), out=place)

    return run


def products(
    library: NativeLibrary, encodings: Sequence[Encoding], rows: Sequence[int], turns: int, peak: float
) -> None:
    print(f"{library.isa}, one thread, microseconds of one product\n")
    print("| type | columns x features | rows | us | GB/s | of the peak |")
    print("|---|---|---|---|---|---|")
    for encoding in encodings:
        for columns, features in SHAPES:
            if columns % BLOCKS[encoding.value][0]:
                continue  # the type has no such rows
            tensors = matrices(encoding, columns, features)
            num_bytes, run = packed_bytes(library, tensors[0]), run_of(library, tensors)
            for count in rows:
                x = np.random.default_rng(1).standard_normal((count, columns)).astype(np.float32)
                times: list[float] = []
                for turn in range(turns + 1):
                    start = time.process_time()
                    run(x)
                    if turn:  # the first one prepares
                        times.append((time.process_time() - start) / len(tensors))
                mid = median(times)
                share = 2e-9 * count * columns * features / mid / peak
                print(
                    f"| {encoding.value} | {columns} x {features} | {count} | {mid * 1e6:.0f} | "
                    f"{num_bytes / mid / 1e9:.1f} | {share:.0%} |",
                    flush=True,
                )


def types(library: NativeLibrary, shape: str, names: Sequence[str], threads: int) -> None:
    """Print bits per weight in file and pack, and the memory of a process that loaded the model and ran a step."""
    print(f"{shape}, {threads} threads; bits per weight of matrices; memory after a step in an empty context\n")
    print("| type | file | pack | RSS, MB | of it mapped, MB | first load, s | second load, s | x1 at 200, ms |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = write_gguf(Path(folder) / f"{name}.gguf", shape, name)
            artifact = open_artifact(str(path), cache_dir=Path(folder))
            tensors = [artifact.weights[each] for each in artifact.weights.names()]
            matrices = [each for each in tensors if len(each.shape) == 2]
            count = sum(each.shape[0] * each.shape[1] for each in matrices)
            stored = sum(each.data.nbytes for each in matrices)
            weights = load_weights(artifact, library, None, None, 0, lambda stage, share: None)
            backend = Backend("native", "native", sys.executable, cache_dir=folder)
            loads = []
            for _ in range(2):
                running = Running(backend, str(path), threads)
                loads.append(running.load_s)
                step_s = median(running.ask([1, 200, 1, 9]))
                memory = running.ask("memory")
                running.close()
            print(
                f"| {name} | {8 * stored / count:.2f} | {8 * weights.num_bytes / count:.2f} | {memory['VmRSS']} | "
                f"{memory['RssFile']} | {loads[0]:.2f} | {loads[1]:.2f} | {step_s * 1e3:.2f} |",
                flush=True,
            )
            weights.close()
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "steps", "types"])
    parser.add_argument("model", nargs="?", help="GGUF file, for steps")
    parser.add_argument("--threads", type=int, default=2, help="threads per backend (default: 2)")
    parser.add_argument("--baseline", type=Path, help="another checkout to compare with, for steps")
    parser.add_argument("--peer-python", help="Python interpreter with llama-cpp-python, for steps")
    parser.add_argument(
        "--peer-weights-as-stored",
        action="store_true",
        help="llama.cpp keeps the file's weights: repacking them can crash",
    )
    parser.add_argument("--only", default="", help="comma-separated names of steps (default: all)")
    parser.add_argument("--rows", default="1,8,32,128", help="numbers of rows (default: 1,8,32,128)")
    parser.add_argument("--types", default="", help="comma-separated GGUF encodings (default: all)")
    parser.add_argument("--shape", default="llama-138m", help="shape of the models, for types (default: llama-138m)")
    parser.add_argument("--isa", choices=ISAS, help="instruction set (default: the fastest)")
    parser.add_argument("--turns", type=int, default=7, help="timed runs per side (default: 7)")
    parser.add_argument(
        "--peak-gops", type=float, default=PEAK_GOPS, help=f"peak of one core (default: {PEAK_GOPS:.0f})"
    )
    options = parser.parse_args()
    if options.what == "steps":
        if options.model is None:
            parser.error("steps need a GGUF file")
        backends = backends_of(options.baseline, options.peer_python, options.isa, not options.peer_weights_as_stored)
        names = [name for name in options.only.split(",") if name]
        return run_in_turns(backends, options.model, options.threads, options.turns, names)
    library = native_library(options.isa)
    if isinstance(library, str):
        raise SystemExit(library)
    if options.what == "types":
        names = options.types.split(",") if options.types else ["F16", *BLOCKS, *MIXES]
        return types(library, options.shape, names, options.threads)
    encodings = [Encoding(name) for name in (options.types or "Q8_0,Q4_0").split(",")]
    return products(
        library, encodings, [int(each) for each in options.rows.split(",")], options.turns, options.peak_gops
    )


if __name__ == "__main__":
    main()
