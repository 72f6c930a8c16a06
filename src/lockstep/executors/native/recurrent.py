"""Recurrent layers of a program: gated delta nets, short convolutions, and the output gate of attention beside them.

Sources of the formulas: `Qwen3_5GatedDeltaNet`, `Qwen3_5Attention`, `Lfm2ShortConv` and `Lfm3Attention` in
transformers. The operations are those of ``recurrent.hpp``, token by token.
"""

from __future__ import annotations

import numpy as np

from lockstep.artifacts.model import DeltaNet
from lockstep.executors.native.assembly import Assembly
from lockstep.executors.native.operations import GATES, Action, Floats
from lockstep.executors.row_math import row_math

_LENGTH_EPSILON = 1e-6
"""Epsilon of the lengths of queries and keys of delta nets: of the sum of squares, and not of their mean."""


def delta_net(assembly: Assembly, layer: int, normed: int) -> int:
    """Add a gated delta net; the buffer of its results, before the last projection.

    One product makes the inputs of the convolution (queries, keys and values), the gates of the results, and the
    inputs of betas and decays. Convolved rows and these numbers are side by side in a second buffer.
    """
    net, own = assembly.config.delta_net, f"model.layers.{layer}.linear_attn."
    assert net is not None, "a layer of this kind has shapes"
    channels, heads, values = net.num_channels, net.num_value_heads, net.num_value_heads * net.value_dim
    mixed = assembly.buffer("inputs of delta nets", channels + values + 2 * heads, is_of_step=True)
    convolved = assembly.buffer("convolved inputs of delta nets", channels + 2 * heads, is_of_step=True)
    out = assembly.buffer("results of delta nets", values, is_of_step=True)
    assembly.product(normed, [f"{own}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")], mixed)
    rates = np.concatenate([_rates(assembly, net, own), assembly.vector(f"{own}dt_bias", heads)])
    assembly.add(
        Action.RATES, convolved, in_=mixed, in_at=channels + values, out_at=channels, columns=heads,
        vector=assembly.add_vector(rates),
    )  # fmt: skip
    place = assembly.add_places(layer)
    _convolve(assembly, mixed, convolved, f"{own}conv1d", (channels, net.taps), place, function="silu")
    keys = net.num_key_heads * net.key_dim
    for at, length in ((0, net.key_dim**-0.5), (keys, 1.0)):
        _scale_heads(assembly, convolved, at, net, length)
    assembly.add(Action.DELTA, out, in_=convolved, place=place + 1)
    assembly.add(
        Action.NORM, out, in_=out, columns=net.value_dim, heads=heads, stride=net.value_dim,
        vector=assembly.add_vector(assembly.vector(f"{own}norm.weight", net.value_dim)),
        epsilon=assembly.config.rms_norm_eps,
    )  # fmt: skip
    assembly.multiply(mixed, out, values, at=channels, function="silu")
    return out


def convolution(assembly: Assembly, layer: int, normed: int) -> int:
    """Add a short convolution between two products; the buffer of its results, before the last projection."""
    config, own = assembly.config, f"model.layers.{layer}.conv."
    size = config.hidden_size
    mixed = assembly.buffer("gates and inputs of convolutions", 3 * size, is_of_step=True)
    out = assembly.buffer("convolved inputs", size, is_of_step=True)
    assembly.product(normed, [f"{own}in_proj.weight"], mixed)  # the first gate, the second one, and inputs
    inputs = assembly.buffer("gated inputs of convolutions", size, is_of_step=True)
    assembly.add(Action.COPY, inputs, in_=mixed, in_at=2 * size, columns=size)
    assembly.multiply(mixed, inputs, size)
    _convolve(assembly, inputs, out, f"{own}conv", (size, config.conv_taps), assembly.add_places(layer))
    assembly.multiply(mixed, out, size, at=size)
    return out


def separate_gates(assembly: Assembly, projected: int, together: int, others: int) -> None:
    """Copy the queries of each head, which its gate follows, and then the ``others`` columns, side by side."""
    config = assembly.config
    queries = config.num_heads * config.head_dim
    heads = {"columns": config.head_dim, "heads": config.num_heads, "stride": 2 * config.head_dim}
    assembly.add(Action.COPY, together, in_=projected, **heads)
    assembly.add(Action.COPY, together, in_=projected, in_at=2 * queries, out_at=queries, columns=others)


def head_gates(assembly: Assembly, normed: int, name: str) -> int:
    """Add the gates of a layer's heads, one number for each; their buffer."""
    gates = assembly.buffer("gates of heads", assembly.config.num_heads, is_of_step=True)
    assembly.gate(normed, [name], gates, "sigmoid")
    return gates


def _convolve(
    assembly: Assembly, x: int, out: int, name: str, shape: tuple[int, int], place: int, function: str = "identity"
) -> None:
    """Convolve the first columns of a buffer, by a kernel [channels, taps]."""
    channels, taps = shape
    kernel = assembly.vector(f"{name}.weight", shape)
    bias = assembly.vector(f"{name}.bias", channels) if assembly.has(f"{name}.bias") else np.zeros(channels, np.float32)
    numbers = np.concatenate([kernel.T.reshape(-1), bias])
    assembly.add(
        Action.CONVOLVE, out, in_=x, columns=channels, taps=taps, function=GATES[function], place=place,
        vector=assembly.add_vector(numbers),
    )  # fmt: skip


def _scale_heads(assembly: Assembly, x: int, at: int, net: DeltaNet, length: float) -> None:
    """Scale queries or keys to a length: the norm of a head whose weights are all length / sqrt(key_dim)."""
    weights = np.full(net.key_dim, length * net.key_dim**-0.5, np.float32)
    assembly.add(
        Action.NORM, x, in_=x, in_at=at, out_at=at, columns=net.key_dim, heads=net.num_key_heads, stride=net.key_dim,
        vector=assembly.add_vector(weights), epsilon=_LENGTH_EPSILON / net.key_dim,
    )  # fmt: skip


def _rates(assembly: Assembly, net: DeltaNet, own: str) -> Floats:
    """Rates of decay, which are negative."""
    if net.has_rates:
        return assembly.vector(f"{own}A", net.num_value_heads)
    logarithms = assembly.vector(f"{own}A_log", net.num_value_heads)
    return -row_math().weigh(logarithms, 0.0, 1.0).astype(np.float32)
