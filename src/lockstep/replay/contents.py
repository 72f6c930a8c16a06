"""From content ids to block hashes: how a workload's shared prompts reach the prefix cache."""

from __future__ import annotations

from lockstep.core.prefix import HASH_BYTES

ID_BYTES = 12
"""Of a hash; the rest is the block's place within its content."""


def content_hashes(
    contents: tuple[int, ...], content_size: int, block_size: int, num_prompt_tokens: int
) -> tuple[bytes, ...]:
    """Block hashes of a prompt's full blocks.

    Each id stands for ``content_size`` tokens, thus for ``content_size // block_size`` blocks. Block ``i`` of id ``c``
    has the hash of 16 bytes that is ``c`` in 12 bytes and then ``i`` in 4, both little-endian. Equal ids are equal
    content with equal past, so the hashes need no chain.

    Args:
        content_size: a multiple of ``block_size``.
    """
    per_content = content_size // block_size
    count = num_prompt_tokens // block_size
    to_bytes = int.to_bytes
    if per_content == 1:
        return tuple([to_bytes(content, HASH_BYTES, "little") for content in contents[:count]])
    places = [to_bytes(place, HASH_BYTES - ID_BYTES, "little") for place in range(per_content)]
    ids = [to_bytes(content, ID_BYTES, "little") for content in contents]
    return tuple([name + place for name in ids for place in places][:count])


def content_number(block_hash: bytes, per_content: int) -> int:
    """A number for a hash of `content_hashes`: equal for equal hashes, consecutive for the blocks of one content.

    Args:
        per_content: blocks that an id stands for.
    """
    content = int.from_bytes(block_hash[:ID_BYTES], "little")
    return content * per_content + int.from_bytes(block_hash[ID_BYTES:], "little")
