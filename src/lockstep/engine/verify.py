"""The thorough determinism probe of a model on disk: loads it, tries every circumstance, loads it again."""

from __future__ import annotations

from dataclasses import replace

from lockstep.engine.loading import Progress, load_model
from lockstep.engine.options import LoadOptions
from lockstep.errors import UsageError
from lockstep.executors.base import Executor
from lockstep.executors.probe import ProbeReport, thorough_probe
from lockstep.executors.stub import SCHEME as STUB_SCHEME

MAX_PROBE_BLOCKS = 256
"""Enough for the largest batch of the probe with blocks of 32 tokens."""


def verify_model(source: str, options: LoadOptions, progress: Progress | None = None) -> ProbeReport:
    """Try on this machine whether the model keeps the promise of the same bytes.

    Raises:
        LockstepError: the model cannot be loaded.
    """
    if source.startswith(STUB_SCHEME):
        raise UsageError(f"{source}: a stub computes nothing that could be verified")
    engine = replace(options.engine, num_blocks=MAX_PROBE_BLOCKS, host_kv_memory_bytes=None)
    options = replace(options, engine=engine, probe=False)
    model, config = load_model(source, options, progress)

    def reload() -> Executor:
        return load_model(source, options)[0].executor

    try:
        return thorough_probe(model.executor, config.num_blocks, config.num_host_blocks, reload)
    finally:
        model.close()
