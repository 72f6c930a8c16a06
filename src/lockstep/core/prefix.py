"""Prefix cache: maps chains of tokens to the blocks with their KV. It stores hashes, never tokens.

A block's hash is BLAKE2b-128 over its parent's hash and its token ids as u32 little-endian. The root is the namespace
(artifact fingerprint and optional salt), so that equal prompts in different namespaces share no blocks. Where an
adapter begins within a sequence, the chain continues from a hash of the adapter, so that the blocks before are shared
with the base model, and those after only with sequences in which the same adapter begins at the same token.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from lockstep.core.groups import ContentKey

HASH_BYTES = 16
ContentNews = tuple[bytes, bool]
"""Hash of a block's content, and whether it was added to the cache or removed."""


class AdapterStart(NamedTuple):
    """Beginning of an adapter in a sequence."""

    position: int
    """Position of the first token that is computed with the adapter; all tokens after it are as well."""
    fingerprint: bytes
    """Digest of the adapter's content."""


def namespace_of(fingerprint: str, cache_salt: str) -> bytes:
    """Root of a model's hashes: its artifact's content, and the caller's salt."""
    return f"{fingerprint}\0{cache_salt}".encode()


def block_hashes(
    namespace: bytes,
    token_ids: Sequence[int],
    block_size: int,
    known: tuple[bytes, ...] = (),
    adapter: AdapterStart | None = None,
) -> tuple[bytes, ...]:
    """Chained hashes of the full blocks of ``token_ids``. This is the only function that reads tokens.

    root = BLAKE2b-128(namespace); hash[i] = BLAKE2b-128(hash[i-1] + u32le token ids of block i), hash[-1] = root.
    In the block in which an adapter begins, hash[i-1] is replaced by BLAKE2b-128(hash[i-1] + fingerprint + u32le offset
    of the adapter's first token in the block).

    Args:
        namespace: artifact fingerprint, plus the ``cache_salt`` if any, separated by the caller.
        token_ids: the prompt, and its answer if there is one, each id below 2**32.
        block_size: tokens per block; a partial last block has no hash.
        known: the hashes of the first blocks, from an earlier call.
        adapter: the adapter with which a part of the tokens is computed; None: the base model computes all.
    """
    pack = struct.Struct(f"<{block_size}I").pack
    parent = known[-1] if known else blake2b(namespace, digest_size=HASH_BYTES).digest()
    hashes = [*known]
    first = -1 if adapter is None else adapter.position // block_size * block_size
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        if start == first and adapter is not None:
            offset = (adapter.position - start).to_bytes(4, "little")
            parent = blake2b(parent + adapter.fingerprint + offset, digest_size=HASH_BYTES).digest()
        block = pack(*token_ids[start : start + block_size])
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)


class PrefixCache:
    """Key of a content to its block, or to several blocks in a group whose columns have several parts.

    The first blocks published under a key keep it until their content is removed.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[ContentKey, int] = {}
        """First block of each content."""
        self._further: dict[int, tuple[int, ...]] = {}
        """First block to the further blocks of its content, if it has any."""
        self._hash_of: list[ContentKey | None] = [None] * (num_blocks + 1)
        """Key by block, in a list instead of a dictionary, since a pool of small blocks has tens of thousands."""
        self._pins: dict[ContentKey, int] = {}
        self._pinned: set[int] = set()
        self.num_published = 0
        """Number of contents published since the start."""
        self.news: list[ContentNews] | None = None
        """Changes since the last ``drain_contents``; None: they are not collected."""

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def blocks(self) -> Mapping[int, ContentKey]:
        """Published blocks, held or not, with their keys, in order of publishing. Each call creates a new mapping."""
        return {block: key for key, first in self._block_of.items() for block in self._all(first)}

    @property
    def hashes(self) -> Sequence[ContentKey | None]:
        """Key of each block by its number; None: it is not published."""
        return self._hash_of

    @property
    def pinned(self) -> Container[int]:
        """Published blocks of pinned content. Callers cannot iterate over it, because the order of a set is not
        fixed."""
        return self._pinned

    def find(self, key: ContentKey) -> tuple[int, ...]:
        """The blocks with this content; empty: there are none."""
        first = self._block_of.get(key)
        return () if first is None else self._all(first)

    def _all(self, first: int) -> tuple[int, ...]:
        """All blocks of a content."""
        return (first, *self._further.get(first, ()))

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

    def publish_column(self, blocks: Sequence[int], key: ContentKey) -> None:
        """Make the blocks of a column available under a key, unless others have the same content already."""
        if key in self._block_of or self._hash_of[blocks[0]] is not None:
            return
        self._block_of[key] = blocks[0]
        if len(blocks) > 1:
            self._further[blocks[0]] = tuple(blocks[1:])
        for block in blocks:
            self._hash_of[block] = key
            self._note(block, key)
        self.num_published += 1

    def _note(self, block: int, key: ContentKey) -> None:
        """Record a published block in the collected changes and in the pins."""
        if self.news is not None and isinstance(key, bytes):
            self.news.append((key, True))
        if key in self._pins:
            self._pinned.add(block)

    def forget(self, *blocks: int) -> list[int]:
        """Remove the content of these blocks. Returns the further blocks that this content had."""
        further: list[int] = []
        block_of, hash_of = self._block_of, self._hash_of
        for block in blocks:
            key = hash_of[block]
            if key is None:
                assert block in further, f"block {block} is not published"
                further.remove(block)  # another one of its column came before it
                continue
            hash_of[block] = None
            first = block_of.pop(key)
            if self._further:
                others = [each for each in (first, *self._further.pop(first, ())) if each != block]
                for each in others:
                    hash_of[each] = None
                further += others
            if self.news is not None and isinstance(key, bytes):
                self.news.append((key, False))
        if self._pinned:
            self._pinned.difference_update(blocks, further)
        return further

    def pin(self, keys: Sequence[ContentKey]) -> list[int]:
        """Add a pin to each content, published or not. Returns the published blocks."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
        blocks = [block for key in keys for block in self.find(key)]
        self._pinned.update(blocks)
        return blocks

    def unpin(self, keys: Sequence[ContentKey]) -> list[int]:
        """Remove a pin from each content. Returns the published blocks that have no pin left."""
        blocks: list[int] = []
        for key in keys:
            count = self._pins.pop(key, 0)
            if count > 1:
                self._pins[key] = count - 1
            else:
                blocks.extend(self.find(key))
        self._pinned.difference_update(blocks)
        return blocks

    def clear(self) -> None:
        """Remove every block. Pins stay, for content that is published later."""
        if self.news is not None:
            self.news.extend([(key, False) for key in self._block_of if isinstance(key, bytes)])
        self._block_of.clear()
        self._further.clear()
        self._hash_of = [None] * len(self._hash_of)
        self._pinned.clear()

    @property
    def pins(self) -> Mapping[ContentKey, int]:
        """Number of pins by content, published or not."""
        return self._pins

    def restore(self, published: Iterable[tuple[int, ContentKey]], pins: Iterable[tuple[ContentKey, int]]) -> None:
        """Restore the content of blocks, first published first, and the pins."""
        columns: dict[ContentKey, list[int]] = {}
        for block, key in published:
            columns.setdefault(key, []).append(block)
        self._block_of = {key: blocks[0] for key, blocks in columns.items()}
        self._further = {blocks[0]: tuple(blocks[1:]) for blocks in columns.values() if len(blocks) > 1}
        self._hash_of = [None] * len(self._hash_of)
        for block, key in self.blocks.items():
            self._hash_of[block] = key
        self._pins = dict(pins)
        self._pinned = {block for key in self._pins for block in self.find(key)}

    def check(self) -> None:
        """Assert that both directions of the mapping agree."""
        published = {block: key for block, key in enumerate(self._hash_of) if key is not None}
        assert self.blocks == published, "keys and blocks disagree"
        assert self._further.keys() <= set(self._block_of.values()), "further blocks without a first one"
        assert self._pinned == {block for block, key in published.items() if key in self._pins}, "a pin is lost"
