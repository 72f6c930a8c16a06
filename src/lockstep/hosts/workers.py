"""Workers on several hosts: presents them as one `SupervisedWorker`, whose replicas are groups on these workers.

The controller decides where replicas run and reports it through `apply`; this class connects to them. A group is loaded
when its first replica answers, and unloaded when its connections are closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lockstep.core.balancer import Balancer
from lockstep.core.request import Priority
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.engine.metrics import MetricsSnapshot, merged
from lockstep.engine.options import AdapterSource, LoadOptions, Progress
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionReport, SweepResult
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.hosts.group import Group, HostedMailbox, RouteWatcher
from lockstep.hosts.values import (
    SLOTS_PER_REPLICA,
    GatewayLimits,
    GroupOptions,
    LinkOptions,
    ReplicaPhase,
    ReplicaStatus,
)
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import Checked, KeptReport, Loaded, SessionsReport
from lockstep.worker.supervised import Notice, SupervisedWorker

RETRY_AFTER_S = 2.0
WATCH_S = 0.5
"""Interval in seconds at which silent replicas and rejected connections are checked."""
COMING = (ReplicaPhase.STARTING, ReplicaPhase.LOADING)


@dataclass(frozen=True, slots=True)
class GroupLost:
    """Notice that a group has lost its last replica."""

    key: str


class HostedWorkers:
    """Replicas of one gateway's models on all hosts. Event loop only.

    Args:
        notify: called with the workers' notices about sessions, and with groups that were lost.
        options_of: returns the placement and routing options of a group, by key.
        routes: called with each routing decision.
        worker: gives the stream interval and the clock of connections.
        name_of: returns the name of a group's model by key, for messages.
    """

    pid = None
    kv_tiers: Mapping[str, TierStats] = {}

    def __init__(
        self,
        link: LinkOptions,
        options_of: Callable[[str], GroupOptions],
        notify: Callable[[Notice | GroupLost], None],
        routes: RouteWatcher | None = None,
        worker: WorkerOptions | None = None,
        name_of: Callable[[str], str] = str,
        limits: GatewayLimits | None = None,
    ) -> None:
        self._limits = limits or GatewayLimits()
        self._worker = worker or WorkerOptions()
        self._system, self._now_s = self._worker.system, self._worker.system.now_s
        self.groups: dict[str, Group] = {}
        """Groups that are loaded or loading, by key."""
        self.fault = ""
        """Reason why reports of the controller are missing or old, in one sentence; empty: they are current."""
        self.trouble = "the controller has not reported the hosts yet"
        """Reason why no request can be served now, in one sentence; empty: there is none."""
        self.link = link
        """Options of the connections between gateways and workers."""
        self._options_of = options_of
        self._notify = notify
        self._routes = routes
        self._name_of = name_of
        self._places: dict[tuple[str, int], ReplicaStatus] = {}
        self._lost_s: dict[str, float] = {}
        """When groups lost their last replica, by key; groups that never had one, or were unloaded, are absent."""
        self._coming_s: dict[str, float] = {}
        """When replicas of groups were last reported as starting or loading, by key."""
        self._contact_s = 0.0
        """When the controller last reported the current state of replicas."""
        self._watching: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Loads that wait for the first replica of a group."""

    # -- placements -----------------------------------------------------------------------------------------------

    def apply(self, places: Iterable[ReplicaStatus]) -> None:
        """Apply the statuses of all replicas."""
        now = {(place.key, place.number): place for place in places}
        for gone in [name for name in self._places if name not in now]:
            self._update(ReplicaStatus(*gone, ReplicaPhase.WAITING, "it was removed"))
        self._places = now
        for place in now.values():
            self._update(place)

    def record_contact(self, is_current: bool) -> None:
        """Record a report of the controller, whether its state has changed or not.

        Args:
            is_current: whether the controller can list replicas now; otherwise its report has their last known
                placements.
        """
        if is_current:
            self._contact_s = now_s = self._now_s()
            self._coming_s |= {place.key: now_s for place in self._places.values() if place.state in COMING}

    def absence(self, replica: str, since_s: float | None = None) -> UnavailableError | None:
        """Error for calls to a group that has had no replica for `GatewayLimits.no_replica_s`; None: it has a replica,
        or calls may wait.

        Args:
            since_s: when the call began to wait; None: it has just arrived.
        """
        group = self.groups.get(replica)
        if group is not None and group.is_there:
            return None
        now_s = self._now_s()
        begun_s = self._lost_s.get(replica, now_s if since_s is None else since_s)
        is_placed = any(place.key == replica for place in self._places.values())
        coming_s = self._coming_s.get(replica, begun_s) if is_placed else self._contact_s  # it may be next
        is_refused = group is not None and group.is_refused
        if not is_refused and now_s - max(begun_s, coming_s) < self._limits.no_replica_s:
            return None
        return UnavailableError(self._why_absent(replica), retry_after_s=RETRY_AFTER_S)

    def _why_absent(self, key: str) -> str:
        """Reason why no replica of a group can take requests, in one sentence."""
        group, name = self.groups.get(key), self._name_of(key)
        places = [place for place in self._places.values() if place.key == key]
        if group is None:
            reasons = [place.reason or place.state.value for place in places]
        else:
            numbers = [place.number for place in places if place.number < len(group.members)]
            reasons = [group.trouble(group.members[number]) for number in numbers]
        why = "; ".join(dict.fromkeys(filter(None, (*reasons, self.fault)))) or "none has been placed"
        return f"no replica of {name} can take requests: {why}"

    def cancel_load(self, key: str) -> None:
        """Fail the load of a group that is no longer wanted."""
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(WorkerLostError("the model was removed while the gateway connected to its replicas"))

    def _update(self, place: ReplicaStatus) -> None:
        group = self.groups.get(place.key)
        if group is not None and place.number < len(group.members):
            group.update(place)

    def _on_group_change(self, group: Group) -> None:
        if group.is_there:
            self._lost_s.pop(group.key, None)
            waiting = self._waiting.get(group.key)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif group.key in self.groups:
            self._lost_s[group.key] = self._now_s()
            self._notify(GroupLost(group.key))

    # -- as a worker ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start watching replicas; connections are opened when groups are loaded."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._system.sleep(WATCH_S)
            for group in tuple(self.groups.values()):
                group.watch()

    async def close(self) -> None:
        """Close the connections; the workers keep running."""
        if self._watching is not None:
            self._watching.cancel()
        groups, self.groups = tuple(self.groups.values()), {}
        for waiting in self._waiting.values():
            waiting.cancel()
        await asyncio.gather(*(group.close() for group in groups))

    async def load(
        self,
        replica: str,
        source: str,
        options: LoadOptions,
        progress: Progress | None = None,
        priority: int = Priority.NORMAL,
        *,
        is_suspect: bool = False,
    ) -> Loaded:
        """Connect to the replicas of a group; returns when the first one answers. The controller decides what is loaded
        where.

        Raises:
            WorkerLostError: the first replica was lost as soon as it had answered.
        """
        group = self.groups.get(replica) or self._group_of(replica)
        self.groups[replica] = group
        self._waiting[replica] = asyncio.get_running_loop().create_future()
        try:
            for place in self._places.values():
                if place.key == replica:
                    self._update(place)
            if not group.is_there:
                await self._waiting[replica]
        except BaseException:
            await self.unload(replica)
            raise
        finally:
            del self._waiting[replica]
        if group.loaded is None:
            raise WorkerLostError("the model's first replica was lost right after it had answered")
        return group.loaded

    def _group_of(self, key: str) -> Group:
        options = self._options_of(key)
        balancer = Balancer(options.num * SLOTS_PER_REPLICA, options.policy, options.max_imbalance)
        name = partial(self._name_of, key)
        notify, routes, worker = self._notify, self._routes, self._worker
        return Group(key, self.link, balancer, self._on_group_change, notify, routes, worker, name, self._limits)

    async def unload(self, replica: str) -> None:
        """Close the connections to a group's replicas; the controller decides when they are unloaded."""
        group = self.groups.pop(replica, None)
        if group is not None:
            await group.close()
            self._lost_s.pop(replica, None)

    def loaded(self, replica: str) -> Loaded | None:
        """Measurements of a group's first replica; None: no replica is available now."""
        group = self.groups.get(replica)
        return group.loaded if group is not None and group.is_there else None

    @property
    def is_up(self) -> bool:
        """True once the controller has reported where replicas are."""
        return not self.trouble

    @property
    def recording_fault(self) -> str:
        """Reason why a worker has stopped recording; empty: all record, or recording is off."""
        faults = (worker.recording_fault for worker in self._workers())
        return next((fault for fault in faults if fault), "")

    @property
    def kv_fault(self) -> str:
        """Reason why a worker stores less KV outside of its device than its budgets allow; empty: none does."""
        return next((worker.kv_fault for worker in self._workers() if worker.kv_fault), "")

    # -- requests -------------------------------------------------------------------------------------------------

    @contextmanager
    def open_mailbox(self, replica: str, request: GenerationRequest) -> Iterator[HostedMailbox]:
        """Submit a request to a replica of a group, and yield its mailbox; leaving the block early aborts the request.

        Raises:
            WorkerLostError: no replica is available.
            QueueFullError: the chosen worker accepts no more requests now.
            InvalidParameterError: the request contains a number that a message cannot hold.
        """
        group = self.groups.get(replica)
        if group is None:
            raise WorkerLostError("the model is no longer placed; send the request again")
        mailbox = group.submit(request)
        try:
            yield mailbox
        finally:
            mailbox.leave()

    def abort_all(self, error: LockstepError, of_replica: str | None = None) -> None:
        """End all open requests, or those of one group, with this error."""
        for worker in self._workers(of_replica):
            worker.abort_all(error)

    @property
    def num_open(self) -> int:
        """Number of open mailboxes."""
        return sum(worker.num_open for worker in self._workers())

    # -- queries --------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics by group, of all its replicas together."""
        found: dict[str, list[MetricsSnapshot]] = {}
        for report in await asyncio.gather(*(worker.metrics() for worker in self._workers())):
            for key, snapshot in report.items():
                found.setdefault(key, []).append(snapshot)
        return {key: merged(snapshots) for key, snapshots in found.items() if key in self.groups}

    async def check(self) -> Checked | None:
        """Check the invariants of each worker between two steps. Returns the first violation; None: a worker does not
        answer."""
        answers = await asyncio.gather(*(worker.check() for worker in self._workers()))
        violations = [each for each in answers if each is None or each.fault]
        return violations[0] if violations else next(iter(answers), None)

    async def reset_prefix_cache(self) -> int:
        """Drop all cached content that is not in use; returns the number of blocks."""
        return sum(await asyncio.gather(*(worker.reset_prefix_cache() for worker in self._workers())))

    async def sessions(self) -> Mapping[str, tuple[SessionReport, ...]]:
        """Sessions by group."""
        return _sessions_of(await asyncio.gather(*(worker.sessions() for worker in self._workers())))

    async def session_locations(self, environments: Sequence[bytes]) -> tuple[SessionsReport | None, KeptReport | None]:
        """Sessions on all devices by group, and stored sessions by environment; None: a worker did not answer in
        time."""
        answers = await asyncio.gather(*(worker.session_locations(environments) for worker in self._workers()))
        there = [on_device for on_device, _ in answers if on_device is not None]
        kept = [report.sessions for _, report in answers if report is not None and report.sessions is not None]
        on_device = SessionsReport(dict(_sessions_of([report.replicas for report in there]))) if there else None
        if len(kept) < len(answers):
            return on_device, None
        each = tuple(tuple(session for report in kept for session in report[i]) for i in range(len(environments)))
        return on_device, KeptReport(each)

    async def sweep(self, replica: str, session_id: str | None = None, owner: str | None = None) -> SweepResult:
        """Free what idle sessions hold at the replicas of a group."""
        those = self._workers(replica)
        return _total(await asyncio.gather(*(worker.sweep(replica, session_id, owner) for worker in those)))

    async def end_session(self, replica: str, session_id: str, owner: str | None = None) -> SweepResult:
        """Free what a session holds at the replicas of a group, and prevent it from holding more."""
        return _total(
            await asyncio.gather(*(w.end_session(replica, session_id, owner) for w in self._workers(replica)))
        )

    # -- for a supervised worker only ---------------------------------------------------------------------------

    async def use_adapters(self, replica: str, adapters: tuple[AdapterSource, ...]) -> None:
        """Do nothing: with several hosts, other adapters make another group, as they are part of its key."""

    def prioritise(self, replica: str, priority: int) -> None:
        """Does nothing: a group's priority is part of its demand."""

    def open_store(self, options: KVStoreOptions) -> None:
        """Does nothing: the workers of each host open that host's store."""

    def watch_steps(self, max_per_s: float) -> None:
        """Does nothing: steps are reported to the process that started the worker."""

    def _workers(self, of_group: str | None = None) -> list[SupervisedWorker]:
        groups = (
            self.groups.values() if of_group is None else [self.groups[of_group]] if of_group in self.groups else []
        )
        return [m.worker for group in groups for m in group.members if m.worker is not None and m.loaded is not None]


def _sessions_of(reports: Sequence[Mapping[str, tuple[SessionReport, ...]]]) -> dict[str, tuple[SessionReport, ...]]:
    found: dict[str, tuple[SessionReport, ...]] = {}
    for report in reports:
        for key, sessions in report.items():
            found[key] = (*found.get(key, ()), *sessions)
    return found


def _total(results: Sequence[SweepResult]) -> SweepResult:
    return SweepResult(sum(each.num_sessions for each in results), sum(each.num_blocks for each in results))
