"""Program of a model: translates a model's configuration into operations of the native library (``program.hpp``).

Differences between architectures are data: fields of `ModelConfig`, and which tensors exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.artifacts.layout import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, LM_HEAD, POSITIONS, TOKEN_TYPE, layer_norms
from lockstep.artifacts.model import ModelConfig
from lockstep.core.groups import ONE_GROUP
from lockstep.executors.kv_layout import BLOCK_TOKENS, KVLayout, Place, kv_bytes, kv_layout
from lockstep.executors.native.operations import (
    GATES,
    NONE,
    Action,
    AttentionPart,
    Buffer,
    Floats,
    Op,
    Program,
    Rotary,
)
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.recurrent import convolution, delta_net, multiply, separate_gates
from lockstep.executors.native.weights import KINDS

HEAD_DIM_UNIT, MAX_HEAD_DIM = 8, 512
"""Head sizes that native attention supports: multiples of the first, up to the second."""
NUM_STORED_LAYERS = 2
"""Layers whose keys and values an encoder stores at a time: a stage reads one layer and writes the next."""
Vector = Callable[[str, int | tuple[int, int]], Floats]
"""Function that returns a norm's weights, a bias or the kernel of a convolution by its canonical name and shape."""
Frequencies = Sequence[tuple[Floats, float]]
"""Angles per position of each pair of dimensions, and the factor of cosines and sines: one entry for all layers, and a
second entry for layers with a window if their rotation differs."""


def build_program(
    config: ModelConfig,
    matrices: Mapping[str, Matrix],
    vector: Vector,
    has: Callable[[str], bool],
    rotations: Frequencies,
    storage: str,
) -> Program:
    """Build the forward pass of a model.

    Args:
        matrices: matrices by canonical name.
        vector: reads one of the artifact's vectors.
        has: tests whether the artifact has a tensor.
        rotations: frequencies of rotations.
        storage: precision of keys and values: ``f32``, ``f16`` or ``int8``.

    Raises:
        CorruptArtifactError: a vector is missing, has the wrong size or is not finite.
    """
    layout = _encoder_layout(config, storage) if config.bidirectional else kv_layout(config, storage)
    return _Builder(config, matrices, vector, has, rotations, layout).build()


def _encoder_layout(config: ModelConfig, storage: str) -> KVLayout:
    """The layout of an encoder: layers by turns in a few places, and then what a token keeps."""
    size = kv_bytes(config.num_kv_heads, config.head_dim, storage)
    places = [Place(0, 0, layer % NUM_STORED_LAYERS * size) for layer in range(config.num_layers)]
    kept_bytes = 4 * BLOCK_TOKENS * _num_kept(config)
    return KVLayout(NUM_STORED_LAYERS * size + kept_bytes, ONE_GROUP, tuple(places), ((),) * config.num_layers)


def _num_kept(config: ModelConfig) -> int:
    return config.hidden_size + config.num_heads * config.head_dim if config.bidirectional else 0


class _Builder:
    def __init__(
        self, config: ModelConfig, matrices: Mapping[str, Matrix], vector: Vector, has: Callable[[str], bool],
        rotations: Frequencies, layout: KVLayout,
    ) -> None:  # fmt: skip
        self.config = config
        self.matrices = matrices
        self.vector = vector
        self.has = has
        self.program = Program(layout=layout, kept=_num_kept(config), delta_net=config.delta_net)
        self.state = NONE
        self._names: dict[str, int] = {}
        self._num_numbers = 0
        for frequencies, factor in rotations:
            self.program.rotaries.append(Rotary(self._add_vector(frequencies), len(frequencies), factor))

    def build(self) -> Program:
        config, program = self.config, self.program
        is_staged = config.bidirectional
        self.state = program.state = self._buffer("state", config.hidden_size, is_of_step=not is_staged)
        self._embed()
        for layer in range(config.num_layers):
            self._mixer(layer)
            if is_staged and layer == config.num_layers - 1:
                program.state = self._buffer("result", config.hidden_size, is_of_step=True)
            self._mlp(layer)
        if is_staged:
            self._end_encoder()
        else:
            self._end_decoder()
        return program

    def _embed(self) -> None:
        config, vector = self.config, NONE
        tables = [EMBEDDING, POSITIONS] if config.num_positions else [EMBEDDING]
        if config.num_token_types:
            vector = self._add_vector(self.vector(TOKEN_TYPE, config.num_token_types * config.hidden_size))
        self._add(
            Action.EMBED, self.state, factor=config.embedding_scale, vector=vector, offset=config.position_offset,
            columns=config.num_token_types,
            **self._weights(tables),
        )  # fmt: skip
        if config.embedding_norm:
            self._norm(self.state, self.state, EMBEDDING_NORM, config.hidden_size)

    def _end_decoder(self) -> None:
        config, program = self.config, self.program
        program.final_begin = len(program.ops)
        program.gathered = self._buffer("gathered", config.hidden_size)
        program.hidden = self._buffer("hidden", config.hidden_size)
        self._norm(program.gathered, program.hidden, FINAL_NORM, config.hidden_size)
        program.head_begin = len(program.ops)
        program.logits = self._buffer("logits", config.vocab_size)
        head = EMBEDDING if config.tied_embeddings else LM_HEAD
        self._product(program.hidden, [head], program.logits, divisor=config.logits_divisor)

    def _end_encoder(self) -> None:
        """The last stage ends with the hidden states. The head is applied to vectors that were pooled from them."""
        config, program = self.config, self.program
        if config.final_norm:
            self._norm(self.state, program.state, FINAL_NORM, config.hidden_size)
        program.final_begin = program.head_begin = len(program.ops)
        program.gathered = program.hidden = x = self._buffer("hidden", config.hidden_size)
        for index, layer in enumerate(config.head):
            name, is_last = f"head.{index}", index == len(config.head) - 1
            out = self._buffer("logits" if is_last else f"output of {name}", layer.size)
            if layer.activation:
                self._gate(x, [f"{name}.weight"], out, layer.activation)
            else:
                self._product(x, [f"{name}.weight"], out)
            if layer.norm:
                self._norm(out, out, f"{name}.norm", layer.size)
            x = out
        program.logits = x if config.head else NONE

    def _mixer(self, layer: int) -> None:
        """The part of a layer in which a token depends on those before it."""
        kind, prefix, norms = self.config.mixer_of(layer), f"model.layers.{layer}.", layer_norms(self.config)
        if kind == "attention":
            return self._attention(layer)
        add, last = (delta_net, "linear_attn") if kind == "delta_net" else (convolution, "conv")
        out = add(self, layer, self._normed(prefix, norms.before_attention))
        return self._to_state(out, f"{prefix}{last}.out_proj.weight", prefix, norms.after_attention)

    def _attention(self, layer: int) -> None:
        config, prefix, norms = self.config, f"model.layers.{layer}.", layer_norms(self.config)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        own = f"{prefix}self_attn."
        together = self._buffer("queries, keys and values", queries + 2 * keys, is_of_step=not config.bidirectional)
        mixed = self._buffer("attended", queries, is_of_step=True)
        before = norms.before_attention if layer or config.first_norm else None
        projected = together
        if config.attention_gate:
            projected = self._buffer("queries, gates, keys and values", 2 * (queries + keys), is_of_step=True)
        self._product(self._normed(prefix, before), [f"{own}{each}_proj.weight" for each in "qkv"], projected)
        if config.attention_gate:
            separate_gates(self, projected, together, 2 * keys)
        of_heads: dict[str, int] = {}
        if config.qk_norm_whole:
            self._norm(together, together, f"{own}q_norm", queries)
            self._norm(together, together, f"{own}k_norm", keys, at=queries)
        elif config.qk_norm:
            each_head = [self._norm_weights(f"{own}{each}_norm", config.head_dim) for each in "qk"]
            of_heads = {"vector": self._add_vector(np.concatenate(each_head)), "num_norms": 2}
        scale = 1.0 / math.sqrt(config.head_dim) if config.attention_scale is None else config.attention_scale
        window = config.windows[layer] if config.windows else 0
        fields: dict[str, float] = {
            "place": self._place(layer), "window": window, "rotary": self._rotary(layer), "scale": scale,
            "columns": config.head_dim, "kv_heads": config.num_kv_heads, "epsilon": config.rms_norm_eps, **of_heads,
        }  # fmt: skip
        if config.bidirectional:
            size = config.hidden_size
            self._add(Action.ATTENTION, NONE, in_=together, part=AttentionPart.STORE, **fields)
            self._add(Action.SAVE, NONE, in_=self.state, columns=size)
            self._add(Action.SAVE, NONE, in_=together, out_at=size, columns=queries)
            self._add(Action.ATTENTION, mixed, in_at=size, part=AttentionPart.ATTEND, **fields)
            self._add(Action.LOAD, self.state, columns=size)
        else:
            self._add(Action.ATTENTION, mixed, in_=together, **fields)
        if config.attention_gate:
            size = config.head_dim
            multiply(self, projected, mixed, size, at=size, function="sigmoid", heads=config.num_heads, stride=2 * size)
        self._to_state(mixed, f"{own}o_proj.weight", prefix, norms.after_attention)

    def _place(self, layer: int) -> int:
        """Index of the place of the keys and values that a layer reads."""
        place = self.program.layout.layers[self.config.kv_owners[layer] if self.config.kv_owners else layer]
        assert place is not None, "an owner stores keys and values"
        self.program.places.append(place)
        return len(self.program.places) - 1

    def _add_places(self, layer: int) -> int:
        """Index of the place of the first piece of a layer's state. The others follow it."""
        self.program.places += self.program.layout.states[layer]
        return len(self.program.places) - len(self.program.layout.states[layer])

    def _mlp(self, layer: int) -> None:
        config, prefix, norms = self.config, f"model.layers.{layer}.", layer_norms(self.config)
        gate, up, down = (f"{prefix}mlp.{each}_proj.weight" for each in ("gate", "up", "down"))
        is_packed = self.matrices[down].encoding in KINDS
        gated = self._buffer(f"gated{' groups' * is_packed}", config.intermediate_size, is_groups=is_packed)
        normed = self._normed(prefix, norms.before_mlp)
        self._gate(normed, [gate, up] if config.gated else [up], gated, config.activation)
        self._to_state(gated, down, prefix, norms.after_mlp)

    def _gate(self, x: int, names: list[str], out: int, activation: str) -> None:
        operands, bias = self._operands(x, names), self._biases(names)
        self._add(Action.GATE, out, function=GATES[activation], vector=bias, **operands, **self._weights(names))

    def _normed(self, prefix: str, name: str | None) -> int:
        """The state as input of the next products, normalised if the model does so."""
        if name is None:
            return self.state
        normed = self._buffer("normed", self.config.hidden_size)
        self._norm(self.state, normed, prefix + name, self.config.hidden_size)
        return normed

    def _to_state(self, x: int, weight: str, prefix: str, norm: str | None) -> None:
        """Add a product to the state, after normalising it if the model does so, or normalise the sum."""
        state, factor, size = self.state, self.config.residual_scale, self.config.hidden_size
        if norm is None or self.config.sum_norm:
            self._product(x, [weight], state, adds=True, factor=factor)
            if norm is not None:
                is_last = self.program.state != state and not self.config.final_norm
                self._norm(state, self.program.state if is_last else state, prefix + norm, size)
            return
        added = self._buffer("added", size)
        self._product(x, [weight], added)
        self._norm(added, added, prefix + norm, size)
        self._add(Action.ADD, state, in_=added, columns=size, factor=factor)

    def _product(
        self, x: int, names: list[str], out: int, *, adds: bool = False, factor: float = 1.0, divisor: float = 1.0
    ) -> None:
        """Products of several weights side by side, with their biases if the artifact has any."""
        bias, operands, weights = self._biases(names), self._operands(x, names), self._weights(names)
        self._add(Action.PRODUCT, out, vector=bias, adds=adds, factor=factor, divisor=divisor, **operands, **weights)

    def _biases(self, names: list[str]) -> int:
        """The biases of products side by side, with zeros for those that the artifact does not have."""
        biases = [f"{name.removesuffix('weight')}bias" for name in names]
        if not any(self.has(each) for each in biases):
            return NONE
        sizes = [self.matrices[name].features for name in names]
        parts = [
            self.vector(each, size) if self.has(each) else np.zeros(size, np.float32)
            for each, size in zip(biases, sizes, strict=True)
        ]
        return self._add_vector(np.concatenate(parts))

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
        weights = self._norm_weights(name, size)
        is_centred, epsilon = self.config.layer_norm, self.config.rms_norm_eps
        if is_centred:
            bias = self.vector(f"{name}.bias", size) if self.config.norm_bias else np.zeros(size, np.float32)
            weights = np.concatenate([weights, bias])
        self._add(
            Action.NORM, out, in_=x, in_at=at, out_at=at, columns=size, vector=self._add_vector(weights),
            epsilon=epsilon, centred=is_centred,
        )  # fmt: skip

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
        self.program.weight_names += names
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
