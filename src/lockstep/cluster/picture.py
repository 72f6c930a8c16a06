"""The cluster as a snapshot: read from what there is, changing nothing."""

from __future__ import annotations

import time

import msgspec

from lockstep.cluster.budget import Budget
from lockstep.cluster.held import Held
from lockstep.cluster.models import Model
from lockstep.cluster.planner import Phase
from lockstep.cluster.snapshot import BudgetSnapshot, ClusterSnapshot, EngineSnapshot, ModelSnapshot, ReplicaSnapshot
from lockstep.cluster.stage import Stage
from lockstep.worker.messages import Loaded


def picture(stage: Stage, is_replacing: bool, num_ephemeral: int) -> ClusterSnapshot:
    """Everything, at this moment.

    Args:
        is_replacing: whether a manifest is being brought in.
        num_ephemeral: sessions of open calls that named none.
    """
    roster, now_s = stage.roster, time.monotonic()
    models = tuple(_model(stage, model, now_s) for model in roster.models.values())
    named = stage.sessions.snapshot(now_s)
    return ClusterSnapshot(
        cluster=roster.declared.cluster,
        backend=str(stage.options.backend),
        entry=None if roster.router is None else roster.router.entry,
        fallback=roster.declared.fallback,
        is_replacing=is_replacing,
        models=models,
        replicas=tuple(_replica(stage, held) for held in stage.replicas.all()),
        budgets=_budgets(stage),
        sessions=named,
        sessions_live=num_ephemeral + sum(session.state != "dropped" for session in named),
        counters=msgspec.structs.replace(stage.counters),
        transitions=tuple(stage.transitions),
        remotes=tuple(model.remote.snapshot() for model in roster.models.values() if model.remote is not None),
        warnings=(*roster.declared.notes, *stage.warnings()),
    )


def _budgets(stage: Stage) -> tuple[BudgetSnapshot, ...]:
    assert stage.opened is not None
    held = [each for each in stage.replicas.all() if each.phase is not Phase.ABSENT]

    def shown(budget: Budget, used_bytes: int) -> BudgetSnapshot:
        return BudgetSnapshot(budget.name, budget.declared_bytes, budget.effective_bytes, used_bytes)

    table = stage.opened.table
    return (
        shown(table.budgets.gpu, sum(each.bytes for each in held)),
        shown(table.budgets.ram, table.ram_needed_bytes),
    )


def _model(stage: Stage, model: Model, now_s: float) -> ModelSnapshot:
    held, entry = model.held, model.entry
    state = stage.state_of(model, now_s)
    reason = ""
    if held is not None and held.phase is Phase.RESIDENT:
        reason = stage.worker.trouble
    elif state == "failed" and held is not None:
        reason = str(held.failure)
    elif model.remote is not None:
        reason = model.remote.health().reason
    return ModelSnapshot(
        id=model.id,
        set=entry.set,
        source=entry.source,
        tier=model.declared.tier,
        state=state,
        reason=reason,
        priority=entry.priority,
        aliases=entry.aliases,
        replica=None if held is None else held.key,
        size_bytes=0 if held is None else held.bytes,
        max_model_len=None if held is None or held.loaded is None else held.loaded.config.max_model_len,
        num_requests=model.num_requests,
        num_running=model.num_running,
        num_waiting=model.num_waiting,
        num_sessions=model.sessions.num_held,
        max_active_sessions=model.sessions.limit,
        co_activation=entry.co_activation,
        idle_s=None if model.last_used_s is None else now_s - model.last_used_s,
    )


def _replica(stage: Stage, held: Held) -> ReplicaSnapshot:
    loaded = held.loaded
    return ReplicaSnapshot(
        key=held.key,
        source=held.spec.source,
        phase=held.phase,
        models=tuple(model.id for model in stage.models_on(held)),
        bytes=held.bytes,
        predicted_bytes=held.spec.predicted_bytes,
        measured_bytes=held.measured_bytes,
        load_s=held.load_s,
        num_busy=held.num_busy,
        num_waiting=len(held.waiting),
        fingerprint=None if loaded is None else loaded.fingerprint,
        deterministic=None if loaded is None or loaded.probe is None else loaded.probe.deterministic,
        failure=None if held.failure is None else str(held.failure),
        engine=None if loaded is None or held.phase is not Phase.RESIDENT else _engine(loaded),
    )


def _engine(loaded: Loaded) -> EngineSnapshot:
    config, geometry, told = loaded.config, loaded.geometry, loaded.environment
    return EngineSnapshot(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=config.num_blocks * geometry.block_size,
        kv_bytes=config.num_blocks * geometry.bytes_per_block,
        host_kv_tokens=config.num_host_blocks * geometry.block_size,
        host_kv_bytes=config.num_host_blocks * geometry.bytes_per_block,
        device=told.get("device", told["executor"]),
        threads=int(told["threads"]) if "threads" in told else None,
        precision=told.get("inference_precision", ""),
        kv_precision=told.get("kv_cache_precision", ""),
        quantize=told.get("quantize", ""),
    )
