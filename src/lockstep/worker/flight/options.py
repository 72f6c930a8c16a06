"""Options of a recording, apart from the recorder: command lines and supervisors know them without what it imports."""

from __future__ import annotations

import msgspec

DEFAULT_MAX_MB = 256


class TraceOptions(msgspec.Struct, frozen=True):
    """What is recorded, and where."""

    directory: str
    max_bytes: int = DEFAULT_MAX_MB << 20
    """Of all recordings in the directory together; the oldest files go first."""
    has_content: bool = False
    """Also prompts and answers, so that `replay --execute` can compute them again."""
