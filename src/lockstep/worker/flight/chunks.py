"""Chunks of a recording's files: entries as bytes, under a chain of digests.

A file is a sequence of zstd frames with checksums (``zstd -d`` reads it). A frame holds whole *chunks*: an unsigned
number of four bytes, little-endian, so many bytes of msgpack, an array of entries, and a digest of 16 bytes.

The digests of a file's chunks are a chain over everything in it, durations, arrivals and contents included: each is
BLAKE2b-128 of its chunk's msgpack, with the digest before it as the key; the first has none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from lockstep.worker.flight.entries import EntryStruct, Header
from lockstep.worker.flight.folder import DIGEST_BYTES, chained

EntryT = TypeVar("EntryT", bound=EntryStruct)
EntryDecoder = msgspec.msgpack.Decoder[list[EntryT]]
"""Decoder of a chunk, for the entries of one kind of recording."""

_LENGTH = struct.Struct("<I")
_ARRAY = struct.Struct(">BI")
_ARRAY_32 = 0xDD
"""Of msgpack: an array with its length in the four bytes that follow, big-endian."""
HEAD_BYTES = _LENGTH.size + _ARRAY.size
"""As many tell a recording."""


class ChangedChunkError(ValueError):
    """A chunk that is not under its file's chain."""


class ChunkWriter:
    """Collects entries into chunks, and keeps the chain of their file."""

    def __init__(self) -> None:
        self._chain = b""
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._entries = bytearray()
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Collected so far."""
        return len(self._entries)

    def put(self, entry: EntryStruct) -> None:
        self._encode_into(entry, self._entries, -1)
        self._count += 1

    def take(self) -> bytes:
        """The chunk; the next one is begun."""
        entries = _ARRAY.pack(_ARRAY_32, self._count) + self._entries
        self._chain = chained(self._chain, entries)
        self.clear()
        return b"".join((_LENGTH.pack(len(entries)), entries, self._chain))

    def begin_file(self, header: Header) -> bytes:
        """The first chunk of a file, which begins its chain; nothing else is collected."""
        assert not self._count, "what was collected belongs to the file before"
        self._chain = b""
        self.put(header)
        return self.take()

    def clear(self) -> None:
        """Forget what was collected."""
        self._entries.clear()
        self._count = 0


class ChunkReader(Generic[EntryT]):
    """Reads the frames of one file in order.

    Args:
        decoder: of the kind of recording.
    """

    def __init__(self, decoder: EntryDecoder[EntryT]) -> None:
        self._chain = b""
        self._decode = decoder.decode
        self.offset = 0
        """Of the chunk in its frame that is being read."""

    def read(self, frame: bytes) -> Iterator[EntryT]:
        """The entries of a frame.

        Raises:
            IndexError: it ends within a chunk; those before were yielded.
            ChangedChunkError: a chunk is not the one that was recorded there; those before were yielded.
            msgspec.MsgspecError: it is no frame of ours.
        """
        self.offset = 0
        data = memoryview(frame)
        while self.offset < len(data):
            begin = self.offset + _LENGTH.size
            if begin > len(data):
                raise IndexError(f"it ends at byte {len(data)}, within the length of a chunk")
            end = begin + _LENGTH.unpack_from(data, self.offset)[0]
            after = end + DIGEST_BYTES
            if after > len(data):
                raise IndexError(f"a chunk ends at byte {after}, and the frame at byte {len(data)}")
            self._follow(data[begin:end], data[end:after])
            yield from self._decode(data[begin:end])
            self.offset = after

    def _follow(self, entries: memoryview, digest: memoryview) -> None:
        if chained(self._chain, entries) != digest:
            raise ChangedChunkError("is not what was recorded there: the digest behind it is of something else")
        self._chain = bytes(digest)


def begins_recording(head: bytes) -> bool:
    """True for the first bytes of a file of ours, decompressed: a chunk of one entry."""
    return head[_LENGTH.size : HEAD_BYTES] == _ARRAY.pack(_ARRAY_32, 1)
