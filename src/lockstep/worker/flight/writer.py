"""Writer of a recording: puts entries into chunks of files, each file between a header and an end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from lockstep.executors.machine import machine_name
from lockstep.system import SYSTEM, System
from lockstep.version import __version__
from lockstep.worker.flight.chunks import ChunkWriter
from lockstep.worker.flight.entries import SCHEMA_VERSION, Closed, End, Header
from lockstep.worker.flight.files import TraceFiles
from lockstep.worker.flight.options import TraceOptions

Arguments = ParamSpec("Arguments")


def guarded(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a recorder's method so that an exception ends the recording instead of a request.

    The class needs a method ``give_up``.
    """

    @wraps(method)
    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            method(*arguments, **named)
        except Exception:  # requests continue after any exception
            arguments[0].give_up()  # type: ignore[attr-defined]  # self

    return call


class RecordingWriter:
    """Writes the entries of steps, of plans or of routes. For one thread.

    Args:
        suffix: suffix of the file names.
        key_name: name of the key of the digests; empty: there are no digests.
    """

    def __init__(self, options: TraceOptions, suffix: str, key_name: str = "", system: System = SYSTEM) -> None:
        self.files = TraceFiles(options, suffix, system)
        self.chunk = ChunkWriter()
        """Entries that are not queued for the disk yet."""
        self._has_content = options.has_content
        self._key_name = key_name

    def begin(self, put_state: Callable[[], None], needs: tuple[str, ...] = (), gap: str = "") -> None:
        """Begin a file; the previous one has ended.

        Args:
            put_state: adds the entries that make the file readable without the files before it.
            needs: names of files in the folder without which this one cannot be served.
            gap: reason why the part before this file was not recorded, if it was not a write error.
        """
        files = self.files
        header = Header(
            SCHEMA_VERSION,
            __version__,
            files.run,
            files.num_files + 1,
            self._has_content,
            machine_name(),
            key_name=self._key_name,
            gap=files.gap or gap,
        )
        beginning = self.chunk.begin_file(header)
        put_state()
        files.begin(beginning + (self.chunk.take() if self.chunk.num_bytes else b""), needs)

    def flush(self, needs: tuple[str, ...] = ()) -> None:
        """Queue the collected entries for the disk."""
        if self.chunk.num_bytes:
            self.files.put(self.chunk.take(), needs)

    def end(self, *, goes_on: bool, engines: tuple[Closed, ...] = (), needs: tuple[str, ...] = ()) -> None:
        """End the open file, if any."""
        if self.files.is_open:
            self.chunk.put(End(engines, goes_on))
            self.flush(needs)
        self.chunk.clear()

    def close(self) -> None:
        """End the recording, and write the queued chunks within a limited time."""
        self.end(goes_on=False)
        self.files.close()
