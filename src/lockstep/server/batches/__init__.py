"""The Batch API: files of requests that are answered when nobody waits, and that survive a restart."""

from lockstep.server.batches.routes import router
from lockstep.server.batches.runner import BatchRunner
from lockstep.server.batches.store import BatchStore, open_batch_store

__all__ = ["BatchRunner", "BatchStore", "open_batch_store", "router"]
