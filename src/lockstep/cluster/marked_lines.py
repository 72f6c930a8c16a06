"""Lines of JSON under a chain of marks: what plans and routes are recorded as.

Behind some lines comes a `Mark`, a line of its own: the BLAKE2b-64 of them, each with its newline, with the mark before
as the key; the first mark of a file has none. So whatever line of a file is changed, left out or added is found.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

MARK_BYTES = 8
MARK_BEGINNING = b'["mark",'
"""Beginning of a line that is a mark."""


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark"):
    """Digest of the lines above, up to the mark before."""

    digest: str


class Marker:
    """The chain of one file."""

    def __init__(self) -> None:
        self._mark = b""
        self._encode = msgspec.json.Encoder().encode

    def marked(self, lines: bytes) -> bytes:
        """The lines and their mark."""
        return lines + self._encode(Mark(self.follow(lines))) + b"\n"

    def follow(self, lines: bytes) -> str:
        """Go on by some lines; the digest of the mark behind them."""
        self._mark = blake2b(lines, digest_size=MARK_BYTES, key=self._mark).digest()
        return self._mark.hex()
