"""Batch API: executes files of requests in idle time, and continues after a restart."""

from lockstep.server.batches.answering import InProcessServer, run_job
from lockstep.server.batches.input_file import CheckedInput, checked_input
from lockstep.server.batches.job import BatchJob, write_results
from lockstep.server.batches.journal import Journal, sync_folder
from lockstep.server.batches.routes import router
from lockstep.server.batches.runner import BatchRunner
from lockstep.server.batches.store import BatchStore, open_batch_store

__all__ = [
    "BatchJob",
    "BatchRunner",
    "BatchStore",
    "CheckedInput",
    "InProcessServer",
    "Journal",
    "checked_input",
    "open_batch_store",
    "router",
    "run_job",
    "sync_folder",
    "write_results",
]
