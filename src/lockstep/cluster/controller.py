"""Controller of a cluster on several hosts: its manifest, its one plan, and the location of each group's replicas.

Gateways report their demand and use. The controller plans as one machine does, lets the runtime place replicas, and
sends the result to all gateways. They serve requests without it: when no controller runs, placed replicas go on
answering. It runs on one event loop in its own process, and starts from the replicas that it finds placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lockstep.cluster.controlled_group import ControlledGroup, Leaving, is_older, why_not_drained
from lockstep.cluster.controller_state import ControllerState, GatewayReport, GroupPhase, is_held, merged_view, unwanted
from lockstep.cluster.plan_recorder import PlanRecorder
from lockstep.cluster.planner import Drain, Load, Phase, Refuse, Unload, plan
from lockstep.cluster.sessions import SessionNews
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
from lockstep.version import __version__
from lockstep.worker.flight.options import TraceOptions

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Between two plans where nothing happens."""
LOOK_S = 2.0
"""Between two looks at all hosts, and at replicas that say nothing by themselves."""
POLL_S = 1.0
"""Longest wait of a gateway for news; after it the same state is returned."""
LEASE_S = 5.0
"""A gateway that reports nothing for so long is gone; its requests are its clients' loss, and no reason to wait."""
ABANDONED_S = 600.0
"""After this time without a gateway everything is removed; a gateway that starts again finds it until then."""
DRAIN_S = 60.0
"""For requests on a host that is drained; then they are cut."""
MAX_UNSENT = 1 << 14
"""News of sessions that wait for one gateway's next report."""
MAX_GATEWAYS = 64
"""A worker takes no more links (`lockstep.worker.remote_clients.MAX_CLIENTS`)."""


@dataclass(slots=True, eq=False)
class GatewayLink:
    """One gateway: its last report, and when that came."""

    report: GatewayReport | None
    contact_s: float
    unsent: deque[SessionNews] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT))
    """Of others' sessions; beyond the bound the oldest are dropped."""


class Controller:
    """The one who plans. Methods are called by gateways and by replicas' actors.

    Args:
        runtime: places replicas.
        trace: where plans are recorded; None: they are not.
    """

    def __init__(
        self, runtime: Runtime, trace: TraceOptions | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runtime = runtime
        self._clock = clock
        self._plans = None if trace is None else PlanRecorder(trace)
        self._gateways: dict[str, GatewayLink] = {}
        self._groups: dict[str, ControlledGroup] = {}
        self._found: dict[str, list[int]] = {}
        """Replicas that an earlier controller placed, and that no gateway has requested yet."""
        self._hosts: Sequence[Host] = ()
        self._fault = ""
        """Why hosts cannot be looked at now, in one sentence; empty: they can."""
        self._drained: dict[str, str] = {}
        """Hosts that get no replicas: their names, by Ray's ids."""
        self._drains: Mapping[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._manifest, self._manifest_version = "", 0
        self._replacing = ""
        """The gateway that brings a manifest in; empty: none does."""
        self._state = ControllerState(0)
        self._alone_since_s = clock()
        """When the last gateway went."""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Find what is placed, and plan from now on."""
        for name in await self._runtime.found():
            self._found.setdefault(name.key, []).append(name.number)
        self._hosts = await self._runtime.hosts()
        self._run(self._turn())

    async def close(self) -> None:
        """Plan no more; what is placed stays."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._plans is not None:
            await asyncio.to_thread(self._plans.close)

    # -- gateways ---------------------------------------------------------------------------------------------------

    async def join(
        self, gateway: str, version: str, manifest: str, link: LinkOptions, drained: Mapping[str, str] | None = None
    ) -> ControllerState:
        """Let a gateway in; the state names the manifest that applies: the first one's, or what replaced it.

        Args:
            link: how it is linked with workers; that of the first gateway holds for replicas, as its manifest does.
            drained: names of the hosts that were drained by the last report that a gateway got before it lost its
                controller, by Ray's ids; a new controller takes them over. None: the gateway has just started.

        Raises:
            UsageError: it is of another version.
            UnavailableError: there are too many.
        """
        if version != __version__:
            raise UsageError(f"this is Lockstep {version}, and the cluster runs {__version__}; upgrade the older one")
        if len(self._gateways) >= MAX_GATEWAYS and gateway not in self._gateways:
            raise UnavailableError(f"{MAX_GATEWAYS} gateways are there already", retry_after_s=LEASE_S)
        if not self._manifest:
            self._drained = dict(drained or {})
        if self._gateways.keys() <= {gateway}:
            self._begin_anew(link, is_new=drained is None)
        if not self._manifest or not self._gateways:
            self._manifest, self._manifest_version = manifest, self._manifest_version + 1
        self._gateways[gateway] = GatewayLink(None, self._clock())
        self._publish()
        return self._state

    def _begin_anew(self, link: LinkOptions, *, is_new: bool) -> None:
        """Take the options of the only gateway over; nothing that failed under those before is left.

        Args:
            is_new: whether the gateway has just started; else replicas are there which have its options already.
        """
        is_other = self._runtime.use(link)
        for key, group in self._groups.items() if is_new else ():
            for number, place in tuple(group.places.items()):
                if is_other or place.state is ReplicaPhase.FAILED:
                    self._move(group, number, "it is placed with other options")
            self._settle(key, group)

    async def follow(self, gateway: str, seen: int) -> ControllerState | None:
        """The state, once it differs from the one seen, or after a while; None: the gateway has to join again."""
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

    async def report(self, gateway: str, report: GatewayReport) -> tuple[SessionNews, ...]:
        """Record a gateway's demand and use; returns what others have reported of sessions since its last report."""
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
        """Let a gateway go."""
        self._gateways.pop(gateway, None)
        self._publish()

    async def begin_replace(self, gateway: str) -> None:
        """Let one gateway bring a manifest in; UnavailableError: another one does."""
        if self._replacing in self._gateways and self._replacing != gateway:
            raise UnavailableError("another manifest is being brought in; try again when that is done")
        self._replacing = gateway

    async def end_replace(self, gateway: str, manifest: str | None) -> int:
        """Have all gateways take a manifest over; None: it could not be served. Returns its version."""
        if self._replacing == gateway:
            self._replacing = ""
        if manifest is not None:
            self._manifest, self._manifest_version = manifest, self._manifest_version + 1
            self._publish()
        return self._manifest_version

    async def dismiss(self, key: str) -> None:
        """Begin to unload a group by hand; the state shows when it is gone."""
        if (group := self._groups.get(key)) is not None:
            self._unload(key, group, None)
            self._publish()

    async def drain(self, name: str, is_drained: bool) -> None:
        """Have a host give its replicas to others, and take none; or let it have some again.

        Raises:
            HostNotFoundError: no host has this name.
            HostNotDrainableError: its replicas would have no other one.
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
            for group in self._groups.values():  # who waits for room was placed where this host is avoided
                for number in [number for number, place in group.places.items() if place.state is ReplicaPhase.WAITING]:
                    self._move(group, number, f"{host.name} may have it again")
        self._plan()

    # -- replicas -----------------------------------------------------------------------------------------------------

    async def placed(self, place: ReplicaStatus) -> None:
        """Record the location and state of a replica, as its actor reports them."""
        group = self._groups.get(place.key)
        if group is None or place.number not in group.numbers or place.number in group.ending:
            return
        if not is_older(place, group.places.get(place.number)):
            group.places[place.number] = place
            self._settle(place.key, group)
            self._plan()

    def _settle(self, key: str, group: ControlledGroup) -> None:
        """Move a group to the phase that its replicas have brought about."""
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
            self._judge(key, group)

    def _judge(self, key: str, group: ControlledGroup) -> None:
        """Note why a group cannot be had, if each of its replicas failed to load. How long calls wait for a replica
        that has not failed is bounded by each gateway, which needs no controller for it."""
        failed = [place for place in group.places.values() if place.state is ReplicaPhase.FAILED]
        if failed and len(failed) >= group.demand.num:
            self._refusals[key] = failed[0].reason
        else:
            self._refusals.pop(key, None)

    # -- the plan -----------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        look_at_s = 0.0
        while True:
            try:
                now_s = self._clock()
                if now_s >= look_at_s:
                    look_at_s = now_s + LOOK_S
                    await self._look()
                self._plan()
            except Exception:  # whatever it is, nothing else would ever plan
                log.exception("a defect over the cluster's plan")
            await asyncio.sleep(TICK_S)

    async def _look(self) -> None:
        """See which hosts there are, and ask replicas how they are."""
        try:
            self._hosts = await self._runtime.hosts()
        except PlacingError as error:
            if not self._fault:
                log.warning("%s; replicas go on answering, and nothing is placed", error)
            self._fault = str(error)
            return
        if self._fault:
            log.warning("hosts are seen again")
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
                self._move(group, name.number, f"it was lost on {before.host}" if before.host else before.reason)
            self._settle(name.key, group)

    def _plan(self) -> None:
        """Plan, and carry it out."""
        now_s = self._clock()
        for name in [name for name, each in self._gateways.items() if now_s - each.contact_s > LEASE_S]:
            log.warning("gateway %s has stopped reporting", name)
            del self._gateways[name]
        if self._gateways:
            self._alone_since_s = now_s
        elif now_s - self._alone_since_s > ABANDONED_S:
            self._abandon()
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

    def _abandon(self) -> None:
        """No gateway has come back: remove everything."""
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
        """Adopt what was placed before this controller began; what no gateway wants any more is removed."""
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
        """Have one more replica of a group placed, on a host that is not drained."""
        group.numbers.append(number)
        group.wait(number, self._clock())
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
        """Have replicas of drained hosts replaced, and end each that leaves as soon as its requests have ended."""
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
        """End a replica of which the group has another one."""
        group.numbers.remove(number)
        for known in (group.places, group.leaving, group.silent):
            known.pop(number, None)
        self._run(self._remove_actor(group, ReplicaName(group.demand.key, number)))

    def _move(self, group: ControlledGroup, number: int, reason: str) -> None:
        """Have a replica placed again under its number; what its actor has reported so far counts no more."""
        group.leaving.pop(number, None)
        group.places[number] = ReplicaStatus(group.demand.key, number, ReplicaPhase.STARTING, reason)
        self._run(self._replace(group, ReplicaName(group.demand.key, number)))

    async def _replace(self, group: ControlledGroup, name: ReplicaName) -> None:
        await self._remove_actor(group, name)
        is_wanted = self._groups.get(name.key) is group and name.number in group.numbers
        if is_wanted and group.state.phase is not Phase.UNLOADING:
            group.wait(name.number, self._clock())
            await self._runtime.place(group.demand, name.number, tuple(self._drained))

    async def _remove_actor(self, group: ControlledGroup, name: ReplicaName) -> None:
        group.ending.add(name.number)
        try:
            await self._runtime.remove(name)
        finally:
            group.ending.discard(name.number)

    # -- the state ----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Tell all gateways, if anything is other than what they know."""
        hosts, now_s = self._known_hosts, self._clock()
        state = replace(
            self._state,
            manifest=self._manifest,
            manifest_version=self._manifest_version,
            phases={key: group.state.phase for key, group in self._groups.items()},
            drains=dict(self._drains),
            refusals=dict(self._refusals),
            places=tuple(
                group.shown(number, hosts, now_s) for group in self._groups.values() for number in sorted(group.numbers)
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
        """Hosts as the runtime has seen them last, and whether they are drained."""
        return tuple(msgspec.structs.replace(each, is_drained=each.node_id in self._drained) for each in self._hosts)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """Whatever failed, the plan goes on, and what is missing is seen."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            defect = None if isinstance(error, LockstepError) else error
            log.error("a replica is not placed: %s", error, exc_info=defect)
