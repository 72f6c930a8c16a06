"""One shape in several precisions, step by step, beside llama.cpp on the same files: ratios, memory, bytes on disk.

    python -m benchmarks.precisions Q8_0 Q4_K Q4_K_M                       ours alone
    python -m benchmarks.precisions Q8_0 Q4_K --llama-cpp                  needs llama-cpp-python
    python -m benchmarks.precisions BF16 BF16:int8 BF16:int4 --shape llama-138m

Time is the processor time of one thread, the least of some repeats, taken in turns: what other programs do on a busy
machine then costs neither side anything but caches. Each model runs in a process of its own for its memory (private
plus mapped from the cached graph, after one step), and all in one for their speed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.executor import step
from lockstep.artifacts.source import open_artifact
from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.options import ExecutorOptions
from tools.random_models import FLOATS, SHAPES, write_gguf

PAST, _FILL = 128, 32
WORK: dict[str, tuple[int, int, int]] = {"prefill 512": (1, 0, 512)} | {f"x{n}": (n, PAST, 1) for n in (1, 8, 32)}
"""Name: sequences, tokens already there, tokens per sequence."""
_BLOCKS_PER_SEQ = 17
Run = Callable[[], object]
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = _LOG(lambda level, text, data: None)
"""llama.cpp's log goes nowhere."""


def load(path: Path, quantize: str | None, cache_dir: Path) -> OpenVINOExecutor:
    options = ExecutorOptions(threads=1, quantize=quantize, cache_dir=cache_dir)
    executor = load_executor(open_artifact(str(path), cache_dir=cache_dir), options)
    executor.allocate(32 * _BLOCKS_PER_SEQ, 0)
    return executor


def our_runs(executor: OpenVINOExecutor) -> dict[str, Run]:
    size, vocabulary = executor.geometry.block_size, executor.geometry.vocab_size
    return {
        name: partial(executor.execute, step(seqs, past, length, _BLOCKS_PER_SEQ, size, vocabulary))
        for name, (seqs, past, length) in WORK.items()
    }


class LlamaCpp:
    """The same steps through llama_decode, in one unified KV cache, on one thread."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.lib.llama_log_set(_SILENT, ctypes.c_void_p(0))
        model_parameters = self.lib.llama_model_default_params()
        # Its AMX repacking crashes on batches of several sequences (llama-cpp-python 0.3.36).
        model_parameters.use_extra_bufts = False
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), model_parameters)
        parameters = self.lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = 32 * 256, 2048, 512, 32
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.kv_unified, parameters.no_perf = True, True
        self.context = self.lib.llama_init_from_model(self.model, parameters)
        self.num_filled, self.next = 0, 0
        self.vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def runs(self) -> dict[str, Run]:
        return {name: partial(self.run, *work) for name, work in WORK.items()}

    def run(self, seqs: int, past: int, length: int) -> float:
        """One step, whose processor time is returned; contexts are filled anew only when their number changes."""
        if length > 1 or seqs != self.num_filled:
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
            for start in range(0, past, _FILL):
                self._decode(seqs, start, _FILL)
            self.num_filled, self.next = seqs if length == 1 else 0, past
        seconds = self._decode(seqs, self.next, length)
        self.next += length
        return seconds

    def _decode(self, seqs: int, past: int, length: int) -> float:
        batch = self.lib.llama_batch_init(seqs * length, 0, 1)
        batch.n_tokens = seqs * length
        ids = np.random.default_rng(past).integers(0, self.vocabulary, seqs * length).tolist()
        for index, token in enumerate(ids):
            position = index % length
            batch.token[index], batch.pos[index] = token, past + position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, index // length
            batch.logits[index] = position == length - 1
        begin = time.process_time()
        assert self.lib.llama_decode(self.context, batch) == 0
        self.lib.llama_synchronize(self.context)
        seconds = time.process_time() - begin
        self.lib.llama_batch_free(batch)
        return seconds


def measure(runs: dict[str, dict[str, Run]], repeats: int) -> dict[str, dict[str, float]]:
    """Least processor time of each work on each candidate, candidates in turns."""
    least: dict[str, dict[str, float]] = {name: {} for name in runs}
    for work in WORK:
        for turn in range(repeats + 1):
            for name, candidate in runs.items():
                begin = time.process_time()
                own = candidate[work]()
                seconds = own if isinstance(own, float) else time.process_time() - begin
                if turn:
                    least[name][work] = min(seconds, least[name].get(work, seconds))
    return least


def memory_mb(path: Path, quantize: str | None, cache_dir: Path) -> dict[str, float]:
    """Resident memory of a process that loaded the model from its cached graph and made one step."""
    arguments = [sys.executable, "-m", "benchmarks.precisions", "--memory-of", str(path), "--cache-dir", str(cache_dir)]
    arguments += [] if quantize is None else ["--quantize", quantize]
    for _ in range(2):  # the first builds the graph and stores it
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def print_memory(path: Path, quantize: str | None, cache_dir: Path) -> None:
    """What loading adds to a process that has imported everything."""
    before = _resident_mb()
    executor = load(path, quantize, cache_dir)
    executor.allocate(_BLOCKS_PER_SEQ, 0)
    our_runs(executor)["prefill 512"]()
    after = _resident_mb()
    print(json.dumps({key: round(after[key] - before[key]) for key in after}))


def _resident_mb() -> dict[str, float]:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"private": int(lines["RssAnon"].split()[0]) / 1e3, "mapped": int(lines["RssFile"].split()[0]) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("precisions", nargs="*", help="ENCODING or ENCODING:int8|int4; the first is the base of ratios")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-138m")
    parser.add_argument("--llama-cpp", action="store_true", help="the same files through llama-cpp-python")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="memory and file sizes instead of speed")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantize", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of is not None:
        print_memory(args.memory_of, args.quantize, args.cache_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


def compare(args: argparse.Namespace, folder: Path) -> None:
    runs: dict[str, dict[str, Run]] = {}
    for precision in args.precisions:
        encoding, _, quantize = precision.partition(":")
        path = folder / f"{encoding}.gguf"
        if not path.exists():
            write_gguf(path, args.shape, encoding)
        if args.memory:
            print(f"{precision}: file {path.stat().st_size / 1e6:.0f} MB, {memory_mb(path, quantize or None, folder)}")
            continue
        runs[precision] = our_runs(load(path, quantize or None, folder))
        if args.llama_cpp and not quantize and encoding not in FLOATS:
            runs[f"{precision} llama.cpp"] = LlamaCpp(path).runs()
    if not runs:
        return
    least = measure(runs, args.repeats)
    base = least[args.precisions[0]]
    for name, times in least.items():
        figures = [
            f"{work} {WORK[work][0] * WORK[work][2] / seconds:6.0f} tok/s ({base[work] / seconds:.2f})"
            for work, seconds in times.items()
        ]
        print(f"{name:20} {'   '.join(figures)}")


if __name__ == "__main__":
    main()
