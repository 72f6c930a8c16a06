"""Program of a model: translates a model's configuration into operations of the native library (``program.hpp``).

Differences between architectures are data: fields of `ModelConfig`, and which tensors exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.layout import EMBEDDING, LM_HEAD, layer_norms
from lockstep.artifacts.model import ModelConfig
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.weights import KINDS

Floats = npt.NDArray[np.float32]
NONE = -1
HEAD_DIM_UNIT, MAX_HEAD_DIM = 8, 512
"""Head sizes that native attention supports: multiples of the first, up to the second."""


class Action(IntEnum):
    """Operations, which ``program.hpp`` describes."""

    EMBED, NORM, QUANTISE, PRODUCT, GATE, ADD, ATTENTION = range(7)


GATES = {"silu": 0, "gelu_tanh": 1}


class Op(NamedTuple):
    """One operation, with the fields of ``program.hpp`` in its order."""

    action: Action
    in_: int = NONE
    in_groups: int = NONE
    out: int = NONE
    in_at: int = 0
    out_at: int = 0
    columns: int = 0
    first_weight: int = 0
    num_weights: int = 0
    vector: int = NONE
    layer: int = 0
    window: int = 0
    rotary: int = NONE
    adds: bool = False
    function: int = 0
    epsilon: float = 0.0
    factor: float = 1.0
    divisor: float = 1.0
    scale: float = 1.0


class Buffer(NamedTuple):
    """Memory for one row of each token."""

    columns: int
    is_groups: bool
    """True for quantised values in groups of 32; else floats."""
    is_of_step: bool
    """True if all rows of a step are kept; else only the rows that are computed together."""


class Rotary(NamedTuple):
    """A rotation of heads."""

    vector: int
    """Index of its first frequency."""
    num_pairs: int
    factor: float
    """Factor of cosines and sines."""


@dataclass(slots=True)
class Program:
    """The operations of a model and their data. Buffers and weights are identified by their index in these lists."""

    ops: list[Op] = field(default_factory=list)
    final_begin: int = 0
    """Index of the first operation after the last layer."""
    head_begin: int = 0
    """Index of the first operation from hidden states to logits."""
    weights: list[Matrix] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    vectors: list[Floats] = field(default_factory=list)
    """Norms, biases and frequencies, which the program stores one after the other."""
    rotaries: list[Rotary] = field(default_factory=list)
    state: int = NONE
    gathered: int = NONE
    hidden: int = NONE
    logits: int = NONE


Vector = Callable[[str, int], Floats]
"""Function that returns a norm's weights or a bias by its canonical name and size."""
Frequencies = Sequence[tuple[Floats, float]]
"""Angles per position of each pair of dimensions, and the factor of cosines and sines: one entry for all layers, and a
second entry for layers with a window if their rotation differs."""


def build_program(
    config: ModelConfig,
    matrices: Mapping[str, Matrix],
    vector: Vector,
    has: Callable[[str], bool],
    rotations: Frequencies,
) -> Program:
    """Build the forward pass of a model.

    Args:
        matrices: matrices by canonical name.
        vector: reads one of the artifact's vectors.
        has: tests whether the artifact has a tensor.
        rotations: frequencies of rotations.

    Raises:
        CorruptArtifactError: a vector is missing, has the wrong size or is not finite.
    """
    return _Builder(config, matrices, vector, has, rotations).build()


class _Builder:
    def __init__(
        self, config: ModelConfig, matrices: Mapping[str, Matrix], vector: Vector, has: Callable[[str], bool],
        rotations: Frequencies,
    ) -> None:  # fmt: skip
        self.config = config
        self.matrices = matrices
        self.vector = vector
        self.has = has
        self.program = Program()
        self._names: dict[str, int] = {}
        self._num_numbers = 0
        for frequencies, factor in rotations:
            self.program.rotaries.append(Rotary(self._add_vector(frequencies), len(frequencies), factor))

    def build(self) -> Program:
        config, program = self.config, self.program
        program.state = self._buffer("state", config.hidden_size, is_of_step=True)
        self._add(Action.EMBED, program.state, factor=config.embedding_scale, **self._weights([EMBEDDING]))
        for layer in range(config.num_layers):
            self._attention(layer)
            self._mlp(layer)
        program.final_begin = len(program.ops)
        program.gathered = self._buffer("gathered", config.hidden_size)
        program.hidden = self._buffer("hidden", config.hidden_size)
        self._norm(program.gathered, program.hidden, "model.norm", config.hidden_size)
        program.head_begin = len(program.ops)
        program.logits = self._buffer("logits", config.vocab_size)
        head = EMBEDDING if config.tied_embeddings else LM_HEAD
        self._product(program.hidden, [head], program.logits, divisor=config.logits_divisor)
        return program

    def _attention(self, layer: int) -> None:
        config, prefix, norms = self.config, f"model.layers.{layer}.", layer_norms(self.config)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        own = f"{prefix}self_attn."
        together = self._buffer("queries, keys and values", queries + 2 * keys, is_of_step=True)
        mixed = self._buffer("attended", queries, is_of_step=True)
        self._product(
            self._normed(prefix, norms.before_attention), [f"{own}{each}_proj.weight" for each in "qkv"], together
        )
        norm = NONE
        if config.qk_norm_whole:
            self._norm(together, together, f"{own}q_norm", queries)
            self._norm(together, together, f"{own}k_norm", keys, at=queries)
        elif config.qk_norm:
            each_head = [self._norm_weights(f"{own}{each}_norm", config.head_dim) for each in "qk"]
            norm = self._add_vector(np.concatenate(each_head))
        scale = 1.0 / math.sqrt(config.head_dim) if config.attention_scale is None else config.attention_scale
        window = config.windows[layer] if config.windows else 0
        self._add(
            Action.ATTENTION, mixed, in_=together, vector=norm, layer=layer, window=window,
            rotary=self._rotary(layer), scale=scale, epsilon=config.rms_norm_eps,
        )  # fmt: skip
        self._to_state(mixed, f"{own}o_proj.weight", prefix, norms.after_attention)

    def _mlp(self, layer: int) -> None:
        config, prefix, norms = self.config, f"model.layers.{layer}.", layer_norms(self.config)
        gate, up, down = (f"{prefix}mlp.{each}_proj.weight" for each in ("gate", "up", "down"))
        is_packed = self.matrices[down].encoding in KINDS
        gated = self._buffer(f"gated{' groups' * is_packed}", config.intermediate_size, is_groups=is_packed)
        operands = self._operands(self._normed(prefix, norms.before_mlp), [gate, up])
        self._add(Action.GATE, gated, function=GATES[config.activation], **operands, **self._weights([gate, up]))
        self._to_state(gated, down, prefix, norms.after_mlp)

    def _normed(self, prefix: str, name: str | None) -> int:
        """The state as input of the next products, normalised if the model does so."""
        if name is None:
            return self.program.state
        normed = self._buffer("normed", self.config.hidden_size)
        self._norm(self.program.state, normed, prefix + name, self.config.hidden_size)
        return normed

    def _to_state(self, x: int, weight: str, prefix: str, norm: str | None) -> None:
        """Add a product to the state, after normalising it if the model does so."""
        state, factor, size = self.program.state, self.config.residual_scale, self.config.hidden_size
        if norm is None:
            self._product(x, [weight], state, adds=True, factor=factor)
            return
        added = self._buffer("added", size)
        self._product(x, [weight], added)
        self._norm(added, added, prefix + norm, size)
        self._add(Action.ADD, state, in_=added, columns=size, factor=factor)

    def _product(
        self, x: int, names: list[str], out: int, *, adds: bool = False, factor: float = 1.0, divisor: float = 1.0
    ) -> None:
        """Products of several weights side by side, with their biases if the artifact has any."""
        biases = [f"{name.removesuffix('weight')}bias" for name in names]
        bias = NONE
        if any(self.has(each) for each in biases):
            sizes = [self.matrices[name].features for name in names]
            parts = [
                self.vector(each, size) if self.has(each) else np.zeros(size, np.float32)
                for each, size in zip(biases, sizes, strict=True)
            ]
            bias = self._add_vector(np.concatenate(parts))
        operands, weights = self._operands(x, names), self._weights(names)
        self._add(Action.PRODUCT, out, vector=bias, adds=adds, factor=factor, divisor=divisor, **operands, **weights)

    def _operands(self, x: int, names: list[str]) -> dict[str, int]:
        """The input of products in the form of their weights: quantised for panels, else as floats."""
        if self.program.buffers[x].is_groups:
            return {"in_groups": x}
        packed = [name for name in names if self.matrices[name].encoding in KINDS]
        operands = {"in_": x} if len(packed) < len(names) else {}
        if packed:
            columns = self.program.buffers[x].columns
            operands["in_groups"] = self._buffer(f"groups of {columns}", columns, is_groups=True)
            self._add(Action.QUANTISE, operands["in_groups"], in_=x, columns=columns)
        return operands

    def _norm(self, x: int, out: int, name: str, size: int, at: int = 0) -> None:
        weights = self._add_vector(self._norm_weights(name, size))
        epsilon = self.config.rms_norm_eps
        self._add(Action.NORM, out, in_=x, in_at=at, out_at=at, columns=size, vector=weights, epsilon=epsilon)

    def _norm_weights(self, name: str, size: int) -> Floats:
        return self.vector(f"{name}.weight", size) + np.float32(self.config.norm_offset)

    def _rotary(self, layer: int) -> int:
        config = self.config
        if layer in config.unrotated_layers:
            return NONE
        return int(config.local_rope_theta is not None and bool(config.windows) and config.windows[layer] > 0)

    def _weights(self, names: list[str]) -> dict[str, int]:
        first = len(self.program.weights)
        self.program.weights += [self.matrices[name] for name in names]
        return {"first_weight": first, "num_weights": len(names)}

    def _buffer(self, name: str, columns: int, *, is_groups: bool = False, is_of_step: bool = False) -> int:
        """The buffer with that name, created on first use."""
        if name not in self._names:
            self._names[name] = len(self.program.buffers)
            self.program.buffers.append(Buffer(columns, is_groups, is_of_step))
        return self._names[name]

    def _add_vector(self, numbers: Floats) -> int:
        begin = self._num_numbers
        self.program.vectors.append(numbers)
        self._num_numbers += len(numbers)
        return begin

    def _add(self, action: Action, out: int, **fields: float) -> None:
        self.program.ops.append(Op(action, out=out, **fields))  # type: ignore[arg-type]
