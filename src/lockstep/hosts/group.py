"""Replica groups: sends each request to one of an artifact's replicas on several workers, chosen by a balancer.

If a request's replica is lost before the first token, the request is sent once to another replica. If it is lost later,
the request ends with the error. Each state change of a replica is logged on one line with the names of its model and
host.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.core.balancer import Balancer, RoutingChoice, RoutingPolicy
from lockstep.core.prefix import ContentNews, block_hashes, namespace_of
from lockstep.engine.adapters import start_of
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError, ReplicaGoneError, WorkerLostError
from lockstep.hosts.values import GatewayLimits, LinkOptions, ReplicaPhase, ReplicaStatus, ReplicaUse
from lockstep.worker.health import HealthLimits
from lockstep.worker.lifecycle import WorkerLost
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import ContentsChanged, Loaded, Unloaded
from lockstep.worker.network import WorkerAddress
from lockstep.worker.pending import Mailbox
from lockstep.worker.progress import CallObserver
from lockstep.worker.supervised import Notice, SupervisedWorker

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
RETRY_REJECTED_S = 5.0
"""Time in seconds until a rejected connection is tried again: a file may have been corrected or the worker
restarted."""


class RouteWatcher(Protocol):
    """Receiver of all inputs and decisions of a group's balancer, in order; `cluster.route_recorder` records them."""

    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None: ...
    def admitted(self, group: str, replica: int) -> None: ...
    def withdrawn(self, group: str, replica: int, is_lost: bool) -> None: ...
    def learned(self, group: str, replica: int, news: Sequence[ContentNews]) -> None: ...
    def ended(self, group: str, replica: int) -> None: ...
    def chosen(
        self, group: str, hashes: Sequence[bytes], session: str | None, choice: RoutingChoice | None
    ) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One replica of a group: its location, connection and state."""

    number: int
    place: ReplicaStatus | None = None
    """Last status from the controller; None: there is none yet."""
    worker: SupervisedWorker | None = None
    """Connection to the replica's worker; None: not connected."""
    loaded: Loaded | None = None
    fault: str = ""
    """Reason why the replica gets no requests although its worker runs; empty: it gets requests."""
    retry_at_s: float = 0.0
    """Time before which a rejected connection is not tried again."""
    lost_s: float | None = None
    """When its loss was logged; None: it is available, or never was."""
    generation: int = 0
    """Number of times that its worker was lost. Requests of an earlier generation are no longer open."""
    use: ReplicaUse = field(default_factory=ReplicaUse)


class Group:
    """Replicas of one artifact, as seen by one gateway. Event loop only.

    Args:
        key: key of the replica in the planner and in each worker.
        on_change: called when the first replica becomes available, and when the last one is lost.
        notify: called with the workers' notices about sessions.
        routes: receives each routing decision and its inputs; None: routing is not recorded.
        name: returns the model's name, for messages.
    """

    def __init__(
        self,
        key: str,
        link: LinkOptions,
        balancer: Balancer,
        on_change: Callable[[Group], None],
        notify: Callable[[Notice], None],
        routes: RouteWatcher | None = None,
        worker: WorkerOptions | None = None,
        name: Callable[[], str] | None = None,
        limits: GatewayLimits | None = None,
    ) -> None:
        limits = limits or GatewayLimits()
        self.key = key
        self._health = HealthLimits(answer_s=limits.answer_s, silence_s=limits.silence_s, load_s=limits.silence_s)
        self._worker = worker or WorkerOptions()
        self._now_s = self._worker.system.now_s
        self._name = name or (lambda: key)
        self.balancer = balancer
        self.members = tuple(Member(number) for number in range(balancer.num_replicas))
        self.loaded: Loaded | None = None
        """Artifact and environment that every replica must match: those of the first replica that loaded it."""
        self._link = link
        self._on_change = on_change
        self._notify = notify
        self._routes = routes
        self._tasks: set[asyncio.Task[None]] = set()
        if routes is not None:
            routes.opened(key, balancer.num_replicas, balancer.policy, balancer.max_imbalance)
        for member in self.members:
            self._withdraw(member, is_lost=False)

    # -- connections ----------------------------------------------------------------------------------------------

    def update(self, place: ReplicaStatus) -> None:
        """Apply a status from the controller. A replica that could not be reached is tried again."""
        member = self.members[place.number]
        before, member.place = member.place, place
        is_there = place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING) and place.port
        if (
            member.worker is not None
            and before is not None
            and (not is_there or _address_of(before) != _address_of(place))
        ):
            self._close_link(member, place.reason or "it has moved to another address")
        if is_there and member.worker is None:
            self._open_link(member, place)
        if place.state is ReplicaPhase.LEAVING:
            self._withdraw(member, is_lost=False)
        elif self.is_linked(member) and not member.fault:
            self._admit(member)

    def _open_link(self, member: Member, place: ReplicaStatus) -> None:
        link = self._link
        options = WorkerOptions(
            "network",
            address=WorkerAddress(place.address, place.port, link.secret_file, link.tls_ca, link.allows_plain),
            health=self._health,
            stream_interval_s=self._worker.stream_interval_s,
            system=self._worker.system,
        )
        worker = SupervisedWorker(options, lambda notice: self._on_notice(member, worker, notice))
        member.worker = worker
        self._run(self._connect(member, worker))

    async def _connect(self, member: Member, worker: SupervisedWorker) -> None:
        try:
            await worker.start()
        except LockstepError as error:  # e.g. another secret, another version, or unusable files
            if member.worker is worker:
                member.worker, member.retry_at_s = None, self._now_s() + RETRY_REJECTED_S
                self._set_fault(member, f"cannot connect to its worker: {error}")
            await worker.close()

    def _set_fault(self, member: Member, fault: str) -> None:
        """Set the reason why a running replica gets no requests; a new reason is logged."""
        if fault and fault != member.fault:
            log.error("%s gets no requests: %s", self.label(member), fault)
        member.fault = fault

    def label(self, member: Member) -> str:
        """Model, number and host of a replica, for messages."""
        host = "" if member.place is None or not member.place.host else f" on {member.place.host}"
        return f"{self._name()}#{member.number}{host}"

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close_link(self, member: Member, reason: str = "") -> None:
        """Close the connection to a replica.

        Args:
            reason: why the replica is no longer at its address; empty: this gateway closes.
        """
        worker, member.worker = member.worker, None
        self._on_lost(member, reason)
        if worker is not None:
            gone = ReplicaGoneError(f"the model's replica is gone ({reason}); send the request again")
            self._run(worker.close(gone if reason else None))

    async def close(self) -> None:
        """Close the connections; the workers keep running."""
        for member in self.members:
            self._close_link(member)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def watch(self) -> None:
        """Withdraw replicas whose workers are silent, admit those that answer again, and retry rejected connections."""
        now_s = self._now_s()
        for member in self.members:
            place, worker = member.place, member.worker
            if place is None or place.state not in (ReplicaPhase.READY, ReplicaPhase.LEAVING):
                continue
            if worker is None and now_s >= member.retry_at_s:
                self._open_link(member, place)
            elif worker is None or member.loaded is None or member.fault:
                continue
            elif worker.trouble and self.balancer.is_there(member.number):
                self._log_lost(member, worker.trouble)
                self._withdraw(member, is_lost=False)
            elif not worker.trouble and place.state is ReplicaPhase.READY:
                self._admit(member)

    @property
    def is_there(self) -> bool:
        """True while any replica gets requests."""
        return any(self.balancer.is_there(member.number) for member in self.members)

    def num_open(self, number: int) -> int:
        """Number of requests that are open at a replica."""
        worker = self.members[number].worker
        return 0 if worker is None else worker.num_open

    def trouble(self, member: Member) -> str:
        """Reason why a replica gets no requests, in one sentence; empty: it gets requests."""
        if self.balancer.is_there(member.number):
            return ""
        place = member.place
        if member.fault:
            return member.fault
        if place is not None and (place.reason or place.state is not ReplicaPhase.READY):
            return place.reason or place.state.value
        if member.worker is not None and member.worker.is_up:
            return member.worker.trouble or "its worker has not reported the model yet"
        why = "" if member.worker is None else member.worker.link_fault
        return f"not connected to its worker: {why}" if why else "not connected to its worker"

    @property
    def is_refused(self) -> bool:
        """True if the connections to all ready replicas are rejected, e.g. because of another secret."""
        there = [each for each in self.members if each.place is not None and each.place.state is ReplicaPhase.READY]
        return bool(there) and all(each.fault and each.worker is None for each in there)

    def is_linked(self, member: Member) -> bool:
        """True if a replica's worker has loaded the model and answers this gateway."""
        worker = member.worker
        return worker is not None and worker.is_up and member.loaded is not None and not worker.trouble

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> HostedMailbox:
        """Send a tokenised request to the replica that the balancer chooses.

        Raises:
            WorkerLostError: no replica is available.
            QueueFullError, InvalidParameterError: as in `SupervisedWorker.submit`.
        """
        hashes: tuple[bytes, ...] = ()
        if self.loaded is not None and self.balancer.policy is RoutingPolicy.PREFIX and request.pooling is None:
            namespace = namespace_of(self.loaded.fingerprint, request.cache_salt)
            adapter = self.loaded.adapters.get(request.adapter)
            start = None if adapter is None else start_of(*adapter, request.prompt_ids)
            hashes = block_hashes(namespace, request.prompt_ids, self.loaded.config.block_size, adapter=start)
        mailbox = HostedMailbox(self, request, hashes)
        try:
            mailbox.send()
        except ReplicaGoneError:
            mailbox.send_again()
        return mailbox

    def choose(self, hashes: tuple[bytes, ...], session: str | None) -> Member:
        """Choose the replica for a request; WorkerLostError: none is available."""
        choice = self.balancer.choose(hashes, session)
        if self._routes is not None:
            self._routes.chosen(self.key, hashes, session, choice)
        if choice is None:
            gone = f"no replica of {self._name()} is available; send the request again"
            raise WorkerLostError(gone, retry_after_s=RETRY_AFTER_S)
        member = self.members[choice.replica]
        member.use.routed[choice.why] += 1
        return member

    def ended(self, member: Member, generation: int) -> None:
        """Count the end of a request, unless the worker that served it was lost since."""
        if member.generation == generation:
            self.balancer.ended(member.number)
            if self._routes is not None:
                self._routes.ended(self.key, member.number)

    # -- notices of workers ------------------------------------------------------------------------------------------

    def _on_notice(self, member: Member, worker: SupervisedWorker, notice: Notice) -> None:
        if member.worker is not worker:
            return  # the connection was closed already
        match notice:
            case Loaded(key) if key == self.key:
                self._on_loaded(member, notice)
            case Unloaded(key) if key == self.key:
                self._on_lost(member, "its worker unloaded the model")
            case WorkerLost(reason):
                self._on_lost(member, f"its worker was lost: {reason}")
            case ContentsChanged(key, news) if key == self.key:
                self.balancer.learn(member.number, news)
                if self._routes is not None:
                    self._routes.learned(self.key, member.number, news)
            case Loaded() | Unloaded() | ContentsChanged():
                pass  # replicas of other groups on this worker
            case _:
                self._notify(notice)

    def _on_loaded(self, member: Member, loaded: Loaded) -> None:
        member.loaded = loaded
        if self.loaded is None or not self.is_there:
            self.loaded = loaded
        self._set_fault(member, difference(self.loaded, loaded))
        if not member.fault and (member.place is None or member.place.state is not ReplicaPhase.LEAVING):
            self._admit(member)

    def _on_lost(self, member: Member, reason: str) -> None:
        """Handle the loss of a replica's worker or model.

        Args:
            reason: for the log; empty: this gateway closes.
        """
        if member.worker is None and member.loaded is None and not self.balancer.is_there(member.number):
            return
        if reason and self.balancer.is_there(member.number):
            self._log_lost(member, reason)
        member.loaded = None
        member.generation += 1
        self._withdraw(member, is_lost=True)

    def _log_lost(self, member: Member, reason: str) -> None:
        if member.lost_s is None:
            log.warning("%s is lost: %s", self.label(member), reason)
            member.lost_s = self._now_s()

    def _admit(self, member: Member) -> None:
        if self.balancer.is_there(member.number):
            return
        was_there, now_s = self.is_there, self._now_s()
        if member.lost_s is not None:
            log.warning("%s is available again after %.1f s", self.label(member), now_s - member.lost_s)
            member.lost_s = None
        member.use.mark_available(now_s)
        self.balancer.admit(member.number)
        if self._routes is not None:
            self._routes.admitted(self.key, member.number)
        if not was_there:
            self._on_change(self)

    def _withdraw(self, member: Member, is_lost: bool) -> None:
        was_there = self.is_there
        if member.place is not None and self.balancer.is_there(member.number):
            member.use.mark_unavailable(self._now_s())
        self.balancer.withdraw(member.number, is_lost)
        if self._routes is not None:
            self._routes.withdrawn(self.key, member.number, is_lost)
        if was_there and not self.is_there:
            self._on_change(self)


class HostedMailbox:
    """Mailbox of one request of a group; the counterpart of `lockstep.worker.pending.Mailbox` for one worker."""

    __slots__ = (
        "_generation",
        "_group",
        "_has_tokens",
        "_hashes",
        "_inner",
        "_is_second",
        "_member",
        "_observer",
        "_observer",
        "_request",
        "_worker",
    )

    def __init__(self, group: Group, request: GenerationRequest, hashes: tuple[bytes, ...]) -> None:
        self._group = group
        self._request = request
        self._hashes = hashes
        self._member: Member | None = None
        self._worker: SupervisedWorker | None = None
        self._inner: Mailbox | None = None
        """Mailbox at the worker that answers now; None: none does."""
        self._generation = 0
        self._observer: CallObserver | None = None
        self._has_tokens = False
        self._is_second = False

    @property
    def observer(self) -> CallObserver | None:
        """Called with the events of the request before its first token."""
        return self._observer

    @observer.setter
    def observer(self, observer: CallObserver | None) -> None:
        self._observer = observer
        if self._inner is not None:
            self._inner.observer = observer

    def send(self) -> None:
        """Send the request to the replica that the balancer chooses; ReplicaGoneError: the replica was lost
        meanwhile."""
        member = self._group.choose(self._hashes, self._request.session_id)
        self._member, self._worker, self._generation = member, member.worker, member.generation
        try:
            assert member.worker is not None, "the balancer only chooses connected replicas"
            self._inner = member.worker.submit(self._group.key, self._request)
            self._inner.observer = self._observer
        except BaseException:
            self.leave()
            raise

    def send_again(self) -> None:
        """Send the request to another replica; done once at most."""
        self._is_second = True
        if self._member is not None:
            self._member.use.num_retried += 1
        self.leave()
        self.send()

    def leave(self) -> None:
        """Drop the request; its remaining outputs are not needed."""
        member, self._member = self._member, None
        inner, self._inner = self._inner, None
        if inner is not None and self._worker is not None:
            self._worker.leave(inner)
        if member is not None:
            self._group.ended(member, self._generation)

    async def take(self) -> list[TokenOutput]:
        """Return all outputs received so far; as `lockstep.worker.pending.Mailbox.take`."""
        while True:
            assert self._inner is not None, "the request was sent and is still open"
            try:
                outputs = await self._inner.take()
            except ReplicaGoneError:
                if self._has_tokens or self._is_second:
                    raise
                self.send_again()
                continue
            self._has_tokens = self._has_tokens or bool(outputs)
            return outputs


def difference(one: Loaded, other: Loaded) -> str:
    """Reason why two replicas do not compute identical bits, in one sentence; empty: they do."""
    if one.fingerprint != other.fingerprint:
        return f"its artifact differs from the first replica's ({other.fingerprint[:12]}, not {one.fingerprint[:12]})"
    if one.config.block_size != other.config.block_size or one.config.max_model_len != other.config.max_model_len:
        return "its block size or context length differs from the first replica's"
    names = dict.fromkeys((*one.environment, *other.environment))
    differing = [name for name in names if one.environment.get(name) != other.environment.get(name)]
    if differing:
        pairs = (f"{name} {other.environment.get(name)}, not {one.environment.get(name)}" for name in differing)
        return f"its answers may differ in bits from the first replica's: {', '.join(pairs)}"
    return ""


def _address_of(place: ReplicaStatus) -> tuple[str, int]:
    return place.address, place.port
