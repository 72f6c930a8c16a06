"""From one manifest to the next, under load: validate, weigh, load what is new, switch, drain what is gone, unload.

Whatever fails before the switch changes nothing. The switch is one assignment; after it, the new manifest holds,
whatever becomes of the old one's remains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from lockstep.cluster.held import Held
from lockstep.cluster.manifest import Manifest, Tier
from lockstep.cluster.models import Model, Roster
from lockstep.cluster.opening import Opened
from lockstep.cluster.snapshot import Replaced
from lockstep.cluster.stage import REPLACED, Stage


async def replace_manifest(stage: Stage, manifest: Manifest) -> Replaced:
    """Bring a manifest in; one at a time.

    Raises:
        LockstepError: it cannot be served; what was served still is.
    """
    began_s = time.monotonic()
    old = stage.roster
    opened = await stage.open(manifest)
    known = {held.key for held in stage.replicas.all()}
    roster = stage.cast(manifest, opened)
    recalled = _recall(old, roster)
    needed = _resident(roster)
    kept = {held.key for held in _replicas(roster)}
    gone = [held for held in stage.replicas.all() if held.key not in kept]
    try:
        await _load(stage, roster, opened, needed, gone)
        opened = stage.weighed(opened)  # until now the greater of both manifests' budgets held
    except BaseException:
        await _undo(stage, roster, [held for held in _replicas(roster) if held.key not in known], gone, recalled)
        raise
    stage.enter(roster, opened)
    left = [model.remote for model in old.models.values() if model.remote is not None]
    now = [model.remote for model in roster.models.values()]
    num_drained, num_cut = await _drain(stage, gone)
    for remote in left:
        if remote not in now:
            await remote.close()
    added, removed, changed, unchanged = differences(old, roster)
    duration_ms = round((time.monotonic() - began_s) * 1e3, 3)
    return Replaced(
        manifest.cluster, added, removed, changed, unchanged, num_drained, num_cut, duration_ms, manifest.notes
    )


def differences(old: Roster, new: Roster) -> tuple[tuple[str, ...], ...]:
    """Ids of models that are added, removed, changed and unchanged."""
    common = [(model, old.models[model.id]) for model in new.models.values() if model.id in old.models]
    return (
        tuple(id_ for id_ in new.models if id_ not in old.models),
        tuple(id_ for id_ in old.models if id_ not in new.models),
        tuple(now.id for now, before in common if now is not before),
        tuple(now.id for now, before in common if now is before),
    )


def _recall(old: Roster, new: Roster) -> list[Held]:
    """Let replicas that were unloaded by hand come back for models that have changed; which ones those are."""
    recalled = [
        model.held
        for model in new.models.values()
        if model.held is not None and model.held.is_dismissed and old.models.get(model.id) is not model
    ]
    for held in recalled:
        held.is_dismissed = False
    return recalled


async def _load(stage: Stage, roster: Roster, opened: Opened, needed: Sequence[Held], gone: Sequence[Held]) -> None:
    """Load what the new manifest wants resident, beside the old models if the budget allows both, and read the text
    side of the rest."""
    replicas = stage.replicas
    stage.announce(roster)
    budgets = (replicas.budget_bytes, opened.table.budgets.gpu.effective_bytes)
    bounds = [budget for budget in budgets if budget is not None]
    replicas.budget_bytes = max(bounds) if len(bounds) == len(budgets) else None
    pinned = {held.key: held.bytes for held in replicas.all() if held.is_pinned} | {h.key: h.bytes for h in needed}
    if replicas.budget_bytes is not None and sum(pinned.values()) > replicas.budget_bytes:
        for held in gone:
            replicas.retire(held)
        await asyncio.gather(*(replicas.drain(held, stage.options.drain_s, REPLACED) for held in gone))
    for held in needed:
        held.is_pinned = True
    async with asyncio.TaskGroup() as loads:
        for held in needed:
            loads.create_task(stage.bring(held))
        for held in _replicas(roster):
            if held not in needed:
                loads.create_task(replicas.read_text(held))


async def _undo(
    stage: Stage, roster: Roster, new: Sequence[Held], gone: Sequence[Held], recalled: Sequence[Held]
) -> None:
    """As it was before: what was only half brought in goes, what was taken away comes back."""
    stage.announce(None)
    for held in new:
        stage.replicas.retire(held)
    await asyncio.gather(*(stage.replicas.drain(held, 0.0, REPLACED) for held in new))
    for held in new:
        stage.replicas.forget(held.key)
    for held in gone:
        held.is_retired = False
    for held in recalled:
        held.is_dismissed = True
    old = stage.roster
    for model in roster.models.values():
        if model.remote is not None and model.remote not in [m.remote for m in old.models.values()]:
            await model.remote.close()
    assert stage.opened is not None
    stage.enter(old, stage.opened)
    await asyncio.gather(*(stage.bring(held) for held in _resident(old)), return_exceptions=True)


async def _drain(stage: Stage, gone: Sequence[Held]) -> tuple[int, int]:
    """Let what is gone answer what it has begun; how many calls came to their own end, and how many were cut."""
    num_busy = sum(held.num_busy for held in gone)
    for held in gone:
        stage.replicas.retire(held)
    cut = await asyncio.gather(*(stage.replicas.drain(held, stage.options.drain_s, REPLACED) for held in gone))
    for held in gone:
        stage.replicas.forget(held.key)
    return num_busy - sum(cut), sum(cut)


def _replicas(roster: Roster) -> list[Held]:
    return list(dict.fromkeys(m.held for m in roster.models.values() if m.held is not None))


def _resident(roster: Roster) -> list[Held]:
    """Replicas of models that are declared resident, but for those that were unloaded by hand."""

    def is_resident(model: Model) -> bool:
        return model.held is not None and model.entry.tier is Tier.RESIDENT and not model.held.is_dismissed

    return list(dict.fromkeys(m.held for m in roster.models.values() if is_resident(m) and m.held is not None))
