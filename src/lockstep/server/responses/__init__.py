"""Responses API: stored conversations, returned as items and events."""

from lockstep.server.responses.routes import router
from lockstep.server.responses.store import ResponseStore

__all__ = ["ResponseStore", "router"]
