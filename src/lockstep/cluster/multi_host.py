"""Multi-host backend: reports a gateway's demand for a manifest's models, and applies the controller's state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.artifacts.task import MERGE
from lockstep.cluster.controller import Controller
from lockstep.cluster.controller_client import ControllerClient, ControllerLink
from lockstep.cluster.controller_state import ControllerState, GatewayDemand, GatewayReport
from lockstep.cluster.manifest import Hosts, Manifest
from lockstep.cluster.manifest_file import dump
from lockstep.cluster.planner import Action, Observed, PlanPolicy
from lockstep.cluster.replica_state import ReplicaState
from lockstep.cluster.sessions import Sessions, SessionUpdate
from lockstep.cluster.snapshot import HostSnapshot, PlaceSnapshot
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.hosts.group import RouteWatcher
from lockstep.hosts.values import Demand, GatewayLimits, GroupOptions, LinkOptions, ReplicaPhase, ReplicaStatus
from lockstep.hosts.workers import GroupLost, HostedWorkers
from lockstep.worker.link import WorkerOptions
from lockstep.worker.remote_clients import read_secret
from lockstep.worker.supervised import Notice

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lockstep.cluster.models import ModelSet
    from lockstep.cluster.replicas import Replicas

Close = Callable[[], Awaitable[None]]
OpenController = Callable[
    [str, str, LinkOptions, WorkerOptions, KVStoreOptions], Awaitable[tuple[ControllerLink, Close]]
]
"""Function that finds or starts the controller of a cluster, and returns it with a function that leaves it.

Arguments: the cluster's name, the address of Ray, the link options, and the options of workers and of their KV stores.
"""


async def ray_controller(
    cluster: str, ray: str, link: LinkOptions, worker: WorkerOptions, kv: KVStoreOptions
) -> tuple[ControllerLink, Close]:
    """Find or start the controller as a Ray actor.

    Raises:
        PlacingError: Ray is not installed or cannot be reached.
    """
    from lockstep.hosts.ray_runtime import CONTROLLER, ReplicaOptions, connect

    worker = replace(worker, prestarted=None)  # belongs to a process of this machine
    runtime = await connect(ray, cluster, ReplicaOptions(link, worker, kv))
    controller: Any = await runtime.named(CONTROLLER, Controller, runtime, worker.trace)
    return controller, runtime.close


class MultiHostBackend:
    """Models of one gateway on several hosts. Event loop only.

    Args:
        manifest: the first manifest to serve; it has ``hosts:``.
        models: returns the current models.
        notify: called with the workers' notices about sessions, and with groups that were lost.
        on_state: called with every new state of the controller.
        sessions: sessions of all models, whose updates are shared with other gateways.
        routes: called with each routing decision.
    """

    def __init__(
        self,
        manifest: Manifest,
        worker: WorkerOptions,
        kv: KVStoreOptions,
        policy: PlanPolicy,
        models: Callable[[], ModelSet],
        notify: Callable[[Notice | GroupLost], None],
        on_state: Callable[[ControllerState], None],
        sessions: Sessions,
        open_controller: OpenController = ray_controller,
        routes: RouteWatcher | None = None,
        limits: GatewayLimits | None = None,
    ) -> None:
        assert manifest.hosts is not None, "a manifest without hosts needs no controller"
        hosts = manifest.hosts
        self._manifest = manifest
        self._worker = worker
        self._system, self._now_s = worker.system, worker.system.now_s
        self._kv = kv
        self._policy = policy
        self._models = models
        self._on_state = on_state
        self._sessions = sessions
        self._open_controller = open_controller
        self._limits = limits or GatewayLimits()
        self._link = link_of(hosts)
        self.workers = HostedWorkers(
            self._link,
            self._options_of,
            notify,
            routes,
            worker,
            self._name_of,
            self._limits,
        )
        self.replicas: Replicas | None = None
        """Replicas that follow the controller's state; the owner sets them before `start`."""
        self._client: ControllerClient | None = None
        self._leave: Close | None = None

    async def start(self) -> str:
        """Join the cluster; returns the manifest that applies.

        Raises:
            UsageError, PlacingError: there is no controller, and none can be started.
        """
        hosts = self._manifest.hosts
        assert hosts is not None, "checked by __init__"
        check_secret_file(hosts.secret)
        name, options = self._manifest.cluster, (self._link, self._worker, self._kv)
        controller, self._leave = await self._open_controller(name, hosts.ray, *options)
        self._client = ControllerClient(
            controller, self.workers, self._report, self._on_state, self._on_sessions, self._system
        )
        return await self._client.start(dump(self._manifest))

    async def close(self) -> None:
        """Leave the controller; placed replicas stay."""
        if self._client is not None:
            await self._client.close()
        if self._leave is not None:
            await self._leave()

    @property
    def client(self) -> ControllerClient:
        assert self._client is not None, "start comes first"
        return self._client

    @property
    def state(self) -> ControllerState:
        """Last state of the controller; an empty state before the first."""
        return ControllerState(-1) if self._client is None else self._client.state

    def decide(self, observed: Observed, now_s: float, policy: PlanPolicy) -> tuple[Action, ...]:
        """Actions that follow from the controller's state."""
        return () if self._client is None else self._client.decide(observed, now_s, policy)

    async def drain(self, name: str, is_drained: bool) -> None:
        """Drain a host, so that its replicas move to other hosts and it gets no new ones, or make it available again.

        Raises:
            HostNotFoundError: no host has this name.
        """
        await self.client.drain(name, is_drained)

    # -- reports ----------------------------------------------------------------------------------------------------

    def _report(self) -> GatewayReport:
        assert self.replicas is not None, "set before start"
        now_s = self._now_s()
        demands = tuple(GatewayDemand(self._demand(each), each.observed(now_s)) for each in self.replicas.all())
        num_open = {
            (key, member.number): num
            for key, group in self.workers.groups.items()
            for member in group.members
            if (num := group.num_open(member.number)) or group.balancer.is_there(member.number)
        }
        sessions = self._sessions.take_updates(now_s)
        return GatewayReport(
            now_s, demands, self.replicas.budget_bytes, self._policy, num_open, sessions, self.state.version
        )

    def _on_sessions(self, news: Sequence[SessionUpdate]) -> None:
        self._sessions.apply_updates(news, self._now_s())

    def _demand(self, replica: ReplicaState) -> Demand:
        spec, wanted = replica.spec, replica.spec.group
        source = MERGE.join(map(_absolute, spec.source.split(MERGE)))
        options = spec.options, replica.priority, wanted.num, wanted.resources, wanted.spread
        return Demand(spec.key, source, *options, self._name_of(spec.key))

    def _name_of(self, key: str) -> str:
        """Name of a group's first model; the key if no model uses the group any more."""
        return next(iter(self._ids_on(key)), key)

    def _ids_on(self, key: str) -> Sequence[str]:
        by_id = self._models().by_id
        return [id_ for id_, model in by_id.items() if model.replica is not None and model.replica.key == key]

    def _options_of(self, key: str) -> GroupOptions:
        assert self.replicas is not None, "set before start"
        return next(replica.spec.group for replica in self.replicas.all() if replica.key == key)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @property
    def report_age_s(self) -> float | None:
        """Age of the controller's last report in seconds; None: it has not reported yet."""
        return None if self._client is None else self._now_s() - self._client.contact_s

    @property
    def _is_current(self) -> bool:
        """True if the controller reports and can list the hosts."""
        age_s = self.report_age_s
        return age_s is not None and age_s < self._limits.max_report_age_s and not self.state.fault

    def hosts(self) -> tuple[HostSnapshot, ...]:
        """All hosts as reported by the controller. Without a current report, hosts count as present if this gateway is
        connected to a replica on them."""
        places = self._statuses()
        linked = {place.node_id for place in places if place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING)}
        is_current, known = self._is_current, self.state.hosts
        hosts = [msgspec.structs.replace(h, is_there=h.is_there if is_current else h.node_id in linked) for h in known]
        return tuple(HostSnapshot.of(host, places) for host in hosts)

    def _statuses(self) -> tuple[ReplicaStatus, ...]:
        """Statuses of all replicas, from the controller's report and this gateway's connections: a replica without a
        connection is not ready."""
        return tuple(map(self._status_of, self.state.places))

    def _status_of(self, place: ReplicaStatus) -> ReplicaStatus:
        group, is_placed = self.workers.groups.get(place.key), place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING)
        if group is None or place.number >= len(group.members):
            is_lost, trouble = is_placed and not self._is_current, "the controller does not report"
        else:
            member = group.members[place.number]
            is_lost, trouble = is_placed and not group.is_linked(member), group.trouble(member)
        if is_lost:
            return msgspec.structs.replace(place, state=ReplicaPhase.UNREACHABLE, reason=trouble, pid=0)
        return place if place.reason or not trouble else msgspec.structs.replace(place, reason=trouble)

    def places(self) -> tuple[PlaceSnapshot, ...]:
        """Snapshots of all replicas with this gateway's use of them."""
        now_s, found = self._now_s(), []
        for place in self._statuses():
            models, group = self._ids_on(place.key), self.workers.groups.get(place.key)
            if group is None or place.number >= len(group.members):
                found.append(PlaceSnapshot.of(place, models))
                continue
            number, balancer = place.number, group.balancer
            found.append(
                PlaceSnapshot.of(
                    place,
                    models,
                    group.members[number].use,
                    now_s=now_s,
                    num_running=group.num_open(number),
                    num_cached_blocks=balancer.num_held(number),
                )
            )
        return tuple(found)

    def warnings(self) -> tuple[str, ...]:
        """Warnings about replicas that get no requests, and about a controller that does not report."""
        found, age_s = [], self.report_age_s
        if not self._is_current and age_s is not None:
            fault = self.workers.fault or "the cluster's controller does not report"
            found.append(f"{fault} (last report {age_s:.0f} s ago); states are from this server's own connections")
        return (*found, *(place.sentence for place in self.places() if place.sentence))


def _absolute(source: str) -> str:
    """A path in absolute form, as on all hosts; another source as it is."""
    is_path = "://" not in source and Path(source).expanduser().exists()
    return str(Path(source).expanduser().absolute()) if is_path else source


def check_secret_file(name: str) -> None:
    """Check that the secret file exists. The default file is created if it is missing.

    Raises:
        UsageError: the file is missing or cannot be used.
        PlacingError: the file cannot be created.
    """
    if name == Hosts().secret:
        from lockstep.hosts.ray_connection import made_secret

        path, is_new = made_secret(name)
        if is_new:
            log.warning("%s: created a secret for gateways and workers; copy the file to each host", path)
    read_secret(name)


def link_of(hosts: Hosts) -> LinkOptions:
    """Link options of a manifest."""
    return LinkOptions(hosts.secret, hosts.tls_ca, hosts.tls_cert, hosts.tls_key, hosts.allows_plain)
