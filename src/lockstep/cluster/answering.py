"""How calls are answered: by one model, or by the entry model and whoever it sends them to. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from msgspec.structs import replace

from lockstep.cluster.base import Accepted, EventStream, Hop, Routed
from lockstep.cluster.events import EventLog
from lockstep.cluster.held import Held
from lockstep.cluster.models import Model, Roster
from lockstep.cluster.planner import Phase
from lockstep.cluster.prompting import Prompting
from lockstep.cluster.replicas import Replicas
from lockstep.cluster.routing import Router, addressed
from lockstep.cluster.sessions import Sessions
from lockstep.cluster.snapshot import Counters
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import DeadlineError, LockstepError, PromptTooLongError, QueueDeadlineError, UnavailableError
from lockstep.worker.supervised import SupervisedWorker

MAX_WAIT_S = 300.0
"""For a session and a replica, where the call has no deadline of its own."""

MIN_DEADLINE_S = 1e-3
"""Left to an engine, which then says itself that the time is up."""


class _Asked(NamedTuple):
    """What the entry has said, and what follows from it."""

    accepted: Accepted
    outputs: list[TokenOutput]
    hop: Hop
    target: Model | None
    """Who answers; None: what was said stands."""


class Answering:
    """Takes calls through their hops.

    Args:
        roster: the models that there are now.
        find: the model of a name; ModelNotFoundError, or UnavailableError until it may be called.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        worker: SupervisedWorker,
        replicas: Replicas,
        roster: Callable[[], Roster],
        find: Callable[[str | None], Model],
        sessions: Sessions,
        counters: Counters,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._replicas = replicas
        self._roster = roster
        self._find = find
        self._sessions = sessions
        self._counters = counters
        self._events = events
        self._clock = clock
        self._prompting = Prompting()
        self.num_open = 0
        self.num_ephemeral = 0
        """Open calls without a session id."""

    async def stream(self, call: GenerationRequest) -> EventStream:
        """As `lockstep.cluster.base.Cluster.stream`."""
        model, roster = self._find(call.model), self._roster()
        hops: tuple[Hop, ...] = ()
        self._counters.requests_total += 1
        self.num_open += 1
        self._begin_session(call, model)
        try:
            if roster.router is not None and call.pooling is None and roster.is_routed(call.model):
                asked = await self._ask(roster.router, model, call)
                hops = (asked.hop,)
                if asked.target is None:
                    yield (replace(asked.accepted, hops=hops),)
                    yield asked.outputs
                    return
                model, call = asked.target, _shortened(replace(call, queue_deadline_s=None), asked.hop.latency_s)
                if self._must_wait(model, call):
                    yield (Routed(model.id, hops),)
            async with aclosing(self._answered(model, call, hops)) as stream:
                async for events in stream:
                    yield events
        finally:
            self.num_open -= 1
            self._end_session(call)

    # -- hops -----------------------------------------------------------------------------------------------------

    async def _ask(self, router: Router, entry: Model, call: GenerationRequest) -> _Asked:
        """The entry's hop, whole, and who answers after it. Its first step was that of the call."""
        started_s = self._clock()
        self._counters.router_hits += 1
        try:
            accepted, outputs = await self._entry_answer(router, entry, router.question(call))
        except PromptTooLongError as error:
            told = f"{entry.id} cannot read what it is to route: {error}; or name a model whose context is longer"
            raise PromptTooLongError(told, param=error.param) from None
        answer = outputs[-1].request
        assert answer is not None, "a stream ends with the whole answer"
        roster = self._roster()  # the manifest may have been replaced meanwhile; what holds now decides
        decision = (roster.router or router).decide(answer.text)
        target = None if decision.target is None else roster.models.get(decision.target)
        if decision.target is not None and target is None:
            raise UnavailableError(f"{decision.target} was just taken out of service; send the request again")
        latency_s = self._clock() - started_s
        where = None if target is None else _qualified(target)
        hop = Hop(
            model=entry.id,
            completion=answer.text,
            intent=decision.intent,
            target=where,
            latency_s=latency_s,
            num_prompt_tokens=len(answer.prompt_token_ids),
            num_cached_tokens=answer.num_cached_tokens,
            num_output_tokens=answer.num_output_tokens,
        )
        self._events.emit(
            "hop",
            model=entry.id,
            completion=answer.text,
            intent=decision.intent,
            target=where,
            duration_ms=round(latency_s * 1e3, 3),
        )
        if target is not None:
            if call.session_id is not None:
                self._sessions.answered_by(call.session_id, target.id)
            self._counters.dispatch_hits += not decision.is_fallback
            self._counters.dispatch_fallbacks += decision.is_fallback
        return _Asked(accepted, outputs, hop, target)

    async def _entry_answer(
        self, router: Router, entry: Model, question: GenerationRequest
    ) -> tuple[Accepted, list[TokenOutput]]:
        """The entry's whole answer; what it will decide is promoted as soon as that is known."""
        models = self._roster().models
        has_hints = any(m.entry.promotes_on_intent and _is_absent(m.held) for m in models.values())
        accepted = Accepted(entry.id, ())
        outputs: list[TokenOutput] = []
        text = ""
        async with aclosing(self._answered(entry, question, ())) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, TokenOutput):
                        outputs.append(event)
                        text += event.text
                    elif isinstance(event, Accepted):
                        accepted = event
                if has_hints and (foreseen := models.get(router.foresee(text) or "")) is not None:
                    has_hints = False
                    if foreseen.entry.promotes_on_intent and foreseen.held is not None:
                        self._replicas.warm(foreseen.held)
        return accepted, outputs

    async def _answered(self, model: Model, call: GenerationRequest, hops: tuple[Hop, ...]) -> EventStream:
        """One model's answer."""
        self._warm(model)
        model.num_requests += 1
        asked = addressed(call, model.entry)
        while True:
            async with self._admitted(model, asked) as asked:
                if model.remote is not None:
                    async with aclosing(model.remote.stream(asked)) as stream:
                        async for events in stream:
                            yield [replace(e, hops=hops) if isinstance(e, Accepted) else e for e in events]
                    return
                assert model.held is not None, "a model is local or remote"
                request = await self._prepared(model, model.held, asked)
                if request is None:
                    continue  # the worker was lost before it knew of the call, which waits for the next one
                mailbox = self._worker.submit(model.held.key, request)
                try:
                    outputs = await mailbox.take()
                    yield (Accepted(model.id, tuple(request.prompt), hops),)  # type: ignore[arg-type]  # tokens by now
                    while True:
                        if outputs:
                            yield outputs
                            if outputs[-1].request is not None:
                                return
                        outputs = await mailbox.take()
                finally:
                    self._worker.leave(mailbox)

    async def _prepared(self, model: Model, held: Held, call: GenerationRequest) -> GenerationRequest | None:
        """The call as its worker takes it, with the time that it has left; None: that worker is gone."""
        assert held.loaded is not None, "whose calls are admitted was loaded"
        assert held.tokenizer is not None, "and its text side was read then"
        began_s = self._clock()
        limits = [limit for limit in (call.deadline_s, call.queue_deadline_s) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                request = await self._prompting.tokenised(held.tokenizer, held.loaded.config.max_model_len, call)
        except TimeoutError:
            raise _too_late(model, call, self._clock() - began_s) from None
        if held.phase is not Phase.RESIDENT:
            return None
        request = _shortened(request, self._clock() - began_s)
        return request if request.session_id is None else _owned(request, model)

    @asynccontextmanager
    async def _admitted(self, model: Model, call: GenerationRequest) -> AsyncIterator[GenerationRequest]:
        """Hold a session and a replica for the block, which gets the call with the time that it has left."""
        began_s, session = self._clock(), call.session_id
        limits = (MAX_WAIT_S, call.deadline_s, call.queue_deadline_s)
        is_open = model.sessions.is_open(session) and (model.held is None or model.held.is_open)
        limit_s = None if is_open else min(limit for limit in limits if limit is not None)
        model.num_waiting += 1
        try:
            if limit_s is None:
                await self._enter(model, session)
            else:
                async with asyncio.timeout(limit_s):
                    await self._enter(model, session)
        except TimeoutError:
            raise _too_late(model, call, self._clock() - began_s) from None
        finally:
            model.num_waiting -= 1
        model.num_running += 1
        try:
            yield _shortened(call, self._clock() - began_s)
        finally:
            model.num_running -= 1
            model.last_used_s = self._clock()
            if model.held is not None:
                self._replicas.release(model.held)
            model.sessions.leave(session)

    async def _enter(self, model: Model, session: str | None) -> None:
        await model.sessions.enter(session)
        try:
            if model.held is not None:
                await self._replicas.acquire(model.held)
        except BaseException:
            model.sessions.leave(session)
            raise

    def _must_wait(self, model: Model, call: GenerationRequest) -> bool:
        """Whether a call would be neither taken nor refused at once."""
        if model.remote is not None:
            return model.remote.health().ready
        assert model.held is not None, "a model is local or remote"
        if model.held.refusal(self._clock()) is not None:
            return False
        return not (model.held.is_open and model.sessions.is_open(call.session_id))

    def _warm(self, model: Model) -> None:
        """Promote who is named together with this one, once however many requests ask."""
        for other in self._roster().warmed_by(model.id):
            if other.held is not None and self._replicas.warm(other.held):
                self._counters.co_activation_warms += 1
                self._events.emit("co_activation_warmed", model=other.id, by=model.id)

    # -- sessions -------------------------------------------------------------------------------------------------

    def _begin_session(self, call: GenerationRequest, model: Model) -> None:
        if call.session_id is None:
            self.num_ephemeral += 1
        elif self._sessions.begin(call.session_id, model.id, self._clock()):
            self._events.emit("session_admitted", session=call.session_id, model=model.id)

    def _end_session(self, call: GenerationRequest) -> None:
        if call.session_id is None:
            self.num_ephemeral -= 1
        else:
            self._sessions.end(call.session_id, self._clock())


def _owned(request: GenerationRequest, model: Model) -> GenerationRequest:
    """A request of one of a model's sessions; where the model has no limit, the engine's own holds."""
    limit = model.sessions.limit
    most = request.max_active_sessions if limit is None else limit
    return replace(request, session_owner=model.id, max_active_sessions=most)


def _shortened(call: GenerationRequest, waited_s: float) -> GenerationRequest:
    """A request with deadlines that count from now."""
    if call.deadline_s is None and call.queue_deadline_s is None:
        return call
    left = [
        None if limit is None else max(MIN_DEADLINE_S, limit - waited_s)
        for limit in (call.deadline_s, call.queue_deadline_s)
    ]
    return replace(call, deadline_s=left[0], queue_deadline_s=left[1])


def _too_late(model: Model, call: GenerationRequest, waited_s: float) -> LockstepError:
    """Why a call is not waited for any longer."""
    what = f"{model.id} could not take the request within {waited_s:.1f} s"
    if call.deadline_s is not None and waited_s >= call.deadline_s:
        return DeadlineError(what)
    if call.queue_deadline_s is not None and waited_s >= call.queue_deadline_s:
        return QueueDeadlineError(what)
    return UnavailableError(what)


def _is_absent(held: Held | None) -> bool:
    return held is not None and held.phase is Phase.ABSENT


def _qualified(model: Model) -> str:
    return model.id if model.entry.set is None else f"{model.entry.set}.{model.id}"
