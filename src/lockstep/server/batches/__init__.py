"""Batch API: executes files of requests in idle time, and continues after a restart."""

from lockstep.server.batches.answering import InProcessServer, run_job
from lockstep.server.batches.input_file import CheckedInput, checked_input
from lockstep.server.batches.job import BatchJob
from lockstep.server.batches.journal import Journal, durable_file
from lockstep.server.batches.routes import router
from lockstep.server.batches.runner import BatchRunner
from lockstep.server.batches.store import BatchStore

__all__ = [
    "BatchJob",
    "BatchRunner",
    "BatchStore",
    "CheckedInput",
    "InProcessServer",
    "Journal",
    "checked_input",
    "durable_file",
    "router",
    "run_job",
]
