"""One layer of a hybrid model: time of its step in the native executor, and of the recurrence alone.

    python -m benchmarks.recurrent                                  Qwen3.5-0.8B and LFM2.5-350M, Q8_0
    python -m benchmarks.recurrent --shapes lfm2.5-350m --isa avx2  one of them, with one instruction set

A layer is its mixer and its feed-forward. Attention has no tokens before a step here: its share of a longer context is
that of other models. ``recurrence`` is what depends on other rows and on the state: the convolution and, of a delta
net, the rates, lengths of heads and the delta rule. GB/s counts a state once read and once written. Time is the
processor time of one thread, the median of the turns, in which the steps alternate.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from lockstep.artifacts.model import Mixer, ModelConfig
from lockstep.artifacts.source import open_artifact
from lockstep.executors.kv_layout import BLOCK_TOKENS
from lockstep.executors.kv_pool import KVPool
from lockstep.executors.native.forward import Forward
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.operations import Action, Op, Program
from lockstep.executors.native.packs import load_weights
from lockstep.executors.native.products import ThreadPool
from lockstep.executors.native.program import build_program
from lockstep.executors.options import ISAS
from lockstep.executors.quantise import vector
from tools.random_models import SHAPES, write_gguf

STEPS = (("x1", 1, 1), ("x8", 8, 1), ("x32", 32, 1), ("prefill 512", 1, 512))
"""Name, sequences and tokens of each."""
VOCAB_SIZE = 512
"""Instead of the model's: the head is no part of a layer."""
RECURRENCE = (Action.RATES, Action.CONVOLVE, Action.DELTA)
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Layer:
    """A program of one layer, and the bytes of its state."""

    name: str
    config: ModelConfig
    program: Program
    state_bytes: int

    def alone(self) -> Layer:
        """Only the recurrence, and the norms that it needs: those between a convolution and a delta rule."""
        ops = self.program.ops[: self.program.final_begin]
        actions = [op.action for op in ops]
        first = min(actions.index(action) for action in RECURRENCE if action in actions)
        last = max(index for index, action in enumerate(actions) if action in RECURRENCE)
        kept = [ops[0], *ops[first : last + 1]]
        return replace(self, program=_with_body(self.program, kept))


def layers_of(library: NativeLibrary, shape_name: str, encoding: str, folder: Path) -> list[Layer]:
    """Programs of each kind of layer that a model has."""
    shape = SHAPES[shape_name]
    kinds: list[Mixer] = ["delta_net" if "delta_net" in shape.mixers else "convolution", "attention"]
    two = replace(shape, num_layers=2, mixers=tuple(kinds), vocab_size=VOCAB_SIZE)
    artifact = open_artifact(str(write_gguf(folder / f"{shape_name}.gguf", two, encoding)), cache_dir=folder)
    config = artifact.config
    weights = load_weights(artifact, library, None, None, 0, lambda stage, share: None)
    turns = [(np.ones((config.rotary_dim or config.head_dim) // 2, np.float32), 1.0)]
    found = []
    for index, kind in enumerate(kinds):
        program = build_program(
            config, weights.matrices, lambda name, shape: vector(artifact.weights[name], shape),
            artifact.weights.__contains__, turns, "f16",
        )  # fmt: skip
        ends = [i + 1 for i, op in enumerate(program.ops) if op.action is Action.PRODUCT and op.adds][1::2]
        begin, end = (1, ends[0]) if index == 0 else (ends[0], ends[1])
        program = _with_body(program, [program.ops[0], *program.ops[begin:end]])
        state_bytes = 0 if kind == "attention" else _state_bytes(program)
        found.append(Layer(f"{shape_name}, {kind}", config, program, state_bytes))
    return found


def _with_body(program: Program, body: list[Op]) -> Program:
    """The program with other operations before the final part."""
    rest, removed = program.ops[program.final_begin :], program.final_begin - len(body)
    return replace(program, ops=body + rest, final_begin=len(body), head_begin=program.head_begin - removed)


def _state_bytes(program: Program) -> int:
    """Bytes of the pieces of all states."""
    net = program.delta_net
    [convolution] = [op for op in program.ops if op.action is Action.CONVOLVE]
    matrices = 0 if net is None else net.num_value_heads * net.key_dim * net.value_dim
    return 4 * (convolution.columns * (convolution.taps - 1) + matrices)


def run_of(library: NativeLibrary, pool: ThreadPool, layer: Layer, streams: int, length: int) -> Run:
    """A step of several sequences, whose states are updated in place."""
    program = layer.program
    columns, num_parts = -(-length // BLOCK_TOKENS), program.layout.groups[-1].num_parts
    num_tables = columns * program.layout.groups[0].num_parts
    blocks = KVPool(program.layout.block_bytes, streams * (num_tables + num_parts), 0).blocks
    blocks[:] = 0  # its own memory; otherwise all reads hit one page
    tables = 1 + np.arange(streams * num_tables)
    states = 1 + len(tables) + np.arange(streams * num_parts).reshape(streams, 1, num_parts)
    begins = np.arange(streams + 1)
    plan = np.concatenate(([streams], [0] * streams, begins * length, begins * num_tables, tables)).astype(np.int32)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, streams * length)
    forward = Forward(library, pool, program, layer.config, "f16")
    both, none = np.repeat(states, 2, axis=1).astype(np.int32), np.zeros(0, np.int64)
    return lambda: forward.step(ids, plan, blocks, none, states=both)


def measure(library: NativeLibrary, layers: Sequence[Layer], turns: int) -> None:
    print(f"{library.isa}, one thread, microseconds of a step\n")
    print("| layer | step | whole | recurrence | of it | state, GB/s |")
    print("|---|---|---|---|---|---|")
    with ThreadPool(library, 1) as pool:
        for layer in layers:
            parts = [layer, layer.alone()] if layer.state_bytes else [layer]
            runs = {name: [run_of(library, pool, each, *sizes) for each in parts] for name, *sizes in STEPS}
            times: dict[str, list[list[float]]] = {name: [[] for _ in parts] for name in runs}
            for turn in range(turns + 1):
                for name, each in runs.items():
                    for run, found in zip(each, times[name], strict=True):
                        start = time.process_time()
                        run()
                        if turn:  # the first one prepares
                            found.append((time.process_time() - start) * 1e6)
            for name, streams, _ in STEPS:
                whole, *rest = (median(found) for found in times[name])
                cells = [layer.name, name, f"{whole:.0f}"]
                for alone in rest:
                    rate = 2 * streams * layer.state_bytes / alone / 1e3
                    cells += [f"{alone:.0f}", f"{alone / whole:.0%}", f"{rate:.1f}"]
                print("| " + " | ".join([*cells, *[""] * (6 - len(cells))]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3.5-0.8b,lfm2.5-350m", help="comma-separated shapes (default: both)")
    parser.add_argument("--encoding", default="Q8_0", help="encoding of the weights (default: Q8_0)")
    parser.add_argument("--isa", choices=ISAS, help="instruction set (default: the fastest)")
    parser.add_argument("--turns", type=int, default=15, help="timed runs of each step (default: 15)")
    options = parser.parse_args()
    library = native_library(options.isa)
    if isinstance(library, str):
        raise SystemExit(library)
    with tempfile.TemporaryDirectory() as folder:
        layers: list[Layer] = []
        for shape in options.shapes.split(","):
            layers += layers_of(library, shape, options.encoding, Path(folder))
        measure(library, layers, options.turns)


if __name__ == "__main__":
    main()
