"""Remote tier: serves a model through another OpenAI-compatible server, with the same events as a local model.

The call arrives with personas and sampling defaults already applied, as for every tier. Text is passed on event by
event. Token ids are not available here, so outputs have none, and the other server's usage is reported.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import aclosing
from dataclasses import dataclass, field

import httpx2

from lockstep.artifacts.model import TokenizerParts
from lockstep.cluster.base import Accepted, EventStream, Health
from lockstep.cluster.breaker import Admission, Breaker, BreakerOptions, BreakerState
from lockstep.cluster.manifest import ModelEntry
from lockstep.cluster.remote_exchange import CallDeadlines, Exchange, PublicTransport
from lockstep.cluster.remote_messages import (
    RETRY_AFTER_S,
    AnswerLimits,
    AttemptError,
    RemoteRequest,
    ServerName,
    remote_request,
)
from lockstep.cluster.snapshot import RemoteSnapshot
from lockstep.engine.metrics import HISTOGRAMS, Histogram
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, UnavailableError
from lockstep.system import SYSTEM, System
from lockstep.version import __version__
from lockstep.worker.health import backoff_s
from lockstep.worker.logs import FIELDS

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Time in seconds to connect; the entry's timeout may shorten it."""
MAX_ATTEMPTS = 3
"""Maximum attempts of one call, all before the first byte of its answer."""
BACKOFF_S = 0.1
"""Delay in seconds before the second attempt; it doubles with each further one."""
MAX_CONNECTIONS = 256
"""Maximum connections of one model. Further calls wait for a free one, for as long as for a new connection."""
TEMPLATE = "{{ messages }}{{ tools }}{{ reasoning_effort }}{{ verbosity }}"
"""Template that is never rendered; it only declares which variables are passed on. The messages are passed on whole."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Limits of attempts and connections."""

    max_attempts: int = MAX_ATTEMPTS
    backoff_s: float = BACKOFF_S
    max_connections: int = MAX_CONNECTIONS
    breaker: BreakerOptions = field(default_factory=BreakerOptions)
    silence_s: float | None = None
    """Maximum time in seconds without a byte of an answer; None: the entry's timeout."""
    answer: AnswerLimits = field(default_factory=AnswerLimits)


class RemoteModel:
    """One entry of the remote tier. Used from one event loop; call `close` at the end.

    Args:
        entry: entry whose `remote` block has the address. Its timeout limits the wait for the first byte and each later
            silence.
        api_key: value of the environment variable that the entry names. It is sent to the other server and never shown.
        system: clock of the circuit breaker, and pauses between attempts.
    """

    def __init__(
        self,
        entry: ModelEntry,
        api_key: str | None = None,
        options: RemoteOptions | None = None,
        system: System = SYSTEM,
    ) -> None:
        remote = entry.remote
        assert remote is not None, f"{entry.id} has no remote"
        self.entry = entry
        self.tokenizer: Tokenizer = remote_tokenizer()
        """Tokenizer without a vocabulary, used to prepare calls."""
        self._options = options or RemoteOptions()
        self._system, self._clock = system, system.now_s
        self._api_key = api_key
        self._model = remote.model or entry.id
        self._silence_s = remote.timeout_s if self._options.silence_s is None else self._options.silence_s
        self._server = ServerName(entry.id, remote.api_key_env)
        self._breaker = Breaker(self._options.breaker)
        self._requests_total = 0
        self._attempts_total = 0
        self._failures_total = 0
        self._refusals_total = 0
        self._first_byte_s = Histogram(HISTOGRAMS["time_to_first_token_seconds"])
        self._open: dict[CallDeadlines, None] = {}
        connect_s = min(CONNECT_S, remote.timeout_s)
        num = self._options.max_connections
        transport = httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(max_connections=num, max_keepalive_connections=num),
            trust_env=False,  # ignore a proxy or .netrc of the machine
            verify=ssl.create_default_context() if remote.base_url.startswith("https:") else False,
        )
        self._client = httpx2.AsyncClient(
            base_url=f"{remote.base_url.rstrip('/')}/",
            headers=_headers(api_key),
            timeout=httpx2.Timeout(remote.timeout_s, connect=connect_s, pool=connect_s),
            transport=PublicTransport(transport) if remote.only_public else transport,
            follow_redirects=False,
            trust_env=False,
        )

    status = "remote"
    """State shown in snapshots."""

    @property
    def state(self) -> BreakerState:
        """State of the circuit breaker. An open breaker closes when a trial call succeeds."""
        return self._breaker.state

    @property
    def num_open(self) -> int:
        """Number of calls in progress."""
        return len(self._open)

    def snapshot(self) -> RemoteSnapshot:
        """Snapshot of its requests to the other server since the start."""
        return RemoteSnapshot(
            self.entry.id,
            self.state,
            self.num_open,
            self._requests_total,
            self._attempts_total,
            self._failures_total,
            self._refusals_total,
            self._first_byte_s.snapshot(),
        )

    def health(self) -> Health:
        """Not ready while the circuit breaker blocks calls after failures."""
        is_resting = self.state is BreakerState.OPEN and self._breaker.wait_s(self._clock()) > 0
        return Health(not is_resting, str(self._blocked_error()) if is_resting else "")

    async def stream(self, call: GenerationRequest) -> EventStream:
        """Answer a call; see `lockstep.cluster.cluster.Cluster.stream`. Closing the stream closes the connection.

        Raises:
            InvalidParameterError: the other server does not support or rejects the request.
            UnavailableError: the other server is overloaded, or has failed too often.
            DeadlineError: the other server sent nothing for the entry's timeout, or the call's deadline has passed.
            RemoteFailedError: the other server cannot be reached, closed the connection, sent an invalid answer, or
                rejects our key.
        """
        request = remote_request(self.entry.id, self._model, call)
        deadlines = CallDeadlines(call, asyncio.get_running_loop().time())
        self._open[deadlines] = None
        self._requests_total += 1
        try:
            exchange, admission = await self._begin(request, deadlines)
            try:
                yield (Accepted(self.entry.id, ()),)
                async with aclosing(exchange.outputs()) as stream:
                    async for outputs in stream:
                        if exchange.is_whole:
                            self._breaker.succeeded(admission)
                            if exchange.is_cut:
                                log.warning(
                                    "remote %s sent more than was requested; the answer was cut off", self.entry.id
                                )
                        if outputs:
                            yield outputs
            except AttemptError as failure:
                self._count(admission, failure)
                raise failure.error from None
            finally:
                await exchange.close()
        finally:
            del self._open[deadlines]

    def abort_all(self, error: LockstepError) -> None:
        """End every open call with this error."""
        for deadlines in self._open:
            deadlines.end(error)

    async def close(self) -> None:
        """End open calls and close all connections."""
        self.abort_all(UnavailableError(f"{self.entry.id!r} is no longer served"))
        await self._client.aclose()

    async def _begin(self, request: RemoteRequest, deadlines: CallDeadlines) -> tuple[Exchange, Admission]:
        """Make attempts until an answer starts, with growing delays."""
        options = self._options
        for attempt in range(options.max_attempts):
            admission = self._breaker.admit(self._clock())
            if admission is None:
                self._refusals_total += 1
                raise self._blocked_error()
            self._attempts_total += 1
            sent_s = self._clock()
            exchange = Exchange(self._client, self._server, request, deadlines, self._silence_s, self._options.answer)
            try:
                await exchange.begin()
            except AttemptError as failure:
                await exchange.close()
                self._count(admission, failure)
                is_over = attempt + 1 == options.max_attempts or self.state is not BreakerState.CLOSED
                if is_over or not failure.may_retry:
                    raise failure.error from None
                wait_s = backoff_s(attempt + 1, options.backoff_s, options.breaker.max_rest_s)
                await deadlines.wait(lambda: self._system.sleep(wait_s), None, failure.error)  # noqa: B023  awaited here
            except BaseException:
                self._breaker.left(admission)
                await exchange.close()
                raise
            else:
                self._first_byte_s.observe(self._clock() - sent_s)
                return exchange, self._began(admission)
        raise AssertionError("the last attempt returns or raises")

    def _began(self, admission: Admission) -> Admission:
        before = self.state
        admission = self._breaker.began(admission)
        if self.state is not before:
            log.info("remote %s answers again", self.entry.id)
        return admission

    def _count(self, admission: Admission, failure: AttemptError) -> None:
        if failure.reply:
            reply = failure.reply.replace(self._api_key, "[key]") if self._api_key else failure.reply
            extra = {FIELDS: {"reply": reply}}
            log.warning("remote %s failed: %s", self.entry.id, failure.error, extra=extra)
        if not failure.is_fault:
            self._breaker.succeeded(admission)
            return
        before = self.state
        self._failures_total += 1
        self._breaker.failed(admission, self._clock())
        if self.state is not before:
            rest_s = self._breaker.wait_s(self._clock())
            log.warning("remote %s gets no requests for %.1f s: %s", self.entry.id, rest_s, failure.error)

    def _blocked_error(self) -> UnavailableError:
        wait_s = self._breaker.wait_s(self._clock())
        return UnavailableError(
            f"{self._server} failed too often in a row and gets no requests now; try again in {wait_s:.1f} s",
            retry_after_s=max(RETRY_AFTER_S, wait_s),
        )


def remote_tokenizer() -> Tokenizer:
    """Build a tokenizer without a vocabulary, whose template declares the parameters of OpenAI's API. It supports no
    grammars, so requests that need a constraint (`tool_choice` other than auto and none) are rejected when they are
    prepared."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    return Tokenizer(TokenizerParts(Library(models.BPE()), TEMPLATE, None, None, ()))


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": f"lockstep/{__version__}",
    }
    return headers if api_key is None else {**headers, "Authorization": f"Bearer {api_key}"}
