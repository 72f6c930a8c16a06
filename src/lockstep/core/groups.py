"""KV groups: layers whose memory a sequence keeps in the same way, and the blocks that each group needs.

All groups take blocks of one pool. The first group has a block for every `block_size` positions, from the first
position to the last. Layers with a window are in groups that release the blocks behind it. Recurrent layers are in a
group of states: a sequence has one state of a fixed number of blocks, whose content changes with every token.

Content that can be hit is identified by the chained hash of its positions (`lockstep.core.prefix`), for groups after
the first one with the number of the group appended. A state's content is identified by the hash of the last block of
positions that it has seen.
"""

from __future__ import annotations

from typing import NamedTuple


class KVGroup(NamedTuple):
    """One group of layers."""

    num_parts: int = 1
    """Number of blocks of a column. A column holds `block_size` positions or, in a group of states, a whole state."""
    window: int = 0
    """Number of positions that a token sees, including its own; 0: all before it."""
    is_state: bool = False
    """True for states of recurrent layers."""
    snapshot_interval: int = 0
    """Of states: number of positions of a long prompt from one snapshot to the next, a multiple of `block_size`."""

    def first_column(self, position: int, block_size: int) -> int:
        """The first column that a token at this position sees, and all after it."""
        return max(0, position + 1 - self.window) // block_size if self.window else 0


ONE_GROUP = (KVGroup(),)
"""The groups of a model without windows and states."""


def content_key(block_hash: bytes, group: int) -> bytes:
    """Key of a column's content in a group (counted from 0) in the prefix cache."""
    return block_hash + bytes((group,)) if group else block_hash
