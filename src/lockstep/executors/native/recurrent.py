"""Recurrent layers of a program: gated delta nets, short convolutions, and the output gate of attention beside them.

Sources of the formulas: `Qwen3_5GatedDeltaNet`, `Qwen3_5Attention` and `Lfm2ShortConv` in transformers. The operations
are those of ``recurrent.hpp``, token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep.artifacts.model import DeltaNet
from lockstep.executors.native.operations import GATES, Action, Floats
from lockstep.executors.row_math import row_math

if TYPE_CHECKING:
    from lockstep.executors.native.program import _Builder

_LENGTH_EPSILON = 1e-6
"""Epsilon of the lengths of queries and keys of delta nets: of the sum of squares, and not of their mean."""


def delta_net(builder: _Builder, layer: int, normed: int) -> int:
    """Add a gated delta net; the buffer of its results, before the last projection.

    One product makes the inputs of the convolution (queries, keys and values), the gates of the results, and the
    inputs of betas and decays. Convolved rows and these numbers are side by side in a second buffer.
    """
    net, own = builder.config.delta_net, f"model.layers.{layer}.linear_attn."
    assert net is not None, "a layer of this kind has shapes"
    channels, heads, values = net.num_channels, net.num_value_heads, net.num_value_heads * net.value_dim
    mixed = builder._buffer("inputs of delta nets", channels + values + 2 * heads, is_of_step=True)
    convolved = builder._buffer("convolved inputs of delta nets", channels + 2 * heads, is_of_step=True)
    out = builder._buffer("results of delta nets", values, is_of_step=True)
    builder._product(normed, [f"{own}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")], mixed)
    builder._add(
        Action.RATES, convolved, in_=mixed, in_at=channels + values, out_at=channels, columns=heads,
        vector=builder._add_vector(np.concatenate([_rates(builder, net, own), builder.vector(f"{own}dt_bias", heads)])),
    )  # fmt: skip
    place = builder._add_places(layer)
    _convolve(builder, mixed, convolved, f"{own}conv1d", (channels, net.taps), place, function="silu")
    keys = net.num_key_heads * net.key_dim
    for at, length in ((0, net.key_dim**-0.5), (keys, 1.0)):
        _scale_heads(builder, convolved, at, net, length)
    builder._add(Action.DELTA, out, in_=convolved, place=place + 1)
    builder._add(
        Action.NORM, out, in_=out, columns=net.value_dim, heads=heads, stride=net.value_dim,
        vector=builder._add_vector(builder.vector(f"{own}norm.weight", net.value_dim)),
        epsilon=builder.config.rms_norm_eps,
    )  # fmt: skip
    multiply(builder, mixed, out, values, at=channels, function="silu")
    return out


def convolution(builder: _Builder, layer: int, normed: int) -> int:
    """Add a short convolution between two products; the buffer of its results, before the last projection."""
    config, own = builder.config, f"model.layers.{layer}.conv."
    size = config.hidden_size
    mixed = builder._buffer("gates and inputs of convolutions", 3 * size, is_of_step=True)
    out = builder._buffer("convolved inputs", size, is_of_step=True)
    builder._product(normed, [f"{own}in_proj.weight"], mixed)  # the first gate, the second one, and inputs
    inputs = builder._buffer("gated inputs of convolutions", size, is_of_step=True)
    builder._add(Action.COPY, inputs, in_=mixed, in_at=2 * size, columns=size)
    multiply(builder, mixed, inputs, size)
    _convolve(builder, inputs, out, f"{own}conv", (size, config.conv_taps), builder._add_places(layer))
    multiply(builder, mixed, out, size, at=size)
    return out


def separate_gates(builder: _Builder, projected: int, together: int, others: int) -> None:
    """Copy the queries of each head, which its gate follows, and then the ``others`` columns, side by side."""
    config = builder.config
    queries = config.num_heads * config.head_dim
    heads = {"columns": config.head_dim, "heads": config.num_heads, "stride": 2 * config.head_dim}
    builder._add(Action.COPY, together, in_=projected, **heads)
    builder._add(Action.COPY, together, in_=projected, in_at=2 * queries, out_at=queries, columns=others)


def multiply(
    builder: _Builder, x: int, out: int, columns: int, *, at: int = 0, function: str = "identity", heads: int = 1,
    stride: int = 0,
) -> None:  # fmt: skip
    """Multiply a buffer by a function of columns of another one."""
    fields = {"in_at": at, "columns": columns, "heads": heads, "stride": stride}
    builder._add(Action.MULTIPLY, out, in_=x, function=GATES[function], **fields)


def _convolve(
    builder: _Builder, x: int, out: int, name: str, shape: tuple[int, int], place: int, function: str = "identity"
) -> None:
    """Convolve the first columns of a buffer, by a kernel [channels, taps]."""
    channels, taps = shape
    kernel = builder.vector(f"{name}.weight", shape)
    bias = builder.vector(f"{name}.bias", channels) if builder.has(f"{name}.bias") else np.zeros(channels, np.float32)
    numbers = np.concatenate([kernel.T.reshape(-1), bias])
    builder._add(
        Action.CONVOLVE, out, in_=x, columns=channels, taps=taps, function=GATES[function], place=place,
        vector=builder._add_vector(numbers),
    )  # fmt: skip


def _scale_heads(builder: _Builder, x: int, at: int, net: DeltaNet, length: float) -> None:
    """Scale queries or keys to a length: the norm of a head whose weights are all length / sqrt(key_dim)."""
    weights = np.full(net.key_dim, length * net.key_dim**-0.5, np.float32)
    builder._add(
        Action.NORM, x, in_=x, in_at=at, out_at=at, columns=net.key_dim, heads=net.num_key_heads, stride=net.key_dim,
        vector=builder._add_vector(weights), epsilon=_LENGTH_EPSILON / net.key_dim,
    )  # fmt: skip


def _rates(builder: _Builder, net: DeltaNet, own: str) -> Floats:
    """Rates of decay, which are negative."""
    if net.has_rates:
        return builder.vector(f"{own}A", net.num_value_heads)
    logarithms = builder.vector(f"{own}A_log", net.num_value_heads)
    return -row_math().weigh(logarithms, 0.0, 1.0).astype(np.float32)
