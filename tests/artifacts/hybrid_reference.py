"""Hybrid decoders in float64, token by token and straight from their definition, on the weights that readers give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.layout import layer_norms
from lockstep.artifacts.model import Artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.executors.rotary import inverse_frequencies, local_frequencies

Floats = npt.NDArray[np.float64]


def hybrid_logits(artifact: Artifact, token_ids: Sequence[int]) -> Floats:
    """Logits [T, vocab] of all tokens."""
    model = _Model(artifact)
    config, norms = artifact.config, layer_norms(artifact.config)
    hidden = model.tensor("model.embed_tokens.weight")[list(token_ids)]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        x = model.norm(hidden, f"{prefix}input_layernorm")
        mixers = {"attention": model.attention, "delta_net": model.delta_net, "convolution": model.convolution}
        hidden = hidden + model.normed(mixers[config.mixer_of(layer)](x, layer), prefix, norms.after_attention)
        x = model.norm(hidden, f"{prefix}{norms.before_mlp}")
        gated = _silu(model.linear(x, f"{prefix}mlp.gate_proj")) * model.linear(x, f"{prefix}mlp.up_proj")
        hidden = hidden + model.normed(model.linear(gated, f"{prefix}mlp.down_proj"), prefix, norms.after_mlp)
    head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    return model.linear(model.norm(hidden, "model.norm"), head)


class _Model:
    def __init__(self, artifact: Artifact) -> None:
        self.config, self.weights = artifact.config, artifact.weights

    def tensor(self, name: str) -> Floats:
        return dequantise(self.weights[name]).astype(np.float64)

    def norm(self, x: Floats, name: str, offset: float | None = None) -> Floats:
        offset = self.config.norm_offset if offset is None else offset
        return _unit(x, self.config.rms_norm_eps) * (self.tensor(f"{name}.weight") + offset)

    def normed(self, x: Floats, prefix: str, name: str | None) -> Floats:
        """An output, with its norm if the model has any."""
        return x if name is None else self.norm(x, prefix + name)

    def linear(self, x: Floats, name: str) -> Floats:
        y = x @ self.tensor(f"{name}.weight").T
        return y + self.tensor(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def convolved(self, x: Floats, name: str) -> Floats:
        """Each channel's sum of its last inputs times a kernel [channels, taps], whose last tap is the own input's."""
        kernel = self.tensor(f"{name}.weight")
        taps = kernel.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        y: Floats = sum((padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(taps)), np.zeros_like(x))
        return y + self.tensor(f"{name}.bias") if f"{name}.bias" in self.weights else y

    def convolution(self, x: Floats, layer: int) -> Floats:
        prefix = f"model.layers.{layer}."
        before, after, x = np.split(self.linear(x, f"{prefix}conv.in_proj"), 3, axis=1)
        return self.linear(after * self.convolved(before * x, f"{prefix}conv.conv"), f"{prefix}conv.out_proj")

    def delta_net(self, x: Floats, layer: int) -> Floats:
        net, own = self.config.delta_net, f"model.layers.{layer}.linear_attn."
        assert net is not None
        keys = net.num_key_heads * net.key_dim
        mixed = _silu(self.convolved(self.linear(x, f"{own}in_proj_qkv"), f"{own}conv1d"))
        query, key, value = np.split(mixed, [keys, 2 * keys], axis=1)
        ratio = net.num_value_heads // net.num_key_heads
        heads = np.arange(net.num_value_heads)
        heads = heads % net.num_key_heads if net.is_tiled else heads // ratio
        query = _length_one(query.reshape(len(x), net.num_key_heads, -1))[:, heads] / np.sqrt(net.key_dim)
        key = _length_one(key.reshape(len(x), net.num_key_heads, -1))[:, heads]
        value = value.reshape(len(x), net.num_value_heads, -1)
        rates = self.tensor(f"{own}A") if net.has_rates else -np.exp(self.tensor(f"{own}A_log"))
        step = np.logaddexp(0, self.linear(x, f"{own}in_proj_a") + self.tensor(f"{own}dt_bias"))
        decay, beta = np.exp(rates * step), _sigmoid(self.linear(x, f"{own}in_proj_b"))
        state = np.zeros((net.num_value_heads, net.key_dim, net.value_dim))
        out = np.empty_like(value)
        for token in range(len(x)):
            state *= decay[token][:, None, None]
            read = np.einsum("hkv,hk->hv", state, key[token])
            change = (value[token] - read) * beta[token][:, None]
            state += key[token][:, :, None] * change[:, None, :]
            out[token] = np.einsum("hkv,hk->hv", state, query[token])
        gate = _silu(self.linear(x, f"{own}in_proj_z")).reshape(out.shape)
        normed = self.norm(out, f"{own}norm", 0.0) * gate
        return self.linear(normed.reshape(len(x), -1), f"{own}out_proj")

    def attention(self, x: Floats, layer: int) -> Floats:
        config, own, window = self.config, f"model.layers.{layer}.self_attn.", self.config.window_of(layer)
        query = self.linear(x, f"{own}q_proj").reshape(len(x), config.num_heads, -1)
        gate = np.ones((len(x), config.num_heads, config.head_dim))
        if config.attention_gate:
            query, gate = query[..., : config.head_dim], _sigmoid(query[..., config.head_dim :])
        if config.head_gates:
            gate = _sigmoid(self.linear(x, f"{own}g_proj"))[..., None]
        key, value = (
            self.linear(x, f"{own}{name}_proj").reshape(len(x), config.num_kv_heads, -1) for name in ("k", "v")
        )
        query = self.rotated(self.norm(query, f"{own}q_norm"), window)
        key = self.rotated(self.norm(key, f"{own}k_norm"), window)
        groups = config.num_heads // config.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", query, np.repeat(key, groups, 1)) / np.sqrt(config.head_dim)
        is_seen = np.tri(len(x), dtype=bool) & ~np.tri(len(x), k=-(window or len(x)), dtype=bool)
        scores += np.where(is_seen, 0.0, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(value, groups, 1)) * gate
        return self.linear(mixed.reshape(len(x), -1), f"{own}o_proj")

    def rotated(self, x: Floats, window: int) -> Floats:
        is_local = self.config.local_rope_theta is not None and window > 0
        frequencies = (local_frequencies if is_local else inverse_frequencies)(self.config).astype(np.float64)
        half = len(frequencies)
        angles = np.arange(len(x))[:, None] * frequencies
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _unit(x: Floats, epsilon: float) -> Floats:
    unit: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return unit


def _length_one(x: Floats) -> Floats:
    scaled: Floats = x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
    return scaled


def _sigmoid(x: Floats) -> Floats:
    y: Floats = 1 / (1 + np.exp(-x))
    return y


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)
