"""Prefix cache: maps chains of tokens to the blocks with their KV. It stores hashes, never tokens.

A block's hash is BLAKE2b-128 over its parent's hash and its token ids as u32 little-endian. The root is the namespace
(artifact fingerprint and optional salt), so that equal prompts in different namespaces share no blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b

HASH_BYTES = 16
ContentNews = tuple[bytes, bool]
"""Hash of a block's content, and whether it was added to the cache or removed."""


def namespace_of(fingerprint: str, cache_salt: str) -> bytes:
    """Root of a model's hashes: its artifact's content, and the caller's salt."""
    return f"{fingerprint}\0{cache_salt}".encode()


def block_hashes(
    namespace: bytes, token_ids: Sequence[int], block_size: int, known: tuple[bytes, ...] = ()
) -> tuple[bytes, ...]:
    """Chained hashes of the full blocks of ``token_ids``. This is the only function that reads tokens.

    root = BLAKE2b-128(namespace); hash[i] = BLAKE2b-128(hash[i-1] + u32le token ids of block i), hash[-1] = root.

    Args:
        namespace: artifact fingerprint, plus the ``cache_salt`` if any, separated by the caller.
        token_ids: the prompt, and its answer if there is one, each id below 2**32.
        block_size: tokens per block; a partial last block has no hash.
        known: the hashes of the first blocks, from an earlier call.
    """
    pack = struct.Struct(f"<{block_size}I").pack
    parent = known[-1] if known else blake2b(namespace, digest_size=HASH_BYTES).digest()
    hashes = [*known]
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        block = pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixCache:
    """Hash to block, one to one. The first block published under a hash keeps it until its content is removed."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        """Hash by block, in a list instead of a dictionary, since a pool of small blocks has tens of thousands."""
        self._pins: dict[bytes, int] = {}
        self._pinned: set[int] = set()
        self.num_published = 0
        """Number of contents published since the start."""
        self.news: list[ContentNews] | None = None
        """Changes since the last ``drain_contents``; None: they are not collected."""

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def blocks(self) -> Mapping[int, bytes]:
        """Published blocks, held or not, with their hashes, in order of publishing. Each call creates a new mapping."""
        return {block: block_hash for block_hash, block in self._block_of.items()}

    @property
    def hashes(self) -> Sequence[bytes | None]:
        """Hash of each block by its number; None: it is not published."""
        return self._hash_of

    @property
    def pinned(self) -> Container[int]:
        """Published blocks of pinned content. Callers cannot iterate over it, because the order of a set is not
        fixed."""
        return self._pinned

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content; None: there is none."""
        return self._block_of.get(block_hash)

    def match(self, hashes: Sequence[bytes], start: int, stop: int) -> tuple[int, ...]:
        """Blocks with the contents ``hashes[start:stop]``, up to the first one that is missing. Changes nothing."""
        found = []
        for index in range(start, min(stop, len(hashes))):
            block = self._block_of.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make each block available under its hash, unless another one has the same content already."""
        block_of, hash_of = self._block_of, self._hash_of
        num_before, is_noted = len(block_of), self.news is not None or bool(self._pins)
        for block, block_hash in zip(blocks, hashes, strict=True):
            if hash_of[block] is None and block_hash not in block_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash
                if is_noted:
                    self._note(block, block_hash)
        self.num_published += len(block_of) - num_before

    def _note(self, block: int, block_hash: bytes) -> None:
        """Record a published block in the collected changes and in the pins."""
        if self.news is not None:
            self.news.append((block_hash, True))
        if block_hash in self._pins:
            self._pinned.add(block)

    def forget(self, *blocks: int) -> None:
        """Remove the content of these blocks."""
        block_of, hash_of = self._block_of, self._hash_of
        for block in blocks:
            block_hash = hash_of[block]
            assert block_hash is not None, f"block {block} is not published"
            hash_of[block] = None
            del block_of[block_hash]
            if self.news is not None:
                self.news.append((block_hash, False))
        if self._pinned:
            self._pinned.difference_update(blocks)

    def pin(self, hashes: Sequence[bytes]) -> list[int]:
        """Add a pin to each content, published or not. Returns the published blocks."""
        for block_hash in hashes:
            self._pins[block_hash] = self._pins.get(block_hash, 0) + 1
        blocks = [self._block_of[block_hash] for block_hash in hashes if block_hash in self._block_of]
        self._pinned.update(blocks)
        return blocks

    def unpin(self, hashes: Sequence[bytes]) -> list[int]:
        """Remove a pin from each content. Returns the published blocks that have no pin left."""
        blocks = []
        for block_hash in hashes:
            count = self._pins.pop(block_hash, 0)
            if count > 1:
                self._pins[block_hash] = count - 1
            elif block_hash in self._block_of:
                blocks.append(self._block_of[block_hash])
        self._pinned.difference_update(blocks)
        return blocks

    def clear(self) -> None:
        """Remove every block. Pins stay, for content that is published later."""
        if self.news is not None:
            self.news.extend([(block_hash, False) for block_hash in self._block_of])
        self._block_of.clear()
        self._hash_of = [None] * len(self._hash_of)
        self._pinned.clear()

    @property
    def pins(self) -> Mapping[bytes, int]:
        """Number of pins by content, published or not."""
        return self._pins

    def restore(self, published: Iterable[tuple[int, bytes]], pins: Iterable[tuple[bytes, int]]) -> None:
        """Restore the content of blocks, first published first, and the pins."""
        self._block_of = {block_hash: block for block, block_hash in published}
        self._hash_of = [None] * len(self._hash_of)
        for block_hash, block in self._block_of.items():
            self._hash_of[block] = block_hash
        self._pins = dict(pins)
        self._pinned = {self._block_of[block_hash] for block_hash in self._pins if block_hash in self._block_of}

    def check(self) -> None:
        """Assert that both directions of the mapping agree."""
        published = {block: key for block, key in enumerate(self._hash_of) if key is not None}
        assert {block: key for key, block in self._block_of.items()} == published, "hashes and blocks disagree"
        assert self._pinned == {block for key, block in self._block_of.items() if key in self._pins}, "a pin is lost"
