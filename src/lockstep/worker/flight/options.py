"""Options of a recording, apart from the recorder: command lines and supervisors know them without what it imports."""

from __future__ import annotations

import msgspec

from lockstep.errors import UsageError

DEFAULT_MAX_MB = 256
MIN_SECRET_BYTES = 16
"""With fewer, all of them could be tried."""
MAX_SECRET_BYTES = 4_096


class TraceOptions(msgspec.Struct, frozen=True):
    """Options of a recording: its place, its bound, its content and its key."""

    directory: str
    max_bytes: int = DEFAULT_MAX_MB << 20
    """Of all recordings in the directory together; the oldest files go first."""
    has_content: bool = False
    """Also prompts and answers, so that `replay --execute` can compute them again."""
    key_file: str = ""
    """Holds the secret of its digests (`lockstep.worker.flight.content`); empty: each recording has its own. A file,
    since anybody may read what a process is started with."""
    num_files: int = 8
    """A recording is kept in about this many files, of which the oldest is deleted for the newest."""
    max_queued_bytes: int = 16 << 20
    """Maximum bytes of chunks that wait for the disk; further chunks are lost."""
    max_contents: int = 1 << 18
    """Maximum number of block hashes that the entries of a file may refer to; with more, the next file begins, with
    those that are in use. The beginning of a file of routes may have twice as many."""
    flush_interval_s: float = 1.0
    """Interval in seconds at which recorded steps are written to the disk."""
    list_interval_s: float = 1.0
    """Interval in seconds at which a file that grows is listed in the folder's manifest."""
    retry_s: float = 5.0
    """Pause in seconds after a failure to write, until the next file is tried."""

    def share(self, parts: int) -> TraceOptions:
        """Options of a recording beside this one: without content, with one part in so many of its bytes."""
        return msgspec.structs.replace(self, max_bytes=self.max_bytes // parts, has_content=False)

    def secret(self) -> bytes:
        """The operator's secret, without white space around it; empty: there is none.

        Raises:
            UsageError: the file cannot be read, or holds too little or too much to be one.
        """
        if not self.key_file:
            return b""
        try:
            with open(self.key_file, "rb") as file:
                secret = file.read(MAX_SECRET_BYTES + 1).strip()
        except OSError as error:
            raise UsageError(f"{self.key_file}: the recording's key cannot be read: {error.strerror}") from error
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise UsageError(
                f"{self.key_file}: the recording's key has {len(secret)} bytes; it must have {MIN_SECRET_BYTES} to "
                f"{MAX_SECRET_BYTES}, as `openssl rand -hex 32` gives them"
            )
        return secret
