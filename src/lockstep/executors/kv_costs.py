"""Memory that a sequence takes: by group of layers, for its state, and in all, as `kv_layout` lays it out."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.artifacts.model import ModelConfig
from lockstep.executors.kv_layout import BLOCK_TOKENS, KVLayout, kv_layout


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Cost of a group of layers that keep keys and values."""

    num_layers: int
    """Layers that store their own keys and values."""
    window: int
    """Number of tokens that are kept; 0: all."""
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Cost of a decoder's sequences, in whole blocks as the pool allocates them."""

    groups: tuple[GroupCost, ...]
    state_bytes: int
    """Size of the states of all recurrent layers, which does not grow with the sequence; 0: there are none."""
    snapshot_interval: int
    """Tokens of a long prompt between two snapshots of the state, each of `state_bytes`; 0: there are none."""
    layout: KVLayout

    def bytes_of(self, num_tokens: int) -> int:
        """Memory of one sequence of so many tokens, without snapshots."""
        last = max(num_tokens, 1) - 1
        num_blocks = 0
        for group in self.layout.groups:
            columns = 1 if group.is_state else last // BLOCK_TOKENS + 1 - group.first_column(last, BLOCK_TOKENS)
            num_blocks += group.num_parts * columns
        return num_blocks * self.layout.block_bytes


def kv_costs(config: ModelConfig, storage: str = "f16") -> KVCosts:
    """Costs of a decoder.

    Args:
        storage: precision of keys and values: ``f32``, ``f16`` or ``int8``.
    """
    layout = kv_layout(config, storage)
    states = [group for group in layout.groups if group.is_state]
    groups = [
        GroupCost(
            num_layers=sum(place is not None and place.group == index for place in layout.layers),
            window=group.window,
            bytes_per_token=group.num_parts * layout.block_bytes // BLOCK_TOKENS,
        )
        for index, group in enumerate(layout.groups)
        if not group.is_state
    ]
    return KVCosts(
        groups=tuple(groups),
        state_bytes=sum(group.num_parts for group in states) * layout.block_bytes,
        snapshot_interval=max((group.snapshot_interval for group in states), default=0),
        layout=layout,
    )


def activation_bytes_per_token(config: ModelConfig, element_bytes: int = 2) -> int:
    """Bytes that an encoder's pool holds of each token: keys and values of two layers, and the hidden state and the
    queries in float32.

    Args:
        element_bytes: size of a number of the keys and values.
    """
    heads = config.num_heads * config.head_dim
    return 2 * element_bytes * 2 * config.num_kv_heads * config.head_dim + 4 * (config.hidden_size + heads)
