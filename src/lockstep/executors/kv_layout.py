"""Layout of a model's KV memory: which groups of layers it has, and where each layer lies in the blocks of its group.

All blocks have one size. A block holds some layers of one group for `BLOCK_TOKENS` positions, or a part of a state. A
layer's keys and values lie in one block of a column, and so does each piece of a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lockstep.artifacts.model import ModelConfig
from lockstep.core.groups import KVGroup

BLOCK_TOKENS = 32
"""Positions of a KV block, the same as in ``attention.hpp``."""
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "int8": 1}
MIN_SNAPSHOT_INTERVAL, MAX_SNAPSHOT_INTERVAL = 512, 2048
"""Limits of the positions of a long prompt between two snapshots of its state."""
_INTERVAL_UNIT = 256
"""The interval is a multiple of this, so that snapshots do not shorten the default chunks of prompts."""


class Place(NamedTuple):
    """Place of a layer, or of a piece of a state, in the blocks of a column."""

    group: int
    part: int
    """Block of the column."""
    offset: int
    """First byte in the block."""


class KVLayout(NamedTuple):
    """Layout of a decoder's KV memory."""

    block_bytes: int
    groups: tuple[KVGroup, ...]
    layers: tuple[Place | None, ...]
    """By layer, where its keys and values lie; None: it stores none."""
    states: tuple[tuple[Place, ...], ...]
    """By layer, the pieces of its state: the last inputs of its convolution ``[taps - 1, channels]``, then the matrix
    ``[key_dim, value_dim]`` of each value head, all in float32. Empty: it has no state."""


def kv_layout(config: ModelConfig, storage: str) -> KVLayout:
    """The layout of a decoder.

    The first group is that of the layers without a window. In a model without such layers, it is that of the layers
    with the largest window, of which all positions are kept.

    Args:
        storage: precision of keys and values: ``f32``, ``f16`` or ``int8``.
    """
    owners = [layer for layer in range(config.num_layers) if config.owns_kv(layer)]
    windows = sorted({config.window_of(layer) for layer in owners})
    first = 0 if 0 in windows else windows[-1]
    windows = [first, *(window for window in windows if window != first)]
    sizes = {layer: kv_bytes(config.kv_heads_of(layer), config.head_dim_of(layer), storage) for layer in owners}
    pieces = {layer: _piece_bytes(config, layer) for layer in range(config.num_layers)}
    of_first = sum(sizes[layer] for layer in owners if config.window_of(layer) == first)
    block_bytes = max([of_first, *sizes.values(), *(size for each in pieces.values() for size in each)])
    groups: list[KVGroup] = []
    layers: list[Place | None] = [None] * config.num_layers
    for group, window in enumerate(windows):
        members = [layer for layer in owners if config.window_of(layer) == window]
        places = _packed(group, [sizes[layer] for layer in members], block_bytes)
        groups.append(KVGroup(_num_parts(places), window if group else 0))
        for layer, place in zip(members, places, strict=True):
            layers[layer] = place
    states: list[tuple[Place, ...]] = [()] * config.num_layers
    places = _packed(len(groups), [size for each in pieces.values() for size in each], block_bytes)
    if places:
        num_parts = _num_parts(places)
        interval = _snapshot_interval(num_parts, groups[0].num_parts)
        groups.append(KVGroup(num_parts, is_state=True, snapshot_interval=interval))
        rest = iter(places)
        for layer, each in pieces.items():
            states[layer] = tuple([next(rest) for _ in each])
    return KVLayout(block_bytes, tuple(groups), tuple(layers), tuple(states))


def kv_bytes(kv_heads: int, head_dim: int, storage: str) -> int:
    """Bytes of a layer's keys and values of `BLOCK_TOKENS` positions. With ``int8``, each has a scale in float32."""
    scale_bytes = 4 if storage == "int8" else 0
    return kv_heads * 2 * BLOCK_TOKENS * (head_dim * _ELEMENT_BYTES[storage] + scale_bytes)


def _piece_bytes(config: ModelConfig, layer: int) -> list[int]:
    """Sizes of the pieces of a layer's state, in bytes."""
    mixer = config.mixer_of(layer)
    if mixer == "convolution":
        return [4 * (config.conv_taps - 1) * config.hidden_size]
    if mixer == "delta_net" and config.delta_net is not None:
        net = config.delta_net
        return [4 * (net.taps - 1) * net.num_channels, *[4 * net.key_dim * net.value_dim] * net.num_value_heads]
    return []


def _packed(group: int, sizes: Iterable[int], block_bytes: int) -> list[Place]:
    """Places of pieces that fill one block after the other. A piece that does not fit begins the next block."""
    places: list[Place] = []
    part = end = 0
    for size in sizes:
        if end + size > block_bytes:
            part, end = part + 1, 0
        places.append(Place(group, part, end))
        end += size
    return places


def _num_parts(places: list[Place]) -> int:
    return places[-1].part + 1


def _snapshot_interval(state_parts: int, column_parts: int) -> int:
    """Number of positions whose keys and values take as much memory as a state, within the limits."""
    positions = -(-state_parts * BLOCK_TOKENS // (column_parts * _INTERVAL_UNIT)) * _INTERVAL_UNIT
    return min(max(positions, MIN_SNAPSHOT_INTERVAL), MAX_SNAPSHOT_INTERVAL)
