"""Which store a server's options ask for."""

from __future__ import annotations

from pathlib import Path

from lockstep.server.options import ServerOptions
from lockstep.server.responses.sqlite import SqliteStore
from lockstep.server.responses.store import MemoryStore, ResponseStore, StoreLimits


def open_store(options: ServerOptions) -> ResponseStore:
    """The store of a server; whoever opens it closes it.

    Raises:
        ConfigError: the file of ``responses_db`` cannot be used.
    """
    if options.responses_db is None:
        return memory_store(options)
    return SqliteStore(Path(options.responses_db), _limits(options))


def memory_store(options: ServerOptions) -> MemoryStore:
    """A store that is there at once."""
    return MemoryStore(_limits(options))


def _limits(options: ServerOptions) -> StoreLimits:
    return StoreLimits(options.max_stored_responses)
