"""Responses API: stored conversations, returned as items and events."""

from lockstep.server.responses.routes import router
from lockstep.server.responses.store import ResponseStore, memory_store, open_store

__all__ = ["ResponseStore", "memory_store", "open_store", "router"]
