"""Groups: the replicas of one artifact on several workers, of which the balancer chooses one for each request.

A request whose replica goes before its first token is sent to another replica, once; after it, it ends with the error.
Changes of a replica are logged here, one line each, by the names of its model and host.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.core.balancer import Balancer, Choice, RoutingPolicy
from lockstep.core.prefix import ContentNews, block_hashes, namespace_of
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import LockstepError, ReplicaGoneError, WorkerLostError
from lockstep.hosts.values import LinkOptions, ReplicaPhase, ReplicaStatus, ReplicaUse
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
SILENCE_S = 10.0
"""A worker on a network that is silent for this time counts as lost; its health is checked every second, and it
loads nothing while it serves."""
REFUSED_AGAIN_S = 5.0
"""Until a link that was refused is tried again: a file may have been corrected, or a worker started anew."""
ANSWER_S = 4.0
"""Silent for so long, it gets no new requests."""


class RouteWatcher(Protocol):
    """Receives all inputs and decisions of a group's balancer, in order; `cluster.route_recorder` records them."""

    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None: ...
    def admitted(self, group: str, replica: int) -> None: ...
    def withdrawn(self, group: str, replica: int, is_lost: bool) -> None: ...
    def learned(self, group: str, replica: int, news: Sequence[ContentNews]) -> None: ...
    def ended(self, group: str, replica: int) -> None: ...
    def chosen(self, group: str, hashes: Sequence[bytes], session: str | None, choice: Choice | None) -> None: ...


@dataclass(slots=True, eq=False)
class Member:
    """One replica of a group: where it is, and what is known of it."""

    number: int
    place: ReplicaStatus | None = None
    """By the owner's last word; None: it has not spoken of it."""
    worker: SupervisedWorker | None = None
    """The link to where it is; None: it is nowhere."""
    loaded: Loaded | None = None
    fault: str = ""
    """Why it gets nothing although it is there; empty: it does."""
    reach_at_s: float = 0.0
    """Before this time it is not reached again, as its link was refused."""
    lost_s: float | None = None
    """When its loss was logged; None: it is there, or was never."""
    num_lives: int = 0
    """Workers that were lost under it: requests that were open at one of them are not open any more."""
    use: ReplicaUse = field(default_factory=ReplicaUse)


class Group:
    """The replicas of one artifact, as one gateway has them. Event loop only.

    Args:
        key: of the replica, at the planner and at each worker.
        on_change: called when the group has its first replica, or has lost its last.
        notify: told what workers say of sessions.
        routes: told every choice and what it was made of; None: nobody.
        name: of the model, for messages.
    """

    def __init__(
        self,
        key: str,
        link: LinkOptions,
        balancer: Balancer,
        on_change: Callable[[Group], None],
        notify: Callable[[Notice], None],
        routes: RouteWatcher | None = None,
        stream_interval_s: float = 0.0,
        name: Callable[[], str] | None = None,
    ) -> None:
        self.key = key
        self._name = name or (lambda: key)
        self.balancer = balancer
        self.members = tuple(Member(number) for number in range(balancer.num_replicas))
        self.loaded: Loaded | None = None
        """Whose artifact and environment all replicas must have: the first that came."""
        self._link = link
        self._on_change = on_change
        self._notify = notify
        self._routes = routes
        self._stream_interval_s = stream_interval_s
        self._tasks: set[asyncio.Task[None]] = set()
        if routes is not None:
            routes.opened(key, balancer.num_replicas, balancer.policy, balancer.max_imbalance)
        for member in self.members:
            self._withdraw(member, is_lost=False)

    # -- where replicas are ----------------------------------------------------------------------------------------

    def moved(self, place: ReplicaStatus) -> None:
        """Take over where a replica is, by the owner's word; one that could not be reached is tried again."""
        member = self.members[place.number]
        before, member.place = member.place, place
        is_there = place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING) and place.port
        if member.worker is not None and before is not None and (not is_there or _where(before) != _where(place)):
            self._leave(member, place.reason or "it is not where it was")
        if is_there and member.worker is None:
            self._reach(member, place)
        if place.state is ReplicaPhase.LEAVING:
            self._withdraw(member, is_lost=False)
        elif self.is_linked(member) and not member.fault:
            self._admit(member)

    def _reach(self, member: Member, place: ReplicaStatus) -> None:
        link = self._link
        options = WorkerOptions(
            "network",
            address=WorkerAddress(place.address, place.port, link.secret_file, link.tls_ca, link.allows_plain),
            health=HealthLimits(answer_s=ANSWER_S, silence_s=SILENCE_S, load_s=SILENCE_S),
            stream_interval_s=self._stream_interval_s,
        )
        worker = SupervisedWorker(options, lambda notice: self._noticed(member, worker, notice))
        member.worker = worker
        self._run(self._greet(member, worker))

    async def _greet(self, member: Member, worker: SupervisedWorker) -> None:
        try:
            await worker.start()
        except LockstepError as error:  # another secret or version, or files that cannot be used
            if member.worker is worker:
                member.worker, member.reach_at_s = None, time.monotonic() + REFUSED_AGAIN_S
                self._set_fault(member, f"the link to its worker is refused: {error}")
            await worker.close()

    def _set_fault(self, member: Member, fault: str) -> None:
        """Note why a replica gets no requests although it is there; logged when it changes."""
        if fault and fault != member.fault:
            log.error("%s gets no requests: %s", self.label(member), fault)
        member.fault = fault

    def label(self, member: Member) -> str:
        """A replica by its model, number and host, for messages."""
        host = "" if member.place is None or not member.place.host else f" on {member.place.host}"
        return f"{self._name()}#{member.number}{host}"

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _leave(self, member: Member, reason: str = "") -> None:
        """Hang up on a replica.

        Args:
            reason: why it is not where it was; empty: it may well be, and this end closes.
        """
        worker, member.worker = member.worker, None
        self._went(member, reason)
        if worker is not None:
            gone = ReplicaGoneError(f"the replica of the model went ({reason}); send the request again")
            self._run(worker.close(gone if reason else None))

    async def close(self) -> None:
        """Close the links; the workers go on."""
        for member in self.members:
            self._leave(member)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def watch(self) -> None:
        """Withdraw replicas whose workers are silent, admit those that answer again, and try refused links again."""
        now_s = time.monotonic()
        for member in self.members:
            place, worker = member.place, member.worker
            if place is None or place.state not in (ReplicaPhase.READY, ReplicaPhase.LEAVING):
                continue
            if worker is None and now_s >= member.reach_at_s:
                self._reach(member, place)
            elif worker is None or member.loaded is None or member.fault:
                continue
            elif worker.trouble and self.balancer.is_there(member.number):
                self._note_lost(member, worker.trouble)
                self._withdraw(member, is_lost=False)
            elif not worker.trouble and place.state is ReplicaPhase.READY:
                self._admit(member)

    @property
    def is_there(self) -> bool:
        """True while any replica gets requests."""
        return any(self.balancer.is_there(member.number) for member in self.members)

    def num_open(self, number: int) -> int:
        """Requests that are open at a replica."""
        worker = self.members[number].worker
        return 0 if worker is None else worker.num_open

    def trouble(self, member: Member) -> str:
        """The reason why a replica gets no requests, in one sentence; empty: it does."""
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
        return f"there is no link to its worker: {why}" if why else "there is no link to its worker"

    @property
    def is_refused(self) -> bool:
        """True if the links to all replicas that are ready are refused, as by another secret."""
        there = [each for each in self.members if each.place is not None and each.place.state is ReplicaPhase.READY]
        return bool(there) and all(each.fault and each.worker is None for each in there)

    def is_linked(self, member: Member) -> bool:
        """True if a replica's worker has the model and answers this gateway."""
        worker = member.worker
        return worker is not None and worker.is_up and member.loaded is not None and not worker.trouble

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> HostedMailbox:
        """Send a tokenised request to the replica that the balancer chooses.

        Raises:
            WorkerLostError: none is there.
            QueueFullError, InvalidParameterError: as `SupervisedWorker.submit`.
        """
        hashes: tuple[bytes, ...] = ()
        if self.loaded is not None and self.balancer.policy is RoutingPolicy.PREFIX and request.pooling is None:
            namespace = namespace_of(self.loaded.fingerprint, request.cache_salt)
            ids: tuple[int, ...] = request.prompt  # type: ignore[assignment]  # tokens by now
            hashes = block_hashes(namespace, ids, self.loaded.config.block_size)
        mailbox = HostedMailbox(self, request, hashes)
        try:
            mailbox.send()
        except ReplicaGoneError:
            mailbox.send_again()
        return mailbox

    def choose(self, hashes: tuple[bytes, ...], session: str | None) -> Member:
        """The replica of a request; WorkerLostError: none is there."""
        choice = self.balancer.choose(hashes, session)
        if self._routes is not None:
            self._routes.chosen(self.key, hashes, session, choice)
        if choice is None:
            gone = f"no replica of {self._name()} is there; send the request again"
            raise WorkerLostError(gone, retry_after_s=RETRY_AFTER_S)
        member = self.members[choice.replica]
        member.use.routed[choice.why] += 1
        return member

    def ended(self, member: Member, life: int) -> None:
        """Note the end of a request that a replica was given in one of its lives."""
        if member.num_lives == life:
            self.balancer.ended(member.number)
            if self._routes is not None:
                self._routes.ended(self.key, member.number)

    # -- what workers say -------------------------------------------------------------------------------------------

    def _noticed(self, member: Member, worker: SupervisedWorker, notice: Notice) -> None:
        if member.worker is not worker:
            return  # it was left already
        match notice:
            case Loaded(key) if key == self.key:
                self._came(member, notice)
            case Unloaded(key) if key == self.key:
                self._went(member, "its worker unloaded the model")
            case WorkerLost(reason):
                self._went(member, f"its worker was lost: {reason}")
            case ContentsChanged(key, news) if key == self.key:
                self.balancer.learn(member.number, news)
                if self._routes is not None:
                    self._routes.learned(self.key, member.number, news)
            case Loaded() | Unloaded() | ContentsChanged():
                pass  # of other groups' replicas there
            case _:
                self._notify(notice)

    def _came(self, member: Member, loaded: Loaded) -> None:
        member.loaded = loaded
        if self.loaded is None or not self.is_there:
            self.loaded = loaded
        self._set_fault(member, difference(self.loaded, loaded))
        if not member.fault and (member.place is None or member.place.state is not ReplicaPhase.LEAVING):
            self._admit(member)

    def _went(self, member: Member, reason: str) -> None:
        """Note that a replica is lost to this gateway.

        Args:
            reason: for the log; empty: this end closes.
        """
        if member.worker is None and member.loaded is None and not self.balancer.is_there(member.number):
            return
        if reason and self.balancer.is_there(member.number):
            self._note_lost(member, reason)
        member.loaded = None
        member.num_lives += 1
        self._withdraw(member, is_lost=True)

    def _note_lost(self, member: Member, reason: str) -> None:
        if member.lost_s is None:
            log.warning("%s is lost: %s", self.label(member), reason)
            member.lost_s = time.monotonic()

    def _admit(self, member: Member) -> None:
        if self.balancer.is_there(member.number):
            return
        was_there, now_s = self.is_there, time.monotonic()
        if member.lost_s is not None:
            log.warning("%s is there again after %.1f s", self.label(member), now_s - member.lost_s)
            member.lost_s = None
        member.use.came(now_s)
        self.balancer.admit(member.number)
        if self._routes is not None:
            self._routes.admitted(self.key, member.number)
        if not was_there:
            self._on_change(self)

    def _withdraw(self, member: Member, is_lost: bool) -> None:
        was_there = self.is_there
        if member.place is not None and self.balancer.is_there(member.number):
            member.use.went(time.monotonic())
        self.balancer.withdraw(member.number, is_lost)
        if self._routes is not None:
            self._routes.withdrawn(self.key, member.number, is_lost)
        if was_there and not self.is_there:
            self._on_change(self)


class HostedMailbox:
    """Mailbox of one request of a group, as `lockstep.worker.pending.Mailbox` is of one at a worker."""

    __slots__ = (
        "_group",
        "_has_tokens",
        "_hashes",
        "_is_second",
        "_life",
        "_member",
        "_observer",
        "_request",
        "_there",
        "_worker",
    )

    def __init__(self, group: Group, request: GenerationRequest, hashes: tuple[bytes, ...]) -> None:
        self._group = group
        self._request = request
        self._hashes = hashes
        self._member: Member | None = None
        self._worker: SupervisedWorker | None = None
        self._there: Mailbox | None = None
        """The mailbox at the worker that answers now; None: none does."""
        self._life = 0
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
        if self._there is not None:
            self._there.observer = observer

    def send(self) -> None:
        """Send the request to the replica that the balancer chooses; ReplicaGoneError: it went in this moment."""
        member = self._group.choose(self._hashes, self._request.session_id)
        self._member, self._worker, self._life = member, member.worker, member.num_lives
        try:
            assert member.worker is not None, "who is chosen is there"
            self._there = member.worker.submit(self._group.key, self._request)
            self._there.observer = self._observer
        except BaseException:
            self.leave()
            raise

    def send_again(self) -> None:
        """Send it to another replica, once."""
        self._is_second = True
        if self._member is not None:
            self._member.use.num_retried += 1
        self.leave()
        self.send()

    def leave(self) -> None:
        """Give up what is not answered yet."""
        member, self._member = self._member, None
        there, self._there = self._there, None
        if there is not None and self._worker is not None:
            self._worker.leave(there)
        if member is not None:
            self._group.ended(member, self._life)

    async def take(self) -> list[TokenOutput]:
        """All outputs that have come, as `lockstep.worker.pending.Mailbox.take`."""
        while True:
            assert self._there is not None, "it was sent, and not left"
            try:
                outputs = await self._there.take()
            except ReplicaGoneError:
                if self._has_tokens or self._is_second:
                    raise
                self.send_again()
                continue
            self._has_tokens = self._has_tokens or bool(outputs)
            return outputs


def difference(one: Loaded, other: Loaded) -> str:
    """The reason why two replicas do not give the same bits, in one sentence; empty: they do."""
    if one.fingerprint != other.fingerprint:
        return f"it has another artifact than the first replica ({other.fingerprint[:12]}, not {one.fingerprint[:12]})"
    if one.config.block_size != other.config.block_size or one.config.max_model_len != other.config.max_model_len:
        return "its blocks or its context are of another size than the first replica's"
    names = dict.fromkeys((*one.environment, *other.environment))
    differing = [name for name in names if one.environment.get(name) != other.environment.get(name)]
    if differing:
        pairs = (f"{name} {other.environment.get(name)}, not {one.environment.get(name)}" for name in differing)
        return f"its answers may have other bits than the first replica's: {', '.join(pairs)}"
    return ""


def _where(place: ReplicaStatus) -> tuple[str, int]:
    return place.address, place.port
