"""Multi-host backend: what a gateway reports of a manifest's models, and how it applies the controller's state."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.cluster.controller import Controller
from lockstep.cluster.controller_client import ControllerClient, ControllerLink
from lockstep.cluster.controller_state import ControllerState, GatewayDemand, GatewayReport
from lockstep.cluster.manifest import Hosts, Manifest
from lockstep.cluster.manifest_file import dump
from lockstep.cluster.planner import Action, Observed, PlanPolicy
from lockstep.cluster.replica_state import ReplicaState
from lockstep.cluster.sessions import SessionNews, Sessions
from lockstep.cluster.snapshot import HostSnapshot, PlaceSnapshot
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.hosts.group import RouteWatcher
from lockstep.hosts.values import Demand, GroupOptions, LinkOptions, ReplicaPhase, ReplicaStatus
from lockstep.hosts.workers import GroupLost, HostedWorkers
from lockstep.worker.link import WorkerOptions
from lockstep.worker.remote_clients import read_secret
from lockstep.worker.supervised import Notice

log = logging.getLogger(__name__)

MAX_REPORT_AGE_S = 5.0
"""An older report of the controller does not describe the present hosts; a new one comes every second."""

if TYPE_CHECKING:
    from lockstep.cluster.models import ModelSet
    from lockstep.cluster.replicas import Replicas

Close = Callable[[], Awaitable[None]]
OpenController = Callable[
    [str, str, LinkOptions, WorkerOptions, KVStoreOptions], Awaitable[tuple[ControllerLink, Close]]
]
"""Finds or starts the controller of a cluster, and returns it with the call that leaves it.

Arguments: the cluster's name, the address of Ray, the trust of links, and options of workers and of their KV."""


async def ray_controller(
    cluster: str, ray: str, link: LinkOptions, worker: WorkerOptions, kv: KVStoreOptions
) -> tuple[ControllerLink, Close]:
    """The controller as an actor of Ray's.

    Raises:
        PlacingError: Ray is not installed, or cannot be reached.
    """
    from lockstep.hosts.ray_runtime import CONTROLLER, ReplicaOptions, connect

    worker = replace(worker, prestarted=None)  # a process of this machine
    runtime = await connect(ray, cluster, ReplicaOptions(link, worker, kv))
    controller: Any = await runtime.named(CONTROLLER, Controller, runtime, worker.trace)
    return controller, runtime.close


class MultiHostBackend:
    """One gateway's models on several hosts. Event loop only.

    Args:
        manifest: what will be served at first; it has hosts.
        models: those that there are.
        notify: called with what workers report of sessions, and with groups that are lost.
        on_state: called with every new state of the controller.
        sessions: of all models, which others are informed of.
        routes: called with every choice among replicas.
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
    ) -> None:
        assert manifest.hosts is not None, "who has none runs here"
        hosts = manifest.hosts
        self._manifest = manifest
        self._worker = worker
        self._kv = kv
        self._policy = policy
        self._models = models
        self._on_state = on_state
        self._sessions = sessions
        self._open_controller = open_controller
        self._link = link_of(hosts)
        self.workers = HostedWorkers(
            self._link,
            self._options_of,
            notify,
            routes,
            worker.stream_interval_s,
            self._name_of,
        )
        self.replicas: Replicas | None = None
        """The shell that follows; set by who makes it, before `start`."""
        self._client: ControllerClient | None = None
        self._leave: Close | None = None

    async def start(self) -> str:
        """Join the cluster; the manifest that holds.

        Raises:
            UsageError, PlacingError: there is no controller, and none can be started.
        """
        hosts = self._manifest.hosts
        assert hosts is not None, "as at first"
        check_secret_file(hosts.secret)
        name, options = self._manifest.cluster, (self._link, self._worker, self._kv)
        controller, self._leave = await self._open_controller(name, hosts.ray, *options)
        self._client = ControllerClient(controller, self.workers, self._report, self._on_state, self._on_sessions)
        return await self._client.start(dump(self._manifest))

    async def close(self) -> None:
        """Follow no more; what is placed stays."""
        if self._client is not None:
            await self._client.close()
        if self._leave is not None:
            await self._leave()

    @property
    def client(self) -> ControllerClient:
        assert self._client is not None, "it was started"
        return self._client

    @property
    def state(self) -> ControllerState:
        """The controller's last state; an empty one before the first."""
        return ControllerState(-1) if self._client is None else self._client.state

    def decide(self, observed: Observed, now_s: float, policy: PlanPolicy) -> tuple[Action, ...]:
        """Actions from the controller's state."""
        return () if self._client is None else self._client.decide(observed, now_s, policy)

    async def drain(self, name: str, is_drained: bool) -> None:
        """Have a host give its replicas to others, and take none; or let it have some again.

        Raises:
            HostNotFoundError: there is none of that name.
        """
        await self.client.drain(name, is_drained)

    # -- what is reported -------------------------------------------------------------------------------------------

    def _report(self) -> GatewayReport:
        assert self.replicas is not None, "set before it was started"
        now_s = time.monotonic()
        demands = tuple(GatewayDemand(self._demand(each), each.observed(now_s)) for each in self.replicas.all())
        num_open = {
            (key, member.number): num
            for key, group in self.workers.groups.items()
            for member in group.members
            if (num := group.num_open(member.number)) or group.balancer.is_there(member.number)
        }
        sessions = self._sessions.news(now_s)
        return GatewayReport(
            now_s, demands, self.replicas.budget_bytes, self._policy, num_open, sessions, self.state.version
        )

    def _on_sessions(self, news: Sequence[SessionNews]) -> None:
        self._sessions.hear(news, time.monotonic())

    def _demand(self, replica: ReplicaState) -> Demand:
        spec, wanted = replica.spec, replica.spec.group
        source = spec.source
        if "://" not in source and Path(source).expanduser().exists():  # as all hosts call it
            source = str(Path(source).expanduser().absolute())
        options = spec.options, replica.priority, wanted.num, wanted.resources, wanted.spread
        return Demand(spec.key, source, *options, self._name_of(spec.key))

    def _name_of(self, key: str) -> str:
        """The first model of a group; its key where it is of none any more."""
        return next(iter(self._ids_on(key)), key)

    def _ids_on(self, key: str) -> Sequence[str]:
        by_id = self._models().by_id
        return [id_ for id_, model in by_id.items() if model.replica is not None and model.replica.key == key]

    def _options_of(self, key: str) -> GroupOptions:
        assert self.replicas is not None, "set before it was started"
        return next(replica.spec.group for replica in self.replicas.all() if replica.key == key)

    # -- what is seen of it -------------------------------------------------------------------------------------------

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the controller's last report; None: it has not reported yet."""
        return None if self._client is None else time.monotonic() - self._client.contact_s

    @property
    def _is_current(self) -> bool:
        """True if the controller reports, and sees hosts as they are now."""
        age_s = self.report_age_s
        return age_s is not None and age_s < MAX_REPORT_AGE_S and not self.state.fault

    def hosts(self) -> tuple[HostSnapshot, ...]:
        """All hosts, by the controller's report; without a current one, those are there to which there are links."""
        places = self._seen()
        linked = {place.node_id for place in places if place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING)}
        is_current, known = self._is_current, self.state.hosts
        hosts = [msgspec.structs.replace(h, is_there=h.is_there if is_current else h.node_id in linked) for h in known]
        return tuple(HostSnapshot.of(host, places) for host in hosts)

    def _seen(self) -> tuple[ReplicaStatus, ...]:
        """All replicas, by the controller's report and this gateway's own links: one without a link is not ready."""
        return tuple(map(self._as_seen, self.state.places))

    def _as_seen(self, place: ReplicaStatus) -> ReplicaStatus:
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
        """All replicas, as this gateway sees and uses them."""
        now_s, found = time.monotonic(), []
        for place in self._seen():
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
        """Sentences on replicas that get no requests, and on a controller that does not report."""
        found, age_s = [], self.report_age_s
        if not self._is_current and age_s is not None:
            fault = self.workers.fault or "the cluster's controller does not report"
            found.append(f"{fault} (last report {age_s:.0f} s ago); states are by this server's own links")
        return (*found, *(place.sentence for place in self.places() if place.sentence))


def check_secret_file(name: str) -> None:
    """See that there is a secret; where the manifest names none and there is none yet, one is made.

    Raises:
        UsageError: there is none, or it cannot be used.
        PlacingError: none can be made.
    """
    if name == Hosts().secret:
        from lockstep.hosts.ray_connection import made_secret

        path, is_new = made_secret(name)
        if is_new:
            log.warning("%s: made a secret for gateways and workers; copy the file to each host", path)
    read_secret(name)


def link_of(hosts: Hosts) -> LinkOptions:
    """Links as a manifest wants them."""
    return LinkOptions(hosts.secret, hosts.tls_ca, hosts.tls_cert, hosts.tls_key, hosts.allows_plain)
