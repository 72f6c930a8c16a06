"""Marked lines: writes JSON lines with a chain of digests, the format of recorded plans and routes.

A `Mark` is a line of its own that follows some lines. It contains their BLAKE2b-64 digest, including newlines, keyed
with the previous mark; the first mark of a file has no key. Any changed, missing or added line is therefore detected.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

MARK_BYTES = 8
MARK_BEGINNING = b'["mark",'
"""Prefix of a line that is a mark."""


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark"):
    """Digest of the lines since the previous mark."""

    digest: str


class Marker:
    """Digest chain of one file."""

    def __init__(self) -> None:
        self._mark = b""
        self._encode = msgspec.json.Encoder().encode

    def marked(self, lines: bytes) -> bytes:
        """Return the lines followed by their mark."""
        return lines + self._encode(Mark(self.follow(lines))) + b"\n"

    def follow(self, lines: bytes) -> str:
        """Extend the chain by some lines; returns the digest of the mark that follows them."""
        self._mark = blake2b(lines, digest_size=MARK_BYTES, key=self._mark).digest()
        return self._mark.hex()
