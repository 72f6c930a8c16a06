"""Chunks of a recording's files: entries as bytes, under a chain of digests.

A file is a sequence of zstd frames with checksums (``zstd -d`` reads it). A frame contains whole *chunks*. A chunk is
the length of its msgpack as an unsigned number of four bytes, little-endian; the msgpack, an array of entries; and a
digest of 16 bytes.

The digests of a file's chunks are a chain over everything in it, including durations, arrivals and contents: each is
the BLAKE2b-128 of its chunk's msgpack, with the previous digest as the key; the first has no key.
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
"""Marker byte of a msgpack array whose length follows in four bytes, big-endian."""
HEAD_BYTES = _LENGTH.size + _ARRAY.size
"""Number of leading bytes, decompressed, that `begins_recording` needs."""


class ChangedChunkError(ValueError):
    """A chunk that does not match the chain of its file."""


class ChunkWriter:
    """Collects entries into chunks, and keeps the chain of their file."""

    def __init__(self) -> None:
        self._chain = b""
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._entries = bytearray()
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Number of collected bytes."""
        return len(self._entries)

    def put(self, entry: EntryStruct) -> None:
        self._encode_into(entry, self._entries, -1)
        self._count += 1

    def take(self) -> bytes:
        """Return the collected entries as a chunk, and begin the next one."""
        entries = _ARRAY.pack(_ARRAY_32, self._count) + self._entries
        self._chain = chained(self._chain, entries)
        self.clear()
        return b"".join((_LENGTH.pack(len(entries)), entries, self._chain))

    def begin_file(self, header: Header) -> bytes:
        """Return the first chunk of a file, which begins its chain; no entries may be collected before."""
        assert not self._count, "the collected entries belong to the previous file"
        self._chain = b""
        self.put(header)
        return self.take()

    def clear(self) -> None:
        """Discard the collected entries."""
        self._entries.clear()
        self._count = 0


class ChunkReader(Generic[EntryT]):
    """Reads the frames of one file in order.

    Args:
        decoder: decoder for the entries of this kind of recording.
    """

    def __init__(self, decoder: EntryDecoder[EntryT]) -> None:
        self._chain = b""
        self._decode = decoder.decode
        self.offset = 0
        """Offset of the chunk that is being read in its frame, in bytes."""

    def read(self, frame: bytes) -> Iterator[EntryT]:
        """Yield the entries of a frame.

        Raises:
            IndexError: the frame ends within a chunk; the entries of earlier chunks were yielded.
            ChangedChunkError: a chunk does not match the chain; the entries of earlier chunks were yielded.
            msgspec.MsgspecError: the data is not a frame of a recording.
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
            self._check_digest(data[begin:end], data[end:after])
            yield from self._decode(data[begin:end])
            self.offset = after

    def _check_digest(self, entries: memoryview, digest: memoryview) -> None:
        if chained(self._chain, entries) != digest:
            raise ChangedChunkError("differs from what was recorded: its digest does not match")
        self._chain = bytes(digest)


def begins_recording(head: bytes) -> bool:
    """True if a decompressed file that begins with these bytes is a recording: its first chunk has one entry."""
    return head[_LENGTH.size : HEAD_BYTES] == _ARRAY.pack(_ARRAY_32, 1)
