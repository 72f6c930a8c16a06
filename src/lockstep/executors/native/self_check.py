"""Self-check of the native library: compares the bits of the chosen instruction set with the portable one at each load.

It takes some milliseconds. `lockstep models verify` checks a model thoroughly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.hybrids import KERNELS
from lockstep.artifacts.layout import expected_tensors
from lockstep.artifacts.model import Adapter, AdapterTarget, DeltaNet, Encoding, ModelConfig, Tensor
from lockstep.artifacts.tensors import BLOCKS
from lockstep.executors.native.adapters import PackedAdapter, pack_adapter
from lockstep.executors.native.forward import BLOCK_TOKENS, Forward
from lockstep.executors.native.library import NativeLibrary
from lockstep.executors.native.operations import Program
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.products import FLOAT_TYPES, ThreadPool, multiply, multiply_floats, quantise
from lockstep.executors.native.program import build_program
from lockstep.executors.native.weights import KINDS, pack

_FEATURES, _COLUMNS, _ROWS = 40, 512, 7
_CONFIG = ModelConfig("llama", 1, 64, 48, 4, 2, 16, 50, 256, 1e-5, 1e4, tied_embeddings=True, qk_norm=True)
_ENCODER = replace(
    _CONFIG, bidirectional=True, qk_norm=False, layer_norm=True, norm_bias=True, sum_norm=True, final_norm=False,
    gated=False, activation="gelu_erf", windows=(100,),
)  # fmt: skip
_HYBRID = replace(
    _CONFIG, num_layers=3, mixers=("delta_net", "convolution", "attention"), attention_gate=True, conv_taps=3,
    delta_net=DeltaNet(1, 2, 24, 40, 4),
)  # fmt: skip
_TOKENS = 140
"""More tokens than a segment of attention."""
_SMALL_HALVES = 0x23FF
"""Mask for random float16 bits that makes them small and positive."""


def self_check(library: NativeLibrary) -> str | None:
    """Name of the first computation whose bits differ from the portable kernels', or None."""
    portable = replace(library, isa="portable")
    for (name, found), (_, expected) in zip(_results(library), _results(portable), strict=True):
        if found != expected:
            return name
    return None


def _results(library: NativeLibrary) -> Iterator[tuple[str, bytes]]:
    """Yield the name and result of each kind of computation for fixed numbers."""
    x = _numbers(_ROWS * _COLUMNS).reshape(_ROWS, _COLUMNS) * np.float32(8)
    x[3] *= np.float32(2.0**-130)  # denormals
    rows = quantise(library, x)
    yield "the rounding of activations", rows.tobytes()
    for encoding in KINDS:
        weights = pack(library, Tensor("check", encoding, (_FEATURES, _COLUMNS), _blocks(encoding)))
        yield f"products of {encoding.value}", multiply(library, weights, rows).tobytes()
    for encoding in FLOAT_TYPES:
        stored = _floats(encoding).reshape(_FEATURES, _COLUMNS)
        yield f"products of {encoding.value}", multiply_floats(library, encoding, stored, x).tobytes()
    for storage in ("f32", "f16", "int8"):
        yield f"a forward pass with {storage} keys and values", _pass(library, _CONFIG, storage)
    yield "a forward pass with states", _pass(library, _HYBRID, "f16")
    yield "an encoder's forward pass", _pass(library, _ENCODER, "f16")
    yield "a forward pass with an adapter", _pass(library, _CONFIG, "f16", adapter_rank=5)


def _pass(library: NativeLibrary, config: ModelConfig, storage: str, adapter_rank: int = 0) -> bytes:
    """Logits of a decoder, or hidden states of an encoder.

    Args:
        adapter_rank: rank of an adapter that every second token has; 0: none.
    """
    matrices = {
        name: Matrix(Encoding.F32, *shape, _numbers(*shape).view(np.uint8).reshape(-1))
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and not name.endswith(KERNELS)
    }
    rotations = [(np.float32(1) / np.arange(1, config.head_dim // 2 + 1, dtype=np.float32), 1.0)]

    def vector(_: str, shape: int | tuple[int, int]) -> npt.NDArray[np.float32]:
        return _numbers(int(np.prod(shape))).reshape(shape)

    program = build_program(config, matrices, vector, lambda name: False, rotations, storage)
    num_blocks = -(-_TOKENS // BLOCK_TOKENS)
    num_parts = sum(group.num_parts for group in program.layout.groups)
    cache = np.zeros((num_blocks + num_parts, program.layout.block_bytes), np.uint8)
    plan = np.array([1, 0, 0, _TOKENS, 0, num_blocks, *range(1, num_blocks + 1)], np.int32)
    token_ids, rows = np.arange(_TOKENS) % config.vocab_size, np.arange(_TOKENS)
    result = np.empty((_TOKENS, config.vocab_size), np.float32)
    with ThreadPool(library, 1) as pool:
        forward = Forward(library, pool, program, config, storage)
        if config.bidirectional:
            totals = np.array([_TOKENS], np.int32)
            for stage in range(config.num_layers + 1):
                wanted = rows[: _TOKENS if stage == config.num_layers else 0]
                result = forward.step(token_ids, plan, cache, wanted, totals, stage)
        else:
            adapters = None
            if adapter_rank:
                adapter = _adapter(program, adapter_rank)  # its memory must stay until the pass is over
                forward.load_adapter(1, adapter)
                adapters = (rows % 2).astype(np.int32)
            forward.step(token_ids, plan, cache, rows[:0], states=_states(program), adapters=adapters)
            forward.logits(rows, result)
        forward.close()
    return result.tobytes()


def _states(program: Program) -> npt.NDArray[np.int32] | None:
    """Blocks of a state for one sequence, before which it is zero, if the program has states."""
    group = program.layout.groups[-1]
    if not group.is_state:
        return None
    first = 1 + -(-_TOKENS // BLOCK_TOKENS)
    blocks = np.arange(first, first + group.num_parts)
    return np.stack([np.full(group.num_parts, -1), blocks]).astype(np.int32)


def _adapter(program: Program, rank: int) -> PackedAdapter:
    """An adapter of all products of the layers."""
    targets, indices = {}, {}
    for index, (name, matrix) in enumerate(zip(program.weight_names, program.weights, strict=True)):
        if name.startswith("model.layers."):
            a, b = ((rank, matrix.columns), (matrix.features, rank))
            halves = [_numbers(shape[0] * shape[1]).astype(np.float16).reshape(shape) for shape in (a, b)]
            parts = [Tensor(name, Encoding.F16, half.shape, half) for half in halves]
            targets[name], indices[name] = AdapterTarget(parts[0], parts[1], 0.5), [index]
    return pack_adapter(Adapter("check", Path(), "", rank, 0.5, targets, 0), indices)


def _blocks(encoding: Encoding) -> npt.NDArray[np.uint8]:
    """Blocks with arbitrary codes, and scales that are small and positive."""
    num_values, num_bytes = BLOCKS[encoding]
    blocks = _bytes(_FEATURES * _COLUMNS // num_values * num_bytes).reshape(-1, num_bytes)
    for at in {Encoding.Q6_K: (208,), Encoding.Q3_K: (108,)}.get(encoding, (0, 2)):
        blocks[:, at + 1] &= np.uint8(_SMALL_HALVES >> 8)
    return blocks.reshape(_FEATURES, -1)


def _floats(encoding: Encoding) -> npt.NDArray[np.generic]:
    if encoding is Encoding.F32:
        return _numbers(_FEATURES * _COLUMNS)
    halves = _bytes(2 * _FEATURES * _COLUMNS).view(np.uint16) & np.uint16(_SMALL_HALVES)
    return halves.view(np.float16) if encoding is Encoding.F16 else halves


def _bytes(count: int) -> npt.NDArray[np.uint8]:
    """Fixed bytes without a regular pattern, which could hide errors of kernels."""
    numbers = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (numbers >> np.uint64(51)).astype(np.uint8)


def _numbers(*shape: int) -> npt.NDArray[np.float32]:
    """Fixed numbers from -1/2 to 1/2."""
    return (_bytes(math.prod(shape)).reshape(shape).astype(np.float32) - np.float32(127.5)) * np.float32(2.0**-8)
