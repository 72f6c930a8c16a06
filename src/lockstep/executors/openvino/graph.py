"""A dense decoder from its configuration and weights: a stateful graph around scaled dot product attention.

The operator patterns are the ones that OpenVINO's CPU plugin fuses (RMS norm, rotary embedding, compressed weights)
and that the paged transformation (paged.py) recognises; change a pattern and the profile changes, silently. What
differs between architectures, the scaling of rotary embeddings included, comes from ``ModelConfig`` and from which
tensors exist, never from a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.layout import layer_norms
from lockstep.artifacts.model import ModelConfig, Tensor, Weights
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.executors.openvino.precision import Precision, precision_of
from lockstep.executors.openvino.runtime import Model, Node, op, ov
from lockstep.executors.openvino.weights import GroupSums, matrix, product, stacked
from lockstep.executors.quantise import check_tensor, vector
from lockstep.executors.rotary import inverse_frequencies, local_frequencies, rotary_dim

MASKED = np.float32(-65504)
BUILDER_VERSION = "3"
"""Raised whenever the same artifact and options would build another graph."""


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    progress: Callable[[float], None] = lambda fraction: None,
    quantize: str | None = None,
) -> Model:
    """The stateful ``ov.Model``: inputs input_ids, attention_mask, position_ids [B, S] and beam_idx [B]; output logits.

    Args:
        progress: told the share of layers built.
        quantize: ``int8`` or ``int4``: what float matrices are made of.

    Raises:
        UnsupportedArtifactError: an architecture or rope scaling that is not known.
        CorruptArtifactError: a tensor is absent, of the wrong size or not finite.
    """
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedArtifactError(f"architecture {config.architecture!r} is not known; known are: {known}")
    return _DecoderBuilder(config, weights, quantize).build(progress)


def attention_name(layer: int) -> str:
    """Beginning of the names of a layer's attention.

    Nodes with these endings are what an operator that normalises and rotates by itself is made of: ``qkv`` has queries,
    keys and values, or ``q``, ``k`` and ``v`` have them where they are no single product; ``q_norm`` and ``k_norm`` are
    the weights of a norm of each head.
    """
    return f"model.layers.{layer}.self_attn."


def rotary_name(config: ModelConfig, layer: int) -> str | None:
    """Beginning of the names of the nodes that rotate a layer, ``.cos`` and ``.sin`` of each pair; None: none do."""
    if layer in config.unrotated_layers:
        return None
    is_local = config.local_rope_theta is not None and config.windows and config.windows[layer]
    return "local_rotary" if is_local else "rotary"


class _DecoderBuilder:
    """Holds what the layers share while one graph is built."""

    def __init__(self, config: ModelConfig, weights: Weights, quantize: str | None) -> None:
        self.config = config
        self.weights = weights
        self.quantize = quantize
        self.group_sums = GroupSums()
        self.sinks: list[Node] = []
        self.ids = _parameter("input_ids", [-1, -1], np.int64)
        self.mask = _parameter("attention_mask", [-1, -1], np.int64)
        self.positions = _parameter("position_ids", [-1, -1], np.int64)
        self.beams = _parameter("beam_idx", [-1], np.int32)
        factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
        self.rotary = {"rotary": self._rotary_tables("rotary", inverse_frequencies(config), factor)}
        if config.local_rope_theta is not None:
            self.rotary["local_rotary"] = self._rotary_tables("local_rotary", local_frequencies(config), 1.0)
        self.causal_mask = self._causal_mask()
        batch = op.gather(op.shape_of(self.ids), _ints(0), _int(0))
        self.empty_past_shape = op.concat([batch, _ints(config.num_kv_heads, 0, config.head_dim)], 0)

    def build(self, progress: Callable[[float], None]) -> Model:
        config = self.config
        embeddings = self._matrix("model.embed_tokens", (config.vocab_size, config.hidden_size))
        hidden = _scaled(op.gather(embeddings, self.ids, _int(0)), config.embedding_scale)
        for layer in range(config.num_layers):
            hidden = self._layer(hidden, layer)
            progress((layer + 1) / config.num_layers)
        hidden = self._norm(hidden, "model.norm", config.hidden_size)
        if config.tied_embeddings:
            head = embeddings
        else:
            head = self._matrix("lm_head", (config.vocab_size, config.hidden_size))
        logits = op.matmul(hidden, head, False, True)
        if config.logits_divisor != 1.0:
            logits = op.divide(logits, _float(config.logits_divisor))
        logits = op.result(logits, name="logits")
        logits.output(0).tensor.set_names({"logits"})
        return ov.Model([logits], self.sinks, [self.ids, self.mask, self.positions, self.beams], "decoder")

    def _layer(self, hidden: Node, layer: int) -> Node:
        config, prefix = self.config, f"model.layers.{layer}."
        norms = layer_norms(config)

        def norm(x: Node, name: str | None) -> Node:
            return x if name is None else self._norm(x, prefix + name, config.hidden_size)

        added = self._attention(norm(hidden, norms.before_attention), layer, attention_name(layer))
        hidden = op.add(hidden, _scaled(norm(added, norms.after_attention), config.residual_scale))
        added = self._mlp(norm(hidden, norms.before_mlp), prefix + "mlp.")
        return op.add(hidden, _scaled(norm(added, norms.after_mlp), config.residual_scale))

    def _mlp(self, x: Node, prefix: str) -> Node:
        inner, outer = self.config.intermediate_size, self.config.hidden_size
        gate = self._linear(x, {prefix + "gate_proj": inner}, outer)
        gate = op.swish(gate) if self.config.activation == "silu" else op.gelu(gate, "TANH")
        up = self._linear(x, {prefix + "up_proj": inner}, outer)
        return self._linear(op.multiply(gate, up), {prefix + "down_proj": outer}, inner)

    def _attention(self, x: Node, layer: int, prefix: str) -> Node:
        config = self.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        query, key, value = self._projected(x, prefix)
        query = self._heads(query, prefix + "q_norm", heads, layer)
        key = self._heads(key, prefix + "k_norm", kv_heads, layer)
        value = self._split_heads(value, kv_heads)
        keys = self._share_heads(self._remember(key, layer, "key"))
        values = self._share_heads(self._remember(value, layer, "value"))
        scale = () if config.attention_scale is None else (_float(config.attention_scale),)
        mixed = op.scaled_dot_product_attention(query, keys, values, self.causal_mask, *scale, causal=False)
        mixed = op.reshape(op.transpose(mixed, _ints(0, 2, 1, 3)), _ints(0, 0, heads * size), True)
        return self._linear(mixed, {prefix + "o_proj": config.hidden_size}, heads * size)

    def _projected(self, x: Node, prefix: str) -> list[Node]:
        """Queries, keys and values [B, S, heads * head_dim], named; of one product where they are stored alike."""
        config = self.config
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        features = {f"{prefix}{each}_proj": count * config.head_dim for each, count in heads.items()}
        stored = {(self._tensor(f"{name}.weight").encoding, f"{name}.bias" in self.weights) for name in features}
        if len(stored) == 1 and not config.qk_norm_whole:
            together = self._linear(x, features, config.hidden_size)
            together.set_friendly_name(f"{prefix}qkv")
            return list(op.variadic_split(together, _int(2), _ints(*features.values())).outputs())
        projected = []
        for each, (name, size) in zip(heads, features.items(), strict=True):
            y = self._linear(x, {name: size}, config.hidden_size)
            if config.qk_norm_whole and each != "v":
                y = self._norm(y, f"{prefix}{each}_norm", size)
            y.set_friendly_name(prefix + each)
            projected.append(y)
        return projected

    def _heads(self, x: Node, name: str, heads: int, layer: int) -> Node:
        """[B, heads, S, head_dim], rotated, and before that normalised where the model does that for each head."""
        x = self._split_heads(x, heads)
        if self.config.qk_norm and not self.config.qk_norm_whole:
            x = self._norm(x, name, self.config.head_dim)
        return self._rotate(x, layer)

    def _linear(self, x: Node, features: Mapping[str, int], in_features: int) -> Node:
        """x @ W.T, plus the bias where the artifact has one; of several matrices stored alike, side by side."""
        tensors = [self._tensor(f"{name}.weight") for name in features]
        for tensor, out_features in zip(tensors, features.values(), strict=True):
            check_tensor(tensor, (out_features, in_features))
        try:
            y = self._product(x, stacked(tensors))
        except CorruptArtifactError:
            for tensor in tensors:
                self._product(x, tensor)  # the one that is corrupt is named
            raise
        biased = [(name, size) for name, size in features.items() if f"{name}.bias" in self.weights]
        if biased:
            biases = [vector(self._tensor(f"{name}.bias"), size) for name, size in biased]
            return op.add(y, op.constant(np.concatenate(biases).reshape(1, 1, -1)))
        for name in features:
            if self.config.attention_bias and name.endswith(("q_proj", "k_proj", "v_proj")):
                raise CorruptArtifactError(
                    f"tensor {name}.bias is missing; the configuration declares attention biases"
                )
        return y

    def _product(self, x: Node, tensor: Tensor) -> Node:
        rows, columns = tensor.shape
        return product(x, tensor, (rows, columns), self._precision(tensor), self.group_sums)

    def _norm(self, x: Node, name: str, size: int) -> Node:
        """RMS norm over the last axis."""
        weight = vector(self._tensor(f"{name}.weight"), size) + np.float32(self.config.norm_offset)
        mean = op.reduce_mean(op.power(x, _float(2)), _ints(-1), True)
        scale = op.divide(_float(1), op.sqrt(op.add(mean, _float(self.config.rms_norm_eps))))
        rank = len(x.get_output_partial_shape(0))
        constant = op.constant(weight.reshape((1,) * (rank - 1) + (size,)), name=name)
        return op.multiply(op.multiply(x, scale), constant)

    def _split_heads(self, x: Node, heads: int) -> Node:
        """[B, S, heads * size] -> [B, heads, S, size]."""
        return op.transpose(op.reshape(x, _ints(0, 0, heads, self.config.head_dim), True), _ints(0, 2, 1, 3))

    def _share_heads(self, x: Node) -> Node:
        """Repeat each key or value head for the query heads of its group."""
        config = self.config
        if config.num_heads == config.num_kv_heads:
            return x
        shape = op.shape_of(x)
        target = op.concat(
            [
                op.gather(shape, _ints(0, 1), _int(0)),
                _ints(config.num_heads // config.num_kv_heads),
                op.gather(shape, _ints(2, 3), _int(0)),
            ],
            0,
        )
        repeated = op.broadcast(op.unsqueeze(x, _int(2)), target, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, _ints(0, config.num_heads, -1, config.head_dim), True)

    def _remember(self, x: Node, layer: int, kind: str) -> Node:
        """Append to the layer's state; the paged transformation replaces the state by KV blocks."""
        info = ov.op.util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, self.config.num_kv_heads, -1, self.config.head_dim])
        info.data_type = ov.Type.f32
        info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = ov.op.util.Variable(info)
        stored = op.read_value(op.broadcast(_float(0), self.empty_past_shape), variable)
        together = op.concat([op.gather(stored, self.beams, _int(0)), x], 2)
        self.sinks.append(op.assign(together, variable))
        return together

    def _rotary_tables(self, name: str, frequencies: npt.NDArray[np.float32], factor: float) -> tuple[Node, Node]:
        """Cosines and sines [B, 1, S, rotary_dim] of this step's positions, times the factor; a half has the name."""
        constant = op.constant(frequencies.reshape(1, 1, -1))
        angles = op.multiply(op.convert(op.unsqueeze(self.positions, _int(2)), np.float32), constant)
        cos, sin = _scaled(op.cos(angles), factor), _scaled(op.sin(angles), factor)
        cos.set_friendly_name(f"{name}.cos")
        sin.set_friendly_name(f"{name}.sin")
        return op.unsqueeze(op.concat([cos, cos], -1), _int(1)), op.unsqueeze(op.concat([sin, sin], -1), _int(1))

    def _rotate(self, x: Node, layer: int) -> Node:
        """Rotate pairs (i, i + rotary_dim / 2): GPT-NeoX order, the one of Hugging Face checkpoints."""
        config = self.config
        name = rotary_name(config, layer)
        if name is None:
            return x
        cos, sin = self.rotary[name]
        size = rotary_dim(config)
        part = x if size == config.head_dim else _columns(x, 0, size)
        turned = op.concat([op.multiply(_columns(part, size // 2, size), _float(-1)), _columns(part, 0, size // 2)], -1)
        rotated = op.add(op.multiply(part, cos), op.multiply(turned, sin))
        return rotated if size == config.head_dim else op.concat([rotated, _columns(x, size, config.head_dim)], -1)

    def _causal_mask(self) -> Node:
        """[1, 1, S, total]: 0 where a query may look, a large negative number elsewhere."""
        total = op.squeeze(op.gather(op.shape_of(self.mask), _ints(1), _int(0)), _int(0))
        step = op.squeeze(op.gather(op.shape_of(self.ids), _ints(1), _int(0)), _int(0))
        key_positions = op.range(_int(0), total, _int(1), "i64")
        query_positions = op.add(op.range(_int(0), step, _int(1), "i64"), op.subtract(total, step))
        visible = op.less_equal(op.unsqueeze(key_positions, _int(0)), op.unsqueeze(query_positions, _int(1)))
        visible = op.unsqueeze(op.unsqueeze(visible, _int(0)), _int(0))
        return op.select(visible, _float(0), op.constant(MASKED))

    def _matrix(self, name: str, shape: tuple[int, int]) -> Node:
        """An embedding or a head."""
        tensor = self._tensor(f"{name}.weight")
        return matrix(tensor, shape, self._precision(tensor))

    def _precision(self, tensor: Tensor) -> Precision:
        return precision_of(tensor.name, tensor.encoding, tensor.shape[-1], self.quantize).precision

    def _tensor(self, name: str) -> Tensor:
        if name not in self.weights:
            raise CorruptArtifactError(f"tensor {name} is missing")
        return self.weights[name]


def _parameter(name: str, shape: list[int], dtype: type) -> Node:
    node = op.parameter(ov.PartialShape(shape), dtype, name=name)
    node.output(0).tensor.set_names({name})
    return node


def _scaled(x: Node, factor: float) -> Node:
    return x if factor == 1.0 else op.multiply(x, _float(factor))


def _columns(x: Node, begin: int, end: int) -> Node:
    """Part of the last axis of a tensor with four."""
    return op.slice(x, _ints(begin), _ints(end), _ints(1), _ints(3))


def _int(value: int) -> Node:
    return op.constant(np.int64(value))


def _ints(*values: int) -> Node:
    return op.constant(np.array(values, np.int64))


def _float(value: float) -> Node:
    return op.constant(np.float32(value))
