"""Options of a recording. A module of its own, so that command lines do not import the recorder."""

from __future__ import annotations

import msgspec

from lockstep.errors import UsageError

DEFAULT_MAX_MIB = 256
MIN_SECRET_BYTES = 16
"""Minimum length of a secret in bytes; all shorter ones could be tried."""
MAX_SECRET_BYTES = 4_096


class TraceOptions(msgspec.Struct, frozen=True):
    """Options of a recording: directory, size limit, content and key."""

    directory: str
    max_bytes: int = DEFAULT_MAX_MIB << 20
    """Maximum size of all recordings in the directory together, in bytes; the oldest files are deleted first."""
    has_content: bool = False
    """True to also record prompts and answers, so that `replay --execute` can compute them again."""
    key_file: str = ""
    """Path of the file with the secret of the digests (`lockstep.worker.flight.content`); empty: each recording has a
    random one. A file, since other users can read the command line of a process."""
    num_files: int = 8
    """Approximate number of files of a recording; the oldest is deleted to make room for the newest."""
    max_queued_bytes: int = 16 << 20
    """Maximum size of the chunks that wait for the disk, in bytes; further chunks are lost."""
    max_contents: int = 1 << 18
    """Maximum number of block hashes that the entries of a file may refer to; with more, the next file begins, with
    those that are in use. The beginning of a file of routes may have twice as many."""
    flush_interval_s: float = 1.0
    """Interval in seconds at which recorded steps are written to the disk."""
    list_interval_s: float = 1.0
    """Minimum interval in seconds at which a growing file is listed in the folder's manifest."""
    retry_s: float = 5.0
    """Delay in seconds after a failure to write before the next file is tried."""

    def share(self, parts: int) -> TraceOptions:
        """Options of a secondary recording: without content, and with one part in this many of the size limit."""
        return msgspec.structs.replace(self, max_bytes=self.max_bytes // parts, has_content=False)

    def secret(self) -> bytes:
        """Read the operator's secret, without surrounding white space; empty: there is none.

        Raises:
            UsageError: the file cannot be read, or its content is too short or too long for a secret.
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
                f"{MAX_SECRET_BYTES}; create one with `openssl rand -hex 32`"
            )
        return secret
