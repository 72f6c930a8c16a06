"""Character maps of SentencePiece: checks a precompiled map, which `tokenizers` reads without checking its bounds.

Format: the size of a trie in bytes (32 bits), the trie, and the replacements, each ending in a zero byte. The trie is a
double array, that of S. Yata's darts-clone. A unit of 32 bits is a node with the byte that leads to it (bits 0 to 7),
whether a text may end there (bit 8) and the offset of its children (bits 10 to 30, and bit 9: times 256); or it is a
value (bit 31), the place of a replacement. The children of the node at p are at (p xor offset) xor their byte; the
value of a node is its child of byte 0.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def charsmap_fault(content: bytes) -> str | None:
    """Return the reason why a text could lead out of a map, or None."""
    num_bytes = int.from_bytes(content[:4], "little")
    if num_bytes % 4 or not 4 <= num_bytes <= len(content) - 4:
        return f"has a trie of {num_bytes} bytes in {len(content)} bytes"
    units = np.frombuffer(content, "<u4", num_bytes // 4, 4).astype(np.int64)
    replacements = np.frombuffer(content, np.uint8, offset=4 + num_bytes)
    if not _is_within_bounds(units, replacements):
        return "refers to places outside of it"
    try:
        replacements.tobytes().decode()
    except UnicodeDecodeError:
        return "has replacements that are not UTF-8"
    return None


def charsmaps_of(tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the maps in a tokenizer's normalizer."""

    def found(step: object) -> Iterator[bytes]:
        match step:
            case {"precompiled_charsmap": str(text)}:
                yield base64.b64decode(text)
            case {"normalizers": list(steps)}:
                for each in steps:
                    yield from found(each)

    if tokenizer.normalizer is not None:
        yield from found(json.loads(tokenizer.normalizer.__getstate__()))


def _is_within_bounds(units: npt.NDArray[np.int64], replacements: npt.NDArray[np.uint8]) -> bool:
    """True if no text leads out of the trie, and every replacement begins at a character."""
    is_node = units >> 31 == 0
    is_node[0] = True
    nodes = np.flatnonzero(is_node)
    offsets = (units[nodes] >> 10) << ((units[nodes] & (1 << 9)) >> 6)
    children = nodes ^ offsets
    if np.any((children | 0xFF) >= len(units)):
        return False
    begins = units[children[units[nodes] >> 8 & 1 == 1]] & ~(1 << 31)
    if np.any(begins >= len(replacements)):
        return False
    return not np.any(replacements[begins] >> 6 == 2)
