"""Adapters of recordings: finds the adapters of an engine's recorded requests, and the room that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.artifacts.model import Adapter
from lockstep.errors import TraceError
from lockstep.replay.trace import Trace
from lockstep.worker.flight.entries import EngineEntry, RequestDigest


def recorded_adapters(trace: Trace, engine: EngineEntry, given: Sequence[Adapter]) -> dict[int, Adapter]:
    """Adapters of an engine's requests, under their recorded names, by the id of each request's first sequence.

    Args:
        given: the adapters at hand, which are found by their fingerprints.

    Raises:
        TraceError: an adapter of the recording is not among the given ones.
    """
    by_fingerprint = {adapter.fingerprint: adapter for adapter in given}
    by_name = {adapter.name: adapter for adapter in given}
    found: dict[int, Adapter] = {}
    for entry in trace.entries():
        if not isinstance(entry, RequestDigest) or entry.engine != engine.number or not entry.adapter_fingerprint:
            continue
        adapter = by_fingerprint.get(entry.adapter_fingerprint)
        if adapter is None:
            other = by_name.get(entry.adapter)
            missing = "none of the given adapters has it" if given else "it is not given"
            has = f"the given one has {other.fingerprint}" if other else missing
            raise TraceError(
                f"{trace.files[0].parent}: the recording uses adapter {entry.adapter!r} with fingerprint "
                f"{entry.adapter_fingerprint}; {has}: pass --lora-modules {entry.adapter}=PATH"
            )
        found[entry.seq_id] = replace(adapter, name=entry.adapter)
    return found
