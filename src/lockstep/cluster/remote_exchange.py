"""Exchange with another server: sends one attempt of a request, enforces its deadlines and reads the events of the
answer.

It also restricts some entries to public addresses. The check applies to the address of the connection itself, because a
name may resolve to any address, and to a different one the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar, cast

import httpx2

from lockstep.cluster.completion_chunks import DONE
from lockstep.cluster.remote_messages import (
    RETRY_AFTER_S,
    AnswerLimits,
    AttemptError,
    RemoteAnswer,
    RemoteRequest,
    ServerName,
    of_status,
)
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    DeadlineError,
    LockstepError,
    QueueDeadlineError,
    RemoteFailedError,
    UnavailableError,
)

MAX_EVENT_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16
"""Maximum bytes of an error body that are read."""
REST_S = 0.05
"""Time in seconds to read what follows the end of a stream, so that its connection can be reused."""
_OK = 200
_EVENTS = "text/event-stream"
T = TypeVar("T")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


class CallDeadlines:
    """Deadlines of one call over all its attempts, and its early end."""

    def __init__(self, call: GenerationRequest, now_s: float) -> None:
        self._began_s = now_s
        self._call = call
        self._scope: asyncio.Timeout | None = None
        self._error: LockstepError | None = None
        self._is_answered = False

    def end(self, error: LockstepError) -> None:
        """End the call; a pending wait for its next event raises the error."""
        self._error = self._error or error
        if self._scope is not None and not self._scope.expired():  # otherwise it is about to end already
            self._scope.reschedule(asyncio.get_running_loop().time())

    def answered(self) -> None:
        """Record that the first byte has arrived, so that the queue deadline no longer applies."""
        self._is_answered = True

    async def wait(self, what: Callable[[], Awaitable[T]], until_s: float | None, late: Exception) -> T:
        """Wait for an awaitable.

        Args:
            until_s: deadline on the loop's clock; None: only the call's own deadlines apply.
            late: raised when `until_s` has passed.

        Raises:
            QueueDeadlineError, DeadlineError: a deadline of the call has passed.
        """
        if self._error is not None:
            raise self._error
        when_s, error = self._nearest(until_s, late)
        try:
            async with asyncio.timeout_at(when_s) as self._scope:
                return await what()
        except TimeoutError:
            raise self._error or error from None
        finally:
            self._scope = None

    def _nearest(self, until_s: float | None, late: Exception) -> tuple[float | None, Exception]:
        call, bounds = self._call, [] if until_s is None else [(until_s, late)]
        if call.deadline_s is not None:
            text = f"the answer was not complete after {call.deadline_s:g} s"
            bounds.append((self._began_s + call.deadline_s, DeadlineError(text, param="deadline_s")))
        if call.queue_deadline_s is not None and not self._is_answered:
            queue_late = QueueDeadlineError(f"nothing was computed within {call.queue_deadline_s:g} s")
            bounds.append((self._began_s + call.queue_deadline_s, queue_late))
        return min(bounds, key=lambda bound: bound[0]) if bounds else (None, late)


class Exchange:
    """One attempt: call `begin`, then read `outputs`, and `close` it in any case.

    Args:
        silence_s: longest time in seconds that the other server may send nothing.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        server: ServerName,
        request: RemoteRequest,
        deadlines: CallDeadlines,
        silence_s: float,
        limits: AnswerLimits,
    ) -> None:
        self._limits = limits
        self._client = client
        self._server = server
        self._request = request
        self._deadlines = deadlines
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._queue_s = 0.0
        self._answer = RemoteAnswer(server, request, self._sent_s, limits)
        self._response: httpx2.Response | None = None
        self._events: AsyncGenerator[httpx2.ServerSentEvent] | None = None
        self._first: httpx2.ServerSentEvent | None = None
        self.is_whole = False
        """True when the whole answer has been read."""
        self._is_at_end = False
        """True when the end of the stream has been read as well."""

    @property
    def is_cut(self) -> bool:
        """True if the answer was cut off here because the other server did not end it."""
        return self._answer.is_cut

    async def begin(self) -> None:
        """Send the request and wait for the first event of its answer.

        Raises:
            AttemptError: no answer arrived.
            LockstepError: the call was ended, or its deadline has passed.
        """
        until_s = self._sent_s + self._silence_s
        late = AttemptError(DeadlineError(f"{self._server} did not start to answer within {self._silence_s:g} s"))
        posted = self._client.build_request("POST", self._request.path.removeprefix("/"), content=self._request.body)
        with self._translated():
            self._response = response = await self._deadlines.wait(
                lambda: self._client.send(posted, stream=True), until_s, late
            )
            self._queue_s = self._loop.time() - self._sent_s
            if response.status_code != _OK:
                body = await self._deadlines.wait(lambda: _first_bytes(response), until_s, late)
                raise of_status(self._server, response.status_code, response.headers.get("retry-after"), body)
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != _EVENTS:
                text = f"{self._server} answered with {kind[:64] or 'no content type'} instead of {_EVENTS}"
                raise AttemptError(RemoteFailedError(f"{text}; is it an OpenAI-compatible server?"))
            events = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
            self._events = cast("AsyncGenerator[httpx2.ServerSentEvent]", events)  # its actual type
            self._first = await self._deadlines.wait(self._next_event, until_s, late)
        if self._first is None:
            raise self._broken("closed the connection before it answered", may_retry=True)
        self._deadlines.answered()

    async def outputs(self) -> AsyncGenerator[list[TokenOutput]]:
        """Yield the outputs of each event, which may be none. The last item holds the whole answer; `is_whole` is set
        before it.

        Raises:
            AttemptError: the answer ended before it was complete.
            LockstepError: the call was ended, or its deadline has passed.
        """
        answer, event, usage_until_s = self._answer, self._first, math.inf
        while event is not None and event.data != DONE:
            yield answer.feed(event.data, self._loop.time()) if event.data else []
            if answer.is_finished and answer.is_cut:
                break
            if answer.is_finished:
                usage_until_s = min(usage_until_s, self._loop.time() + self._limits.usage_s)
                event = await self._usage_event(usage_until_s)
            else:
                text = f"{self._server} sent nothing for {self._silence_s:g} s in the middle of its answer"
                late, until_s = AttemptError(DeadlineError(text)), self._loop.time() + self._silence_s
                with self._translated():
                    event = await self._deadlines.wait(self._next_event, until_s, late)
        if not answer.is_finished:
            raise self._broken("closed the connection in the middle of its answer")
        self.is_whole = True
        yield [answer.end(self._loop.time(), self._queue_s)]

    async def _usage_event(self, until_s: float) -> httpx2.ServerSentEvent | None:
        """Next event after the last choice's end; None: there is none, or waiting longer is not worthwhile."""
        if self._loop.time() >= until_s:
            return None
        late = AttemptError(DeadlineError("the usage did not arrive in time"))
        try:
            with self._translated():
                event = await self._deadlines.wait(self._next_event, until_s, late)
        except AttemptError:  # whatever fails now, the answer is complete
            return None
        self._is_at_end = event is None or event.data == DONE
        return event

    async def close(self) -> None:
        """Release the connection. If the answer is not complete, the connection is closed, which stops the generation
        at the other server."""
        response, self._response = self._response, None
        if response is None:
            return
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):
            if self.is_whole and self._is_at_end:
                async with asyncio.timeout(REST_S):
                    await self._next_event()
        if self._events is not None:
            await self._events.aclose()
        await response.aclose()

    async def _next_event(self) -> httpx2.ServerSentEvent | None:
        assert self._events is not None
        return await anext(self._events, None)

    def _broken(self, how: str, *, may_retry: bool = False) -> AttemptError:
        return AttemptError(RemoteFailedError(f"{self._server} {how}"), may_retry=may_retry)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert errors of the transport to AttemptError. While there is no response, no part of an answer has
        arrived."""
        server, is_new = self._server, self._response is None
        try:
            yield
        except httpx2.PoolTimeout:
            error = UnavailableError(f"the limit of concurrent requests to {server} is reached; try again later")
            raise AttemptError(error, is_fault=False) from None
        except NotPublicError:
            text = f"{server} has no public address, and the sender of the manifest may only use public ones"
            raise AttemptError(RemoteFailedError(text)) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            text = f"{server} cannot be reached ({type(error).__name__})"
            raise AttemptError(RemoteFailedError(text, retry_after_s=RETRY_AFTER_S), may_retry=True) from None
        except httpx2.TimeoutException:
            raise AttemptError(DeadlineError(f"{server} sent nothing for {self._silence_s:g} s")) from None
        except httpx2.SSEError as error:
            raise AttemptError(RemoteFailedError(f"{server} sent a stream that cannot be read: {error}")) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if is_new:
                raise self._broken(f"broke the connection ({type(error).__name__})", may_retry=True) from None
            raise self._broken("closed the connection in the middle of its answer") from None


async def _first_bytes(response: httpx2.Response) -> bytes:
    """Read as much of a body as is needed for the error message."""
    parts, size = [], 0
    with contextlib.suppress(httpx2.HTTPError):
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size >= MAX_ERROR_BYTES:
                break
    return b"".join(parts)[:MAX_ERROR_BYTES]


class NotPublicError(httpx2.ConnectError):
    """Connection refused here because the name resolves to no address or to one that is not public; the message does
    not show which."""


def is_public(address: str) -> bool:
    """True for a public internet address. Loopback, private, link-local (including cloud metadata), shared, reserved
    and multicast addresses are not public, nor are IPv6 forms that lead to one of those. ValueError: not an address."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast
    if found.ipv4_mapped is not None or found in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)))
    carried = (found.sixtofour, *(found.teredo or ()))
    return found in _UNICAST and found.is_global and all(is_public(str(each)) for each in carried if each is not None)


def is_plainly_private(host: str) -> bool:
    """True if a URL's host is evidently not public; other names are checked when they are resolved."""
    try:
        return not is_public(host.strip("[]"))
    except ValueError:
        name = host.lower().rstrip(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")


class PublicTransport(httpx2.AsyncBaseTransport):
    """Transport that resolves a name and connects to exactly the address that it has checked.

    Args:
        inner: transport that sends the requests; certificates are still verified for the name.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        address = await _public_address(url.host, url.port or (443 if url.scheme == "https" else 80), request)
        pinned = httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,  # includes Host
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _public_address(host: str, port: int, request: httpx2.Request) -> str:
    """Resolve a name to an address; NotPublicError: one of its addresses is not public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    addresses = [str(info[4][0]) for info in found]
    if not addresses or not all(map(is_public, addresses)):
        raise NotPublicError("no public address", request=request)
    return min(addresses, key=lambda address: ":" in address)  # IPv4 first, as it is routed everywhere
