"""Controller of a cluster on several hosts: keeps its manifest, plans its replicas, and publishes their locations.

Gateways report their demand and use. The controller plans with the planner of a single machine, lets the runtime place
replicas, and sends the result to all gateways. Without a controller, the placed replicas keep answering, and a new one
starts from them. The controller runs on one event loop in its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lockstep.cluster.controlled_group import ControlledGroup, Leaving, is_older, why_not_drained
from lockstep.cluster.controller_state import ControllerState, GatewayReport, GroupPhase, is_held, merged_view, unwanted
from lockstep.cluster.plan_recorder import PlanRecorder
from lockstep.cluster.planner import Drain, Load, Phase, Refuse, Unload, plan
from lockstep.cluster.sessions import SessionUpdate
from lockstep.errors import (
    HostNotDrainableError,
    HostNotFoundError,
    LockstepError,
    PlacingError,
    UnavailableError,
    UsageError,
)
from lockstep.hosts.values import Demand, Host, LinkOptions, ReplicaName, ReplicaPhase, ReplicaStatus, Runtime
from lockstep.spelling import did_you_mean
from lockstep.system import SYSTEM, System
from lockstep.version import __version__
from lockstep.worker.flight.options import TraceOptions

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Interval in seconds between two plans while nothing happens."""
LOOK_S = 2.0
"""Interval in seconds at which hosts and replicas are polled."""
POLL_S = 1.0
"""Longest time in seconds that a gateway waits for a new state; after it the unchanged state is returned."""
LEASE_S = 5.0
"""A gateway without a report for so many seconds is removed; its open requests no longer delay a drain or an unload."""
ABANDONED_S = 600.0
"""Seconds without any gateway after which all replicas are removed; a gateway that restarts earlier reuses them."""
DRAIN_S = 60.0
"""Time in seconds that requests on a drained host get to finish; after it they are aborted."""
MAX_UNSENT = 1 << 14
"""Maximum number of session updates queued for one gateway's next report."""
MAX_GATEWAYS = 64
"""Maximum number of gateways, as a worker accepts no more (`lockstep.worker.remote_clients.MAX_CLIENTS`)."""


@dataclass(slots=True, eq=False)
class GatewayLink:
    """One gateway: its last report, and when it last made contact."""

    report: GatewayReport | None
    contact_s: float
    unsent: deque[SessionUpdate] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT))
    """Updates of sessions on other gateways; beyond the limit the oldest are dropped."""


class Controller:
    """Planner and coordinator of the cluster. Gateways and replica actors call its methods.

    Args:
        runtime: places and removes replicas.
        trace: where plans are recorded; None: plans are not recorded.
    """

    def __init__(self, runtime: Runtime, trace: TraceOptions | None = None, system: System = SYSTEM) -> None:
        self._runtime = runtime
        self._system, self._clock = system, system.now_s
        self._plans = None if trace is None else PlanRecorder(trace, system)
        self._gateways: dict[str, GatewayLink] = {}
        self._groups: dict[str, ControlledGroup] = {}
        self._found: dict[str, list[int]] = {}
        """Numbers of the replicas that an earlier controller placed and no gateway has requested yet, by group."""
        self._hosts: Sequence[Host] = ()
        self._fault = ""
        """Reason why hosts cannot be listed now, in one sentence; empty: they can."""
        self._drained: dict[str, str] = {}
        """Drained hosts, which get no replicas: their names by Ray node id."""
        self._drains: Mapping[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._manifest, self._manifest_version = "", 0
        self._replacing = ""
        """Gateway that is applying a manifest; empty: none."""
        self._state = ControllerState(0)
        self._no_gateway_since_s = system.now_s()
        """When the last gateway left."""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find the placed replicas and start planning."""
        for name in await self._runtime.found():
            self._found.setdefault(name.key, []).append(name.number)
        self._hosts = await self._runtime.hosts()
        self._run(self._plan_loop())

    async def close(self) -> None:
        """Stop planning; placed replicas stay."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._plans is not None:
            await self._system.run_in_thread(self._plans.close)

    # -- gateways ---------------------------------------------------------------------------------------------------

    async def join(
        self, gateway: str, version: str, manifest: str, link: LinkOptions, drained: Mapping[str, str] | None = None
    ) -> ControllerState:
        """Add a gateway. The returned state names the manifest that applies: the first gateway's, or the one that
        replaced it.

        Args:
            link: how gateways connect to workers. As with the manifest, the first gateway's options apply to all
                replicas.
            drained: hosts that were drained according to the gateway's last state before it lost its controller: names
                by Ray node id. A new controller takes them over. None: the gateway has just started.

        Raises:
            UsageError: the gateway runs another version.
            UnavailableError: there are too many gateways.
        """
        if version != __version__:
            raise UsageError(f"this is Lockstep {version}, and the cluster runs {__version__}; upgrade the older one")
        if len(self._gateways) >= MAX_GATEWAYS and gateway not in self._gateways:
            raise UnavailableError(f"the cluster already has {MAX_GATEWAYS} gateways", retry_after_s=LEASE_S)
        if not self._manifest:
            self._drained = dict(drained or {})
        if self._gateways.keys() <= {gateway}:
            self._use_link_options(link, is_new=drained is None)
        if not self._manifest or not self._gateways:
            self._manifest, self._manifest_version = manifest, self._manifest_version + 1
        self._gateways[gateway] = GatewayLink(None, self._clock())
        self._publish()
        return self._state

    def _use_link_options(self, link: LinkOptions, *, is_new: bool) -> None:
        """Use the link options of the only gateway, and place again the replicas that failed under earlier options.

        Args:
            is_new: whether the gateway has just started. Otherwise the existing replicas already have its options.
        """
        is_other = self._runtime.use(link)
        for key, group in self._groups.items() if is_new else ():
            for number, place in tuple(group.places.items()):
                if is_other or place.state is ReplicaPhase.FAILED:
                    self._place_again(group, number, "it is placed with other options")
            self._update_phase(key, group)

    async def follow(self, gateway: str, seen: int) -> ControllerState | None:
        """Return the state as soon as its version differs from the one seen, or after `POLL_S`; None: the gateway has
        to join again."""
        if (known := self._gateways.get(gateway)) is None:
            return None
        known.contact_s = self._clock()
        if self._state.version == seen:
            news = self._news
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):  # `wait_for` may lose a cancellation
                    await news.wait()
        known.contact_s = self._clock()
        return self._state

    async def report(self, gateway: str, report: GatewayReport) -> tuple[SessionUpdate, ...]:
        """Record a gateway's demand and use. Returns the session updates of other gateways since its last report."""
        if (known := self._gateways.get(gateway)) is None:
            return ()
        known.report, known.contact_s = report, self._clock()
        for name, other in self._gateways.items():
            if name != gateway:
                other.unsent.extend(report.sessions)
        unsent = tuple(known.unsent)
        known.unsent.clear()
        self._plan()
        return unsent

    async def leave(self, gateway: str) -> None:
        """Remove a gateway."""
        self._gateways.pop(gateway, None)
        self._publish()

    async def begin_replace(self, gateway: str) -> None:
        """Let one gateway apply a manifest; UnavailableError: another gateway is applying one."""
        if self._replacing in self._gateways and self._replacing != gateway:
            raise UnavailableError("another manifest is being applied; try again when that is done")
        self._replacing = gateway

    async def end_replace(self, gateway: str, manifest: str | None) -> int:
        """Publish a manifest to all gateways and return its version; None: the manifest could not be served."""
        if self._replacing == gateway:
            self._replacing = ""
        if manifest is not None:
            self._manifest, self._manifest_version = manifest, self._manifest_version + 1
            self._publish()
        return self._manifest_version

    async def dismiss(self, key: str) -> None:
        """Start to unload a group on an operator's request; the published state shows when it is gone."""
        if (group := self._groups.get(key)) is not None:
            self._unload(key, group, None)
            self._publish()

    async def drain(self, name: str, is_drained: bool) -> None:
        """Drain a host, so that its replicas move to other hosts and it gets no new ones, or make it available again.

        Raises:
            HostNotFoundError: no host has this name.
            HostNotDrainableError: no other host can take its replicas.
        """
        host = next((host for host in self._hosts if host.name == name), None)
        if host is None:
            hint = did_you_mean(name, [host.name for host in self._hosts])
            raise HostNotFoundError("; ".join(filter(None, (f"no host is called {name!r}", hint))))
        if is_drained and host.node_id not in self._drained:
            groups = [(group.demand, tuple(group.places.values())) for group in self._groups.values()]
            if why := why_not_drained(host.node_id, self._hosts, tuple(self._drained), groups):
                raise HostNotDrainableError(f"{host.name} cannot be drained: {why}", param="name")
            self._drained[host.node_id] = host.name
        elif not is_drained and self._drained.pop(host.node_id, None) is not None:
            for group in self._groups.values():  # replicas that wait for room were placed with this host excluded
                for number in [number for number, place in group.places.items() if place.state is ReplicaPhase.WAITING]:
                    self._place_again(group, number, f"{host.name} is available again")
        self._plan()

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def placed(self, place: ReplicaStatus) -> None:
        """Record the location and state of a replica, as reported by its actor."""
        group = self._groups.get(place.key)
        if group is None or place.number not in group.numbers or place.number in group.ending:
            return
        if not is_older(place, group.places.get(place.number)):
            group.places[place.number] = place
            self._update_phase(place.key, group)
            self._plan()

    def _update_phase(self, key: str, group: ControlledGroup) -> None:
        """Set a group's phase from the states of its replicas."""
        now_s, phase = self._clock(), group.state.phase
        if phase is Phase.LOADING and group.num_ready:
            group.state = GroupPhase(Phase.RESIDENT, now_s, now_s - group.began_s)
            self._refusals.pop(key, None)
            name = group.demand.name or key
            log.info("%s is placed: %d of %d replicas are ready", name, group.num_ready, group.demand.num)
        elif phase is Phase.RESIDENT and not group.num_ready:
            group.state = replace(group.state, phase=Phase.LOADING, since_s=now_s, makes_room_for=None)
            group.began_s = now_s
        if group.state.phase is Phase.LOADING:
            self._update_refusal(key, group)

    def _update_refusal(self, key: str, group: ControlledGroup) -> None:
        """Record why a group cannot be loaded, if each of its replicas has failed to load."""
        failed = [place for place in group.places.values() if place.state is ReplicaPhase.FAILED]
        if failed and len(failed) >= group.demand.num:
            self._refusals[key] = failed[0].reason
        else:
            self._refusals.pop(key, None)

    # -- the plan -----------------------------------------------------------------------------------------------------

    async def _plan_loop(self) -> None:
        look_at_s = 0.0
        while True:
            try:
                now_s = self._clock()
                if now_s >= look_at_s:
                    look_at_s = now_s + LOOK_S
                    await self._poll()
                self._plan()
            except Exception:  # without this loop nothing plans, whatever the error
                log.exception("internal error in the plan loop; planning continues")
            await self._system.sleep(TICK_S)

    async def _poll(self) -> None:
        """List the hosts, and request the status of each replica."""
        try:
            self._hosts = await self._runtime.hosts()
        except PlacingError as error:
            if not self._fault:
                log.warning("%s; placed replicas keep answering, but none is placed until hosts can be listed", error)
            self._fault = str(error)
            return
        if self._fault:
            log.warning("hosts can be listed again")
        self._fault = ""
        names = [ReplicaName(key, n) for key, group in self._groups.items() for n in group.numbers]
        answers = await asyncio.gather(*(self._runtime.ask(name) for name in names))
        for name, answer in zip(names, answers, strict=True):
            group = self._groups.get(name.key)
            is_ours = group is not None and group.removing is None and name.number in group.numbers
            if group is None or not is_ours or name.number in group.ending:
                continue
            before = group.places.get(name.number)
            group.silent[name.number] = 0 if answer is not None else group.silent.get(name.number, 0) + 1
            if answer is not None:
                group.places[name.number] = answer if before is None or not is_older(answer, before) else before
            elif before is not None and group.is_lost(name.number, self._hosts):
                group.silent[name.number] = 0
                self._place_again(group, name.number, f"it was lost on {before.host}" if before.host else before.reason)
            self._update_phase(name.key, group)

    def _plan(self) -> None:
        """Compute a plan and carry it out."""
        now_s = self._clock()
        for name in [name for name, each in self._gateways.items() if now_s - each.contact_s > LEASE_S]:
            log.warning("gateway %s has stopped reporting", name)
            del self._gateways[name]
        if self._gateways:
            self._no_gateway_since_s = now_s
        elif now_s - self._no_gateway_since_s > ABANDONED_S:
            self._remove_all()
        reports = [each.report for each in self._gateways.values() if each.report is not None]
        for key in unwanted(self._groups, reports):
            self._unload(key, self._groups[key], None)
        for key, group in self._groups.items():
            if group.state.phase is Phase.UNLOADING and group.removing is None and not is_held(key, reports):
                group.removing = self._run(self._remove(key, group))
        self._relocate(reports, now_s)
        if reports:
            self._carry_out(reports, now_s)
        self._publish()

    def _remove_all(self) -> None:
        """Remove all replicas, as no gateway has come back."""
        for key, group in self._groups.items():
            self._unload(key, group, None)
        for key, numbers in self._found.items():
            for number in numbers:
                self._run(self._runtime.remove(ReplicaName(key, number)))
        self._found = {}

    def _carry_out(self, reports: Sequence[GatewayReport], now_s: float) -> None:
        demands = {each.demand.key: each.demand for report in reports for each in report.demands}
        self._adopt(demands, now_s)
        groups = {key: group.state for key, group in self._groups.items()}
        observed, policy = merged_view(groups, reports, now_s), reports[0].policy
        actions = plan(observed, now_s, policy)
        if self._plans is not None:
            self._plans.planned(observed, now_s, policy, actions)
        drains: dict[str, str] = {}
        refused: dict[str, str] = {}
        for action in actions:
            match action:
                case Load(key):
                    self._load(demands[key], now_s)
                case Unload(key, _, makes_room_for):
                    self._unload(key, self._groups[key], makes_room_for)
                case Drain(key, makes_room_for):
                    drains[key] = makes_room_for
                case Refuse(key, why):
                    refused[key] = why
        for key, group in self._groups.items():
            if group.state.phase is Phase.RESIDENT:
                group.state = replace(group.state, makes_room_for=drains.get(key))
        self._drains = drains
        kept = {key: why for key, why in self._refusals.items() if key in self._groups}
        self._refusals = kept | refused

    def _adopt(self, demands: Mapping[str, Demand], now_s: float) -> None:
        """Adopt the replicas that an earlier controller placed, and remove those that no gateway demands."""
        ordered = {key: self._found[key] for key in demands if key in self._found} | self._found
        for key, numbers in ordered.items():
            if key in demands and key not in self._groups:
                group = ControlledGroup(demands[key], GroupPhase(Phase.LOADING, now_s), began_s=now_s)
                self._groups[key] = group
                for number in group.adopt(numbers):
                    self._run(self._runtime.place(group.demand, number, tuple(self._drained)))
            for number in numbers:
                if key not in demands or number not in self._groups[key].numbers:
                    self._run(self._runtime.remove(ReplicaName(key, number)))
        self._found = {}

    def _load(self, demand: Demand, now_s: float) -> None:
        group = ControlledGroup(demand, GroupPhase(Phase.LOADING, now_s), began_s=now_s)
        self._groups[demand.key] = group
        for number in range(demand.num):
            self._place(group, number)

    def _place(self, group: ControlledGroup, number: int) -> None:
        """Place one more replica of a group, on a host that is not drained."""
        group.numbers.append(number)
        group.mark_waiting(number, self._clock())
        self._run(self._runtime.place(group.demand, number, tuple(self._drained)))

    def _unload(self, key: str, group: ControlledGroup, makes_room_for: str | None) -> None:
        if group.state.phase in (Phase.LOADING, Phase.RESIDENT):
            group.state = replace(
                group.state, phase=Phase.UNLOADING, since_s=self._clock(), makes_room_for=makes_room_for
            )

    async def _remove(self, key: str, group: ControlledGroup) -> None:
        names = [ReplicaName(key, number) for number in group.numbers]
        await asyncio.gather(*(self._runtime.remove(name) for name in names), return_exceptions=True)
        if self._groups.get(key) is group:
            del self._groups[key]
        self._plan()

    def _relocate(self, reports: Sequence[GatewayReport], now_s: float) -> None:
        """Place replacements for the replicas on drained hosts, and end each leaving replica once its requests have
        ended."""
        for key, group in self._groups.items():
            is_known = all(number in group.places for number in group.numbers)
            if not is_known or group.state.phase not in (Phase.LOADING, Phase.RESIDENT):
                continue
            steps = group.relocation(self._drained, reports, now_s)
            for number in steps.placed:
                self._place(group, number)
            version = self._state.version + 1
            group.leaving = {n: group.leaving.get(n, Leaving(now_s + DRAIN_S, version)) for n in steps.leaving}
            for number, leaving in tuple(group.leaving.items()):
                is_used = group.places[number].state is ReplicaPhase.READY and any(
                    report.seen < leaving.version or report.num_open.get((key, number), 0) for report in reports
                )
                if now_s >= leaving.until_s or not is_used:
                    self._end(group, number)

    def _end(self, group: ControlledGroup, number: int) -> None:
        """Remove a replica for which the group has a replacement."""
        group.numbers.remove(number)
        for known in (group.places, group.leaving, group.silent):
            known.pop(number, None)
        self._run(self._remove_actor(group, ReplicaName(group.demand.key, number)))

    def _place_again(self, group: ControlledGroup, number: int, reason: str) -> None:
        """Place a replica again under the same number; earlier reports of its actor are discarded."""
        group.leaving.pop(number, None)
        group.places[number] = ReplicaStatus(group.demand.key, number, ReplicaPhase.STARTING, reason)
        self._run(self._replace(group, ReplicaName(group.demand.key, number)))

    async def _replace(self, group: ControlledGroup, name: ReplicaName) -> None:
        await self._remove_actor(group, name)
        is_wanted = self._groups.get(name.key) is group and name.number in group.numbers
        if is_wanted and group.state.phase is not Phase.UNLOADING:
            group.mark_waiting(name.number, self._clock())
            await self._runtime.place(group.demand, name.number, tuple(self._drained))

    async def _remove_actor(self, group: ControlledGroup, name: ReplicaName) -> None:
        group.ending.add(name.number)
        try:
            await self._runtime.remove(name)
        finally:
            group.ending.discard(name.number)

    # -- the state ----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publish a new state to all gateways if anything has changed."""
        hosts, now_s = self._known_hosts, self._clock()
        state = replace(
            self._state,
            manifest=self._manifest,
            manifest_version=self._manifest_version,
            phases={key: group.state.phase for key, group in self._groups.items()},
            drains=dict(self._drains),
            refusals=dict(self._refusals),
            places=tuple(
                group.published(number, hosts, now_s)
                for group in self._groups.values()
                for number in sorted(group.numbers)
            ),
            hosts=hosts,
            num_gateways=max(1, len(self._gateways)),
            fault=self._fault,
        )
        if state != self._state:
            self._state = replace(state, version=self._state.version + 1)
            news, self._news = self._news, asyncio.Event()
            news.set()

    @property
    def _known_hosts(self) -> tuple[Host, ...]:
        """Hosts from the last poll, each with its drain status."""
        return tuple(msgspec.structs.replace(each, is_drained=each.node_id in self._drained) for each in self._hosts)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """Log the failure of a task. Planning continues, and the next poll finds a missing replica."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            defect = None if isinstance(error, LockstepError) else error
            log.error("could not place a replica: %s", error, exc_info=defect)
