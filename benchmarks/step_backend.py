"""One executor in a separate process for ``python -m benchmarks.native steps``: reads requests as JSON lines, writes
times.

It is started as ``python step_backend.py ENGINE MODEL THREADS [ISA]``, with a Python that has the engine: ``native``
(also of another checkout, by PYTHONPATH), ``llama.cpp``, or ``llama.cpp-as-stored``, which does not repack weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

MAX_STREAMS = 32
MAX_STREAMS_TOKENS = MAX_STREAMS * 832
"""KV capacity for the longest step, in tokens."""
Run = Callable[[], object]


class Executors:
    """The native executor. A step is built once and repeated."""

    def __init__(self, model: str, threads: int, isa: str | None) -> None:
        from lockstep.artifacts.source import open_artifact
        from lockstep.engine.loading import default_cache_dir
        from lockstep.executors.native.executor import load_executor
        from lockstep.executors.options import ExecutorOptions

        artifact = open_artifact(model)
        begin = time.perf_counter()
        options = ExecutorOptions(threads=threads, isa=isa, cache_dir=default_cache_dir())
        self._executor: Any = load_executor(artifact, options, lambda stage, share: None)
        self.load_s = time.perf_counter() - begin
        self._others = getattr(self._executor.geometry, "groups", ())[1:]  # an older checkout has no groups
        columns = MAX_STREAMS_TOKENS // 32
        num_blocks = columns + sum(
            each.num_parts * (MAX_STREAMS if each.is_state else columns) for each in self._others
        )
        self._executor.allocate(num_blocks, 1)
        content = np.zeros((1, self._executor.geometry.bytes_per_block), np.uint8)
        for block in range(1, num_blocks + 1):  # separate memory; otherwise every read hits one page of zeros
            self._executor.write_blocks([block], content)

    def step(self, streams: int, past: int, length: int) -> Run:
        from lockstep.core.step import StepPlan
        from lockstep.executors.base import StepBatch

        each = MAX_STREAMS_TOKENS // 32 // streams
        num_blocks = -(-(past + length) // 32)
        tables = tuple(tuple(range(1 + i * each, 1 + i * each + num_blocks)) for i in range(streams))
        ids, many = tuple(range(streams)), (streams,)
        plan = StepPlan(0, (), (), (), (), ids, (past,) * streams, (length,) * streams, tables, (True,) * many[0])
        if self._others:
            plan = replace(plan, other_tables=self._other_tables(streams, past, num_blocks))
        tokens = np.random.default_rng(0).integers(0, self._executor.geometry.vocab_size, streams * length)
        batch = StepBatch(plan, tokens, np.arange(1, streams + 1) * length - 1)
        return lambda: self._executor.execute(batch)

    def _other_tables(self, streams: int, past: int, num_columns: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Tables of the groups after the first one, each with blocks of its own, by stream."""
        first, by_group = 1 + MAX_STREAMS_TOKENS // 32, []
        for group in self._others:
            begin = group.first_column(past, 32)
            count = group.num_parts * (1 if group.is_state else num_columns - begin)
            blocks = np.arange(first, first + streams * count).reshape(streams, count).tolist()
            by_group.append([tuple(own) if group.is_state else (begin, *own) for own in blocks])
            first += streams * count
        return tuple(zip(*by_group, strict=True))


class LlamaCpp:
    """llama.cpp by its low-level interface: one context per shape, with flash attention and KV caches by its
    defaults."""

    def __init__(self, model: str, threads: int, *, repacks: bool) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *ignored: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        begin = time.perf_counter()
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = repacks
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), options)
        self.load_s = time.perf_counter() - begin
        self._threads = threads
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None

    def step(self, streams: int, past: int, length: int) -> Run:
        lib = self._lib
        if self._context is not None:
            lib.llama_free(self._context)
        options = lib.llama_context_default_params()
        options.n_ctx = streams * -(-(past + length + 256) // 256) * 256
        options.n_batch, options.n_ubatch, options.n_seq_max = 2048, 512, streams
        options.n_threads = options.n_threads_batch = self._threads
        options.no_perf, options.kv_unified = True, False
        self._context = lib.llama_init_from_model(self._model, options)
        for begin in range(0, past, 50):
            self._decode(streams, begin, min(50, past - begin))

        place = past

        def run() -> None:
            nonlocal place
            memory = lib.llama_get_memory(self._context)
            if not past:
                lib.llama_memory_clear(memory, False)
            elif all(lib.llama_memory_seq_rm(memory, sequence, past, -1) for sequence in range(streams)):
                place = past
            self._decode(streams, place, length)
            place += length if past else 0  # a recurrent state cannot take the step back: the next one is behind it

        return run

    def _decode(self, streams: int, past: int, length: int) -> None:
        lib, count = self._lib, streams * length
        tokens = np.random.default_rng(0).integers(0, self._vocab_size, count).tolist()
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for index, token in enumerate(tokens):
            sequence, offset = divmod(index, length)
            batch.token[index], batch.pos[index], batch.logits[index] = token, past + offset, offset == length - 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        code = lib.llama_decode(self._context, batch)
        if code:
            raise ValueError(f"llama_decode failed with {code}")
        lib.llama_synchronize(self._context)
        lib.llama_get_logits_ith(self._context, count - 1)
        lib.llama_batch_free(batch)


def memory_mb() -> dict[str, int]:
    """Memory of this process by kind, in MB, from /proc."""
    found = {}
    with open("/proc/self/status") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile"):
                found[name] = int(rest.split()[0]) // 1024
    with open("/proc/self/smaps_rollup") as file:
        found["Pss"] = next(int(line.split()[1]) // 1024 for line in file if line.startswith("Pss:"))
    return found


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not part of the protocol
    name, model, threads, *rest = sys.argv[1:]
    engine: Any
    if name.startswith("llama.cpp"):
        engine = LlamaCpp(model, int(threads), repacks=name == "llama.cpp")
    else:
        engine = Executors(model, int(threads), rest[0] if rest else None)
    out.write(json.dumps({"load_s": engine.load_s}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request == "memory":
            out.write(json.dumps(memory_mb()) + "\n")
            continue
        streams, past, length, repeats = request
        run, times = engine.step(streams, past, length), []
        run()
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        out.write(json.dumps(times) + "\n")


if __name__ == "__main__":
    main()
