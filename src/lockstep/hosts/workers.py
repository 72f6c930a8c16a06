"""Workers on several hosts as one, with the surface of a `SupervisedWorker`; its replicas are groups of theirs.

The controller determines where replicas are (`apply`); this package has the links to them. Loading is connecting: a
group is loaded when its first replica answers, and unloaded when its links are closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from lockstep.core.balancer import Balancer
from lockstep.core.request import Priority
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.engine.metrics import MetricsSnapshot, merged
from lockstep.engine.options import LoadOptions, Progress
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionReport, SweepResult
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.hosts.group import Group, HostedMailbox, RouteWatcher
from lockstep.hosts.values import SLOTS_PER_REPLICA, GroupOptions, LinkOptions, ReplicaPhase, ReplicaStatus
from lockstep.worker.messages import Checked, KeptReport, Loaded, SessionsReport
from lockstep.worker.supervised import Notice, SupervisedWorker

RETRY_AFTER_S = 2.0
NO_REPLICA_S = 15.0
"""Bound of the wait for a model without a replica. While none can take a request, and none is being started or loaded,
calls wait so long; then they end, and further ones are refused at once until a replica is there. Where the links to all
replicas are refused, as by another secret, no call waits."""
WATCH_S = 0.5
"""Between two looks at replicas that are silent, or whose links were refused."""
COMING = (ReplicaPhase.STARTING, ReplicaPhase.LOADING)


@dataclass(frozen=True, slots=True)
class GroupLost:
    """Notice that no replica of a group is there any more."""

    key: str


class HostedWorkers:
    """Replicas of one gateway's models, wherever they are. Event loop only.

    Args:
        notify: called with what workers report of sessions, and with groups that are lost.
        options_of: how a group is placed and chosen from, by its key.
        routes: called with every choice.
        name_of: the name of a group's model by its key, for messages.
    """

    pid = None
    kv_tiers: Mapping[str, TierStats] = {}

    def __init__(
        self,
        link: LinkOptions,
        options_of: Callable[[str], GroupOptions],
        notify: Callable[[Notice | GroupLost], None],
        routes: RouteWatcher | None = None,
        stream_interval_s: float = 0.0,
        name_of: Callable[[str], str] = str,
    ) -> None:
        self.groups: dict[str, Group] = {}
        """Those that were loaded, or are being loaded, by key."""
        self.fault = ""
        """Why reports of the controller are missing or old, in one sentence; empty: they are neither."""
        self.trouble = "the hosts are not known yet"
        """The reason why no request would be answered now, in one sentence; empty: there is none."""
        self.link = link
        """How gateways and workers are linked."""
        self._options_of = options_of
        self._notify = notify
        self._routes = routes
        self._stream_interval_s = stream_interval_s
        self._name_of = name_of
        self._places: dict[tuple[str, int], ReplicaStatus] = {}
        self._lost_s: dict[str, float] = {}
        """When groups lost their last replica, by key; those that never had one, or were unloaded, are left out."""
        self._coming_s: dict[str, float] = {}
        """When replicas of groups were last reported as being started or loaded, by key."""
        self._contact_s = 0.0
        """When the controller last reported what it sees."""
        self._watching: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """Loads that wait for the first replica of a group."""

    # -- where replicas are ----------------------------------------------------------------------------------------

    def apply(self, places: Iterable[ReplicaStatus]) -> None:
        """Take over where all replicas are."""
        now = {(place.key, place.number): place for place in places}
        for gone in [name for name in self._places if name not in now]:
            self._tell(ReplicaStatus(*gone, ReplicaPhase.WAITING, "it was taken away"))
        self._places = now
        for place in now.values():
            self._tell(place)

    def note_contact(self, is_current: bool) -> None:
        """Note a report of the controller, whether it brought news or not.

        Args:
            is_current: whether it can see replicas now; else its places are those that it saw last.
        """
        if is_current:
            self._contact_s = now_s = time.monotonic()
            self._coming_s |= {place.key: now_s for place in self._places.values() if place.state in COMING}

    def absence(self, replica: str, since_s: float | None = None) -> UnavailableError | None:
        """The error of calls to a group that has had no replica for `NO_REPLICA_S`; None: it has one, or they may wait.

        Args:
            since_s: when a call began to wait for it; None: it comes now.
        """
        group = self.groups.get(replica)
        if group is not None and group.is_there:
            return None
        now_s = time.monotonic()
        begun_s = self._lost_s.get(replica, now_s if since_s is None else since_s)
        is_placed = any(place.key == replica for place in self._places.values())
        coming_s = self._coming_s.get(replica, begun_s) if is_placed else self._contact_s  # its turn may be yet to come
        is_refused = group is not None and group.is_refused
        if not is_refused and now_s - max(begun_s, coming_s) < NO_REPLICA_S:
            return None
        return UnavailableError(self._why_absent(replica), retry_after_s=RETRY_AFTER_S)

    def _why_absent(self, key: str) -> str:
        """The reason why no replica of a group can take a request, in one sentence."""
        group, name = self.groups.get(key), self._name_of(key)
        places = [place for place in self._places.values() if place.key == key]
        if group is None:
            reasons = [place.reason or place.state.value for place in places]
        else:
            numbers = [place.number for place in places if place.number < len(group.members)]
            reasons = [group.trouble(group.members[number]) for number in numbers]
        why = "; ".join(dict.fromkeys(filter(None, (*reasons, self.fault)))) or "none is placed"
        return f"no replica of {name} can take requests: {why}"

    def give_up(self, key: str) -> None:
        """End the load of a group that is not to be there after all."""
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(WorkerLostError("the model was taken away while its replicas were being reached"))

    def _tell(self, place: ReplicaStatus) -> None:
        group = self.groups.get(place.key)
        if group is not None and place.number < len(group.members):
            group.moved(place)

    def _changed(self, group: Group) -> None:
        if group.is_there:
            self._lost_s.pop(group.key, None)
            waiting = self._waiting.get(group.key)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        elif group.key in self.groups:
            self._lost_s[group.key] = time.monotonic()
            self._notify(GroupLost(group.key))

    # -- as a worker ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Watch replicas from now on; links are made when groups are loaded."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for group in tuple(self.groups.values()):
                group.watch()

    async def close(self) -> None:
        """Close the links; the workers go on."""
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
        """Reach the replicas of a group; returns when the first one answers. What is loaded how is the owner's order.

        Raises:
            WorkerLostError: the first one was lost in this moment.
        """
        group = self.groups.get(replica) or self._group_of(replica)
        self.groups[replica] = group
        self._waiting[replica] = asyncio.get_running_loop().create_future()
        try:
            for place in self._places.values():
                if place.key == replica:
                    self._tell(place)
            if not group.is_there:
                await self._waiting[replica]
        except BaseException:
            await self.unload(replica)
            raise
        finally:
            del self._waiting[replica]
        if group.loaded is None:
            raise WorkerLostError("the first replica of the model was lost when it had just been reached")
        return group.loaded

    def _group_of(self, key: str) -> Group:
        options = self._options_of(key)
        balancer = Balancer(options.num * SLOTS_PER_REPLICA, options.policy, options.max_imbalance)
        routes, interval_s = self._routes, self._stream_interval_s
        name = partial(self._name_of, key)
        return Group(key, self.link, balancer, self._changed, self._notify, routes, interval_s, name)

    async def unload(self, replica: str) -> None:
        """Hang up on the replicas of a group; what becomes of them is the owner's order."""
        group = self.groups.pop(replica, None)
        if group is not None:
            await group.close()
            self._lost_s.pop(replica, None)

    def loaded(self, replica: str) -> Loaded | None:
        """Measurements of a group's first replica; None: no replica is there now."""
        group = self.groups.get(replica)
        return group.loaded if group is not None and group.is_there else None

    @property
    def is_up(self) -> bool:
        """True once the controller has reported where replicas are."""
        return not self.trouble

    @property
    def recording_fault(self) -> str:
        """The reason why a worker records nothing now, by its last word; empty: all do, or none is to."""
        faults = (worker.recording_fault for worker in self._workers())
        return next((fault for fault in faults if fault), "")

    @property
    def kv_fault(self) -> str:
        """The reason why a worker keeps less KV outside of its device than its budgets allow; empty: none does."""
        return next((worker.kv_fault for worker in self._workers() if worker.kv_fault), "")

    # -- requests -------------------------------------------------------------------------------------------------

    @contextmanager
    def open_mailbox(self, replica: str, request: GenerationRequest) -> Iterator[HostedMailbox]:
        """The mailbox of a request for a block, which a replica of a group is sent; leaving early aborts it.

        Raises:
            WorkerLostError: no replica is there.
            QueueFullError: the chosen worker takes no more requests now.
            InvalidParameterError: the request holds a number that no message can.
        """
        group = self.groups.get(replica)
        if group is None:
            raise WorkerLostError("the model is not placed any more; send the request again")
        mailbox = group.submit(request)
        try:
            yield mailbox
        finally:
            mailbox.leave()

    def abort_all(self, error: LockstepError, of_replica: str | None = None) -> None:
        """End every open request, or every one of a group, with this error."""
        for worker in self._workers(of_replica):
            worker.abort_all(error)

    @property
    def num_open(self) -> int:
        """Mailboxes that were not left."""
        return sum(worker.num_open for worker in self._workers())

    # -- questions ------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics by group, of all its replicas together."""
        found: dict[str, list[MetricsSnapshot]] = {}
        for report in await asyncio.gather(*(worker.metrics() for worker in self._workers())):
            for key, snapshot in report.items():
                found.setdefault(key, []).append(snapshot)
        return {key: merged(snapshots) for key, snapshots in found.items() if key in self.groups}

    async def check(self) -> Checked | None:
        """Check each worker between two of its steps; the first fault, or None: a worker does not answer."""
        answers = await asyncio.gather(*(worker.check() for worker in self._workers()))
        faulty = [each for each in answers if each is None or each.fault]
        return faulty[0] if faulty else next(iter(answers), None)

    async def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns how many blocks that were."""
        return sum(await asyncio.gather(*(worker.reset_prefix_cache() for worker in self._workers())))

    async def sessions(self) -> Mapping[str, tuple[SessionReport, ...]]:
        """Sessions by group."""
        return _sessions_of(await asyncio.gather(*(worker.sessions() for worker in self._workers())))

    async def session_locations(self, environments: Sequence[bytes]) -> tuple[SessionsReport | None, KeptReport | None]:
        """Sessions on all devices by group, and those that are kept outside by environment; None: a worker does
        not answer in a few seconds."""
        answers = await asyncio.gather(*(worker.session_locations(environments) for worker in self._workers()))
        there = [on_device for on_device, _ in answers if on_device is not None]
        kept = [report.sessions for _, report in answers if report is not None and report.sessions is not None]
        on_device = SessionsReport(dict(_sessions_of([report.replicas for report in there]))) if there else None
        if len(kept) < len(answers):
            return on_device, None
        each = tuple(tuple(session for report in kept for session in report[i]) for i in range(len(environments)))
        return on_device, KeptReport(each)

    async def sweep(self, replica: str, session_id: str | None = None, owner: str | None = None) -> SweepResult:
        """Free what idle sessions keep at any replica of a group."""
        those = self._workers(replica)
        return _total(await asyncio.gather(*(worker.sweep(replica, session_id, owner) for worker in those)))

    async def end_session(self, replica: str, session_id: str, owner: str | None = None) -> SweepResult:
        """Free what a session keeps at any replica of a group, and let it keep nothing more."""
        return _total(
            await asyncio.gather(*(w.end_session(replica, session_id, owner) for w in self._workers(replica)))
        )

    # -- what only a worker's owner orders -----------------------------------------------------------------------------

    def prioritise(self, replica: str, priority: int) -> None:
        """Nothing: a group's class goes with the demand for it."""

    def open_store(self, options: KVStoreOptions) -> None:
        """Nothing: each host has its own store, which its workers open."""

    def watch_steps(self, max_per_s: float) -> None:
        """Nothing: steps are reported to the process that owns a worker."""

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
