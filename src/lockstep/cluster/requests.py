"""Request handling: serves a request by one model, or by the entry model and the model to which it routes. Event loop
only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from msgspec.structs import replace

from lockstep.cluster.base import Accepted, EventStream, Hop, Routed
from lockstep.cluster.models import Model
from lockstep.cluster.nearest import Scores, Vector, answer_with_vector, embedding_of, message_of
from lockstep.cluster.planner import Phase
from lockstep.cluster.prompt_tokeniser import PromptTokeniser
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.replica_state import ReplicaState
from lockstep.cluster.routing import DispatchDecision, NearestRouter, Router, addressed
from lockstep.cluster.sessions import SessionName
from lockstep.cluster.state import ClusterState
from lockstep.engine.input_processing import check_session
from lockstep.engine.outputs import RequestOutput, TokenOutput, WaitReason
from lockstep.engine.request import GenerationRequest
from lockstep.engine.scoring import check_task, pair_request
from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    LockstepError,
    ModelNotFoundError,
    PromptTooLongError,
    QueueDeadlineError,
    UnavailableError,
)
from lockstep.hosts.group import HostedMailbox
from lockstep.worker.messages import DispatchDecided
from lockstep.worker.pending import Mailbox
from lockstep.worker.progress import LOADING, PLACE, CallObserver, CallProgress
from lockstep.worker.supervised import SupervisedWorker

MAX_WAIT_S = 300.0
"""Time limit in seconds for the wait for a session and a replica, for calls without a deadline."""
MIN_DEADLINE_S = 1e-3
"""Shortest deadline in seconds passed to an engine, which then reports the timeout itself."""


class _EntryAnswer(NamedTuple):
    """Answer of the entry model and the resulting routing decision."""

    accepted: Accepted
    outputs: list[TokenOutput]
    hop: Hop
    target: Model | None
    """Model that answers the request; None: the entry model's own answer is returned."""


class RequestHandler:
    """Runs requests through their hops: session, replica, prompt, worker, and the events of the answer.

    Args:
        state: current models and their workers.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._clock = state.now_s
        self._prompts = PromptTokeniser(state.system)
        self._example_lock = asyncio.Lock()
        self.num_open = 0

    async def stream(self, call: GenerationRequest, progress: CallProgress) -> EventStream:
        """Answer a request; see `lockstep.cluster.cluster.Cluster.stream`."""
        model, router = self._state.find(call.model), self._state.models.router
        call = _keyed(call)
        hops: tuple[Hop, ...] = ()
        self._state.counters.requests_total += 1
        self.num_open += 1
        if self._state.sessions.begin(call.session_id, model.id, self._clock()):
            self._state.session_event("session_admitted", call.session_id or "", model=model.id)
        try:
            if router is not None and model.id == router.entry and not call.gives_vector:
                routed = await self._route(router, model, call, progress)
                hops = (routed.hop,)
                if routed.target is None:
                    yield (replace(routed.accepted, hops=hops),)
                    yield routed.outputs
                    return
                model, call = routed.target, _shortened(replace(call, queue_deadline_s=None), routed.hop.latency_s)
                if self._must_wait(model, call):
                    yield (Routed(model.id, hops),)
            async with aclosing(self._answered(model, call, hops, progress)) as stream:
                async for events in stream:
                    yield events
        finally:
            self.num_open -= 1
            self._state.ended(call.session_id, self._clock())

    # -- hops -----------------------------------------------------------------------------------------------------

    async def _route(
        self, router: Router | NearestRouter, entry: Model, call: GenerationRequest, progress: CallProgress
    ) -> _EntryAnswer:
        """Run the entry model's hop to its end and decide which model answers. The hop's first step was that of the
        call."""
        started_s = self._clock()
        self._state.counters.router_hits += 1
        try:
            if isinstance(router, NearestRouter):
                return await self._route_by_example(router, entry, call, progress)
            accepted, outputs = await self._entry_answer(router, entry, router.question(call), progress)
        except PromptTooLongError as error:
            text = f"the prompt is too long for routing by {entry.id}: {error}; or name a model with a longer context"
            raise PromptTooLongError(text, param=error.param) from None
        answer = outputs[-1].request
        assert answer is not None, "the last output of a stream has the whole answer"
        current = self._state.models.router  # the manifest may have been replaced meanwhile; the current one decides
        decision = (current if isinstance(current, Router) else router).decide(answer.text)
        hop, target = self._dispatched(entry, call, decision, answer, self._clock() - started_s)
        return _EntryAnswer(accepted, outputs, hop, target)

    async def _route_by_example(
        self, router: NearestRouter, entry: Model, call: GenerationRequest, progress: CallProgress
    ) -> _EntryAnswer:
        """Embed the message, and decide by the most similar example."""
        started_s = self._clock()
        question = embedding_of(message_of(call.prompt), entry.id, call)
        accepted, outputs = await self._entry_answer(None, entry, question, progress)
        answer, message = answer_with_vector(outputs)
        examples = await self._examples(router, entry, call)
        decision, scores = router.decide(examples, message)
        worker = self._state.worker
        if progress.sequences and isinstance(worker, SupervisedWorker):
            computed = progress.sequences[-1]
            chosen = "" if decision.is_fallback else decision.target or ""
            worker.record(DispatchDecided(computed.replica, computed.seq_id, chosen, scores))
        hop, target = self._dispatched(entry, call, decision, answer, self._clock() - started_s, scores)
        return _EntryAnswer(accepted, outputs, hop, target)

    async def _examples(self, router: NearestRouter, entry: Model, call: GenerationRequest) -> Sequence[Vector]:
        """Vectors of the examples, computed once for each content of the embedding model."""
        assert entry.replica is not None, "an embedding model is local"
        assert entry.replica.loaded is not None, "it has embedded the message"
        fingerprint = entry.replica.loaded.fingerprint
        async with self._example_lock:
            if (known := router.vectors_of(fingerprint)) is not None:
                return known
            vectors = []
            for text in router.rule.texts:
                question = embedding_of(text, entry.id, call)
                _, outputs = await self._entry_answer(None, entry, question, CallProgress())
                vectors.append(answer_with_vector(outputs)[1])
            router.remember(fingerprint, vectors)
            return vectors

    def _dispatched(
        self,
        entry: Model,
        call: GenerationRequest,
        decision: DispatchDecision,
        answer: RequestOutput,
        latency_s: float,
        scores: Scores = (),
    ) -> tuple[Hop, Model | None]:
        """Describe a completed hop, and count, emit and keep its decision. Returns the model that answers next.

        Raises:
            UnavailableError: that model has been removed from the manifest.
        """
        target = None if decision.target is None else self._state.models.by_id.get(decision.target)
        if decision.target is not None and target is None:
            raise UnavailableError(f"{decision.target} was removed from the manifest meanwhile; send the request again")
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
            scores=scores,
        )
        self._state.events.emit(
            "hop",
            caller=call.session_owner,
            model=entry.id,
            completion=answer.text,
            intent=decision.intent,
            target=where,
            duration_ms=round(latency_s * 1e3, 3),
        )
        if target is not None:
            if (session := self._state.sessions.by_id.get(call.session_id or "")) is not None:
                session.model = target.id
            self._state.counters.dispatch_hits += not decision.is_fallback
            self._state.counters.dispatch_fallbacks += decision.is_fallback
        return hop, target

    async def _entry_answer(
        self, router: Router | None, entry: Model, question: GenerationRequest, progress: CallProgress
    ) -> tuple[Accepted, list[TokenOutput]]:
        """Collect the entry model's whole answer. As soon as the router can foresee its target, start to load the
        target."""
        by_id = self._state.models.by_id
        hinted = (model.replica for model in by_id.values() if model.entry.promotes_on_intent)
        has_hints = any(replica is not None and replica.phase is Phase.ABSENT for replica in hinted)
        accepted = Accepted(entry.id, ())
        outputs: list[TokenOutput] = []
        text = ""
        async with aclosing(self._answered(entry, question, (), progress)) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, TokenOutput):
                        outputs.append(event)
                        text += event.text
                    elif isinstance(event, Accepted):
                        accepted = event
                if router and has_hints and (foreseen := by_id.get(router.foresee(text) or "")) is not None:
                    has_hints = False
                    if foreseen.entry.promotes_on_intent and foreseen.replica is not None:
                        self._state.replicas.warm(foreseen.replica)
        return accepted, outputs

    async def _answered(
        self, model: Model, call: GenerationRequest, hops: tuple[Hop, ...], progress: CallProgress
    ) -> EventStream:
        """Stream one model's answer."""
        self._warm(model)
        model.num_requests += 1
        call = addressed(call, model.entry)
        while True:
            async with self._admitted(model, call, progress) as call:
                if model.remote is not None:
                    async with aclosing(model.remote.stream(call)) as stream:
                        async for events in stream:
                            self._state.sessions.accepted(call.session_id)
                            yield [replace(e, hops=hops) if isinstance(e, Accepted) else e for e in events]
                    return
                assert model.replica is not None, "a model is local or remote"
                request = await self._prepared(model, model.replica, call)
                if request is None:
                    continue  # the worker was lost before it received the call, which waits for the next worker
                key, loaded = model.replica.key, model.replica.loaded
                assert loaded is not None, "calls are admitted only by a loaded replica"
                with self._state.worker.open_mailbox(key, request) as mailbox:
                    stages = loaded.geometry.num_stages
                    mailbox.observer = CallObserver(progress, model.id, key, loaded.config, progress.clock(), stages)
                    outputs = await _first_outputs(model, mailbox)
                    self._state.sessions.accepted(call.session_id)
                    yield (Accepted(model.id, request.prompt_ids, hops),)
                    while True:
                        if outputs:
                            yield outputs
                            if outputs[-1].request is not None:
                                return
                        outputs = await mailbox.take()

    async def _prepared(self, model: Model, replica: ReplicaState, call: GenerationRequest) -> GenerationRequest | None:
        """Convert a call to the worker's request, with the remaining deadlines; None: the worker was lost meanwhile."""
        assert replica.loaded is not None, "calls are admitted only by a loaded replica"
        assert replica.tokenizer is not None, "the tokenizer is read when a replica is loaded"
        loaded, tokenizer = replica.loaded, replica.tokenizer
        check_task(call, model.id, loaded.task)
        began_s = self._clock()
        limits = [limit for limit in (call.deadline_s, call.queue_deadline_s) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                request = await self._prompts.tokenised(
                    tokenizer,
                    loaded.max_model_len,
                    call,
                    lambda call: pair_request(call, model.id, loaded.scoring, tokenizer),
                )
        except TimeoutError:
            raise _too_late(model, call, self._clock() - began_s) from None
        if replica.phase is not Phase.RESIDENT:
            return None
        request = _shortened(request, self._clock() - began_s)
        return request if request.session_id is None else _owned(request, model)

    @asynccontextmanager
    async def _admitted(
        self, model: Model, call: GenerationRequest, progress: CallProgress
    ) -> AsyncIterator[GenerationRequest]:
        """Hold a session and a replica during the block, and yield the call with its remaining deadlines."""
        began_s, session = self._clock(), call.session_id
        limits = (MAX_WAIT_S, call.deadline_s, call.queue_deadline_s)
        is_open = model.sessions.is_open(session) and (model.replica is None or model.replica.is_open)
        limit_s = None if is_open else min(limit for limit in limits if limit is not None)
        model.num_waiting += 1
        try:
            if limit_s is None:
                await self._enter(model, session)
            else:
                async with asyncio.timeout(limit_s):
                    await self._enter(model, session, progress)
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
            if model.replica is not None:
                self._state.replicas.release(model.replica)
            model.sessions.leave(session)

    async def _enter(self, model: Model, session: str | None, progress: CallProgress | None = None) -> None:
        """Acquire a session slot and a replica.

        Args:
            progress: records what the call waits for; None: the call does not wait.
        """
        if progress is not None and not model.sessions.is_open(session):
            used, most = model.sessions.num_active, model.sessions.limit or 0
            progress.waits_for(model.id, WaitReason(0, PLACE, used, most, num_others=model.sessions.num_waiting))
        await model.sessions.enter(session)
        try:
            if model.replica is not None:
                if progress is not None and not model.replica.is_open:
                    progress.waits_for(model.id, WaitReason(0, LOADING))
                await self._state.replicas.acquire(model.replica)
        except BaseException:
            model.sessions.leave(session)
            raise

    def _must_wait(self, model: Model, call: GenerationRequest) -> bool:
        """True if a call would be neither served nor rejected at once."""
        if model.remote is not None:
            return isinstance(model.remote, RemoteModel) and model.remote.health().ready
        assert model.replica is not None, "a model is local or remote"
        if self._state.replicas.refusal(model.replica) is not None:
            return False
        return not (model.replica.is_open and model.sessions.is_open(call.session_id))

    def _warm(self, model: Model) -> None:
        """Load the co-activated models of this one, once for any number of requests."""
        for other in self._state.models.warmed_by[model.id]:
            if other.replica is not None and self._state.replicas.warm(other.replica):
                self._state.counters.co_activation_warms += 1
                self._state.events.emit("co_activation_warmed", model=other.id, by=model.id)


async def _first_outputs(model: Model, mailbox: Mailbox | HostedMailbox) -> list[TokenOutput]:
    """Take the first outputs; ModelNotFoundError: the model's adapter was unloaded before the request reached it."""
    try:
        return await mailbox.take()
    except InvalidParameterError as error:
        if error.param == "adapter":
            raise ModelNotFoundError(f"The model `{model.id}` was unloaded meanwhile.", param="model") from None
        raise


def _keyed(call: GenerationRequest) -> GenerationRequest:
    """Return a call whose session is separate from other callers' sessions; InvalidParameterError: the session id is
    invalid."""
    check_session(call)
    if call.session_id is None:
        return call
    return replace(call, session_id=SessionName(call.session_owner, call.session_id).key)


def _owned(request: GenerationRequest, model: Model) -> GenerationRequest:
    """Return a request as one of the model's sessions. If the model has no session limit, the engine's limit
    applies."""
    limit = model.sessions.limit
    most = request.max_active_sessions if limit is None else limit
    return replace(request, session_owner=model.id, max_active_sessions=most)


def _shortened(call: GenerationRequest, waited_s: float) -> GenerationRequest:
    """Return a request whose deadlines count from now."""
    limits = (call.deadline_s, call.queue_deadline_s)
    if limits == (None, None):
        return call
    whole_s, queue_s = (None if limit is None else max(MIN_DEADLINE_S, limit - waited_s) for limit in limits)
    return replace(call, deadline_s=whole_s, queue_deadline_s=queue_s)


def _too_late(model: Model, call: GenerationRequest, waited_s: float) -> LockstepError:
    """Error of a call that has waited too long."""
    what = f"{model.id} could not start the request within {waited_s:.1f} s"
    if call.deadline_s is not None and waited_s >= call.deadline_s:
        return DeadlineError(what)
    if call.queue_deadline_s is not None and waited_s >= call.queue_deadline_s:
        return QueueDeadlineError(what)
    return UnavailableError(what)


def _qualified(model: Model) -> str:
    return model.id if model.entry.set is None else f"{model.entry.set}.{model.id}"
