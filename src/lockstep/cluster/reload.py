"""Reload: replaces the manifest under load: check the new one, load new models, switch, and drain the models that are
gone.

A failure before the switch changes nothing. The switch is one assignment. After it the new manifest applies, even if
draining the old models fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from lockstep.cluster.manifest import Hosts, Manifest, Tier
from lockstep.cluster.manifest_file import dump
from lockstep.cluster.manifest_permissions import PermissionCheck
from lockstep.cluster.models import ModelSet
from lockstep.cluster.multi_host import MultiHostBackend
from lockstep.cluster.replica_state import ReplicaState
from lockstep.cluster.resolve import OpenedManifest
from lockstep.cluster.snapshot import Replaced
from lockstep.cluster.state import REPLACED, ClusterState
from lockstep.engine.options import AdapterSource
from lockstep.errors import InvalidParameterError, LockstepError, UnavailableError

log = logging.getLogger(__name__)
_Offered = tuple[ReplicaState, tuple[AdapterSource, ...]]
"""A replica, and the adapters that its requests can name until the switch is complete."""


class Reloads:
    """Manifest replacements, one at a time. With several hosts, one gateway replaces the manifest, and then all others
    follow.

    Args:
        read: parses a manifest that another gateway applied.
    """

    def __init__(self, state: ClusterState, read: Callable[[str], Manifest]) -> None:
        self._state = state
        self._read = read
        self._replacing: asyncio.Task[Replaced] | None = None
        self._following: asyncio.Task[None] | None = None
        """Replacement by a manifest that another gateway applied."""

    @property
    def is_replacing(self) -> bool:
        return any(task is not None and not task.done() for task in self.tasks)

    @property
    def tasks(self) -> tuple[asyncio.Task[Replaced] | asyncio.Task[None] | None, ...]:
        """Running replacements."""
        return self._replacing, self._following

    def check(self, manifest: Manifest) -> None:
        """Reject a manifest that cannot be applied now.

        Raises:
            UnavailableError: another manifest is being applied.
            InvalidParameterError: the manifest needs a restart of the server.
        """
        before = self._state.models.declared.hosts
        if before is not None and manifest.hosts is not None and _links(before) != _links(manifest.hosts):
            raise InvalidParameterError(
                "hosts.ray, secret, tls and allow_plain cannot change while the cluster runs; restart it"
            )
        if (before is None) != (manifest.hosts is None):
            what = "added to" if before is None else "removed from"
            raise InvalidParameterError(
                f"`hosts:` cannot be {what} the manifest of a running cluster; restart it with this manifest"
            )
        if self.is_replacing:
            raise UnavailableError("another manifest is being applied; try again when that is done")

    async def replace(
        self, manifest: Manifest, permission_check: PermissionCheck | None, opened: OpenedManifest | None = None
    ) -> Replaced:
        """Apply a manifest that was checked. Continues if the caller disconnects.

        Args:
            opened: the manifest as it was opened; None: its sources are opened first.
            permission_check: permissions of a sender over the network, which limit what errors show; None: the operator
                sent it.

        Raises:
            LockstepError: the manifest cannot be served; the previous one stays in effect.
        """
        hosts = self._state.hosts
        work = (
            self._replace(manifest, permission_check, opened)
            if hosts is None
            else self._replace_on_all(hosts, manifest, permission_check)
        )
        self._replacing = asyncio.get_running_loop().create_task(work)
        return await asyncio.shield(self._replacing)

    def follow(self, text: str) -> None:
        """Apply a manifest that another gateway applied. During a replacement it is ignored; it is offered again
        later."""
        if not self.is_replacing and self._state.is_booted and self._state.hosts is not None:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._state.hosts, text))

    async def _follow(self, hosts: MultiHostBackend, text: str) -> None:
        try:
            await self._replace(await self._state.system.run_in_thread(partial(self._read, text)), None)
        except LockstepError as error:
            log.error("a manifest applied by another gateway cannot be served here: %s", error)
        hosts.client.manifest_applied(text)

    async def _replace_on_all(
        self, hosts: MultiHostBackend, manifest: Manifest, permission_check: PermissionCheck | None
    ) -> Replaced:
        await hosts.client.begin_replace()
        text: str | None = None
        try:
            replaced = await self._replace(manifest, permission_check)
            text = dump(manifest)
        finally:
            await hosts.client.end_replace(text)
        return replaced

    async def _replace(
        self, manifest: Manifest, permission_check: PermissionCheck | None, opened: OpenedManifest | None = None
    ) -> Replaced:
        began_s, events = self._state.now_s(), self._state.events
        events.emit("manifest_replacing", cluster=manifest.cluster)
        reason: str | None = None
        try:
            return await replace_manifest(self._state, manifest, opened)
        except BaseException as error:
            first = first_of(error)
            shown = first if permission_check is None else permission_check.redacted(first)
            if shown is not first:
                log.warning("a manifest sent over HTTP was not applied: %s", first)
            reason = str(shown)
            raise shown from None
        finally:
            cluster = self._state.models.declared.cluster
            duration_ms = round((self._state.now_s() - began_s) * 1e3, 3)
            events.emit("manifest_replaced", cluster=cluster, error=reason, duration_ms=duration_ms)


async def replace_manifest(state: ClusterState, manifest: Manifest, opened: OpenedManifest | None = None) -> Replaced:
    """Apply a manifest. Only one call runs at a time.

    Raises:
        LockstepError: the manifest cannot be served; the previous one stays in effect.
    """
    began_s = state.now_s()
    old = state.models
    opened = opened or await state.open(manifest)
    known = set(state.replicas.all())
    models = state.build(manifest, opened)
    restored = _restore_dismissed(old, models)
    gone = [replica for replica in state.replicas.all() if replica not in models.replicas]
    try:
        await _load(state, models, opened, gone)
        offered = await _offer_adapters(state, opened)
        opened = state.weighed(opened)  # until now the larger budget of the two manifests applied
    except BaseException:
        await _undo(state, models, [replica for replica in models.replicas if replica not in known], gone, restored)
        raise
    state.apply(models, opened)
    await _use_adapters(state, offered)
    num_busy = sum(replica.num_busy for replica in gone)
    num_cut = await _remove(state, gone, state.options.drain_s)
    await _close_remotes(old, models)
    added, removed, changed, unchanged = differences(old, models)
    duration_ms = round((state.now_s() - began_s) * 1e3, 3)
    num_drained = num_busy - num_cut
    return Replaced(
        manifest.cluster, added, removed, changed, unchanged, num_drained, num_cut, duration_ms, manifest.notes
    )


async def _offer_adapters(state: ClusterState, opened: OpenedManifest) -> list[_Offered]:
    """Add the new adapters to loaded replicas, whose requests may still use the old ones. Returns these replicas with
    their new and old adapters.

    Raises:
        LockstepError: a replica cannot use its new adapters.
    """
    changed: list[_Offered] = []
    for spec in {spec.key: spec for spec in opened.specs.values()}.values():
        replica, new = state.replicas.of(spec), spec.options.adapters
        old = replica.spec.options.adapters
        if old != new:
            names = [each.name for each in new]
            both = (*new, *(each for each in old if each.name not in names))
            changed.append((replica, both))
            await state.replicas.use_adapters(replica, both)
    return changed


async def _use_adapters(state: ClusterState, offered: Sequence[_Offered]) -> None:
    """Give replicas exactly the adapters of their specs."""
    for replica, adapters in offered:
        if adapters != replica.spec.options.adapters:
            await state.replicas.use_adapters(replica, replica.spec.options.adapters)


def _links(hosts: Hosts) -> tuple[object, ...]:
    """Options of ``hosts:`` that determine the Ray cluster and the connections."""
    return hosts.ray, hosts.secret, hosts.tls_ca, hosts.tls_cert, hosts.tls_key, hosts.allows_plain


def differences(old: ModelSet, new: ModelSet) -> tuple[tuple[str, ...], ...]:
    """Ids of models that were added, removed, changed and left unchanged."""
    common = [(model, old.by_id[model.id]) for model in new.by_id.values() if model.id in old.by_id]
    return (
        tuple(id_ for id_ in new.by_id if id_ not in old.by_id),
        tuple(id_ for id_ in old.by_id if id_ not in new.by_id),
        tuple(now.id for now, before in common if now is not before),
        tuple(now.id for now, before in common if now is before),
    )


def _restore_dismissed(old: ModelSet, new: ModelSet) -> list[ReplicaState]:
    """Allow replicas that an operator unloaded to load again for changed models; returns these replicas."""
    changed = [model for model in new.by_id.values() if old.by_id.get(model.id) is not model]
    restored = [model.replica for model in changed if model.replica is not None and model.replica.is_dismissed]
    for replica in restored:
        replica.is_dismissed = False
    return restored


async def _load(state: ClusterState, models: ModelSet, opened: OpenedManifest, gone: Sequence[ReplicaState]) -> None:
    """Load the new manifest's resident models, beside the old ones if the budget allows, and read the tokenizers of the
    others."""
    replicas, needed = state.replicas, _resident(models)
    state.announce(models)
    budgets = (replicas.budget_bytes, opened.table.budgets.gpu.effective_bytes)
    bounds = [budget for budget in budgets if budget is not None]
    replicas.budget_bytes = max(bounds) if len(bounds) == len(budgets) else None
    pinned = {replica for replica in replicas.all() if replica.is_pinned} | set(needed)
    if replicas.budget_bytes is not None and sum(replica.bytes for replica in pinned) > replicas.budget_bytes:
        await _drain(state, gone, state.options.drain_s)
    for replica in needed:
        replica.is_pinned = True
    async with asyncio.TaskGroup() as loads:
        for replica in (*needed, *(other for other in models.replicas if other not in needed)):
            loads.create_task(state.bring_up(replica) if replica in needed else replicas.read_text(replica))


async def _undo(
    state: ClusterState,
    models: ModelSet,
    new: Sequence[ReplicaState],
    gone: Sequence[ReplicaState],
    restored: Sequence[ReplicaState],
) -> None:
    """Restore the previous state: remove replicas of the new manifest and load those of the old one again."""
    state.announce(None)
    await _remove(state, new, 0.0)
    for replica in gone:
        replica.is_retired = False
    for replica in restored:
        replica.is_dismissed = True
    old = state.models
    await _close_remotes(models, old)
    assert state.opened is not None
    state.apply(old, state.opened)
    with suppress(LockstepError):  # the previous adapters were in use until now
        for replica in old.replicas:
            if replica.spec.options.has_adapters:
                await state.replicas.use_adapters(replica, replica.spec.options.adapters)
    await asyncio.gather(*(state.bring_up(replica) for replica in _resident(old)), return_exceptions=True)


async def _remove(state: ClusterState, replicas: Sequence[ReplicaState], limit_s: float) -> int:
    """Let replicas finish their open calls, then remove them; returns the number of aborted calls."""
    num_cut = await _drain(state, replicas, limit_s)
    for replica in replicas:
        state.replicas.forget(replica.key)
    return num_cut


async def _drain(state: ClusterState, replicas: Sequence[ReplicaState], limit_s: float) -> int:
    for replica in replicas:
        state.replicas.retire(replica)
    return sum(await asyncio.gather(*(state.replicas.drain(replica, limit_s, REPLACED) for replica in replicas)))


async def _close_remotes(models: ModelSet, others: ModelSet) -> None:
    """Close the remote models of one manifest that another one does not have."""
    kept = [model.remote for model in others.by_id.values()]
    for model in models.by_id.values():
        if model.remote is not None and model.remote not in kept:
            await model.remote.close()


def _resident(models: ModelSet) -> list[ReplicaState]:
    """Replicas of models that are declared resident, except those that an operator unloaded."""
    declared = [model.replica for model in models.by_id.values() if model.entry.tier is Tier.RESIDENT]
    return list(dict.fromkeys(replica for replica in declared if replica is not None and not replica.is_dismissed))


def first_of(error: BaseException) -> BaseException:
    """First error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
