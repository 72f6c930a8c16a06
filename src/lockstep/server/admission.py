"""Admission middleware: keys, draining, concurrency and rates decide. It adds nothing to a streamed chunk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import UnavailableError
from lockstep.server.access import OPEN_PATHS, AccessKeys, host_fault, origin_fault
from lockstep.server.errors import HttpError, http_error
from lockstep.server.request_context import RequestContext, refuse
from lockstep.server.serving import Serving

DRAINING_RETRY_S = 5.0
"""After this long another server may have taken this one's place."""
WORK = frozenset({"POST", "PUT"})
BUSY_RETRY_S = 1
"""When as many requests as allowed are being answered, some will end soon."""


class AdmissionMiddleware:
    """Counts, charges and refuses. Work is whatever is posted or put to a path that needs a key."""

    def __init__(self, app: ASGIApp, serving: Serving, now_s: Callable[[], float] = time.monotonic) -> None:
        options = serving.options
        self._app = app
        self._serving = serving
        self._now_s = now_s
        self._keys = AccessKeys(options.api_keys, options.admin_keys)
        self._limits = RateLimits(options.requests_per_minute, options.tokens_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        context: RequestContext = scope["state"]["context"]
        is_work = scope["method"] in WORK
        refusal = (
            self._known_host(scope)
            or self._known_origin(scope)
            or self._authenticate(scope, context)
            or (self._admit(context) if is_work else None)
        )
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
        elif is_work:
            await self._serve(context, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known_host(self, scope: Scope) -> HttpError | None:
        allowed = self._serving.options.allowed_hosts
        return host_fault(allowed, scope["headers"]) if allowed else None

    def _known_origin(self, scope: Scope) -> HttpError | None:
        if self._keys:  # which no page of another origin has
            return None
        return origin_fault(self._serving.options.cors_origins, scope["method"], scope["path"], scope["headers"])

    def _authenticate(self, scope: Scope, context: RequestContext) -> HttpError | None:
        if not self._keys:
            return None
        tenant = self._keys.tenant(scope["headers"])
        context.tenant = tenant or ""
        return self._keys.refusal(tenant, scope["path"])

    def _admit(self, context: RequestContext) -> HttpError | None:
        serving = self._serving
        if not serving.lifecycle.is_admitting:
            return http_error(
                UnavailableError("the server is shutting down; try again later", retry_after_s=DRAINING_RETRY_S)
            )
        most = serving.options.max_concurrent_requests
        if serving.traffic.num_open >= most:
            return HttpError(
                429,
                f"{most} requests are being answered, which is all that this server takes at once; try again later",
                code="too_many_requests",
                headers={"Retry-After": str(BUSY_RETRY_S)},
            )
        return self._limits.admit(context.tenant, self._now_s())

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        traffic = self._serving.traffic
        traffic.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            traffic.leave()
            self._limits.spend(context.tenant, context.num_tokens, self._now_s())


MINUTE_S = 60.0


class TokenBucket:
    """Fills at ``per_minute`` up to a minute's worth. May go into debt: an answer's tokens are known afterwards."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._filled_s = now_s

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Seconds until ``amount`` may be taken; 0: now."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) * MINUTE_S / self._capacity)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self._capacity / MINUTE_S
        self._level = min(self._capacity, self._level + gained)
        self._filled_s = now_s


@dataclass(frozen=True, slots=True)
class _Buckets:
    requests: TokenBucket | None
    tokens: TokenBucket | None


class RateLimits:
    """Buckets per tenant: as many as there are keys, and one for a server without keys."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._buckets: dict[str, _Buckets] = {}

    def admit(self, tenant: str, now_s: float) -> HttpError | None:
        """Take one request; or the refusal, if the tenant's requests or tokens of the last minute are too many."""
        buckets = self._of(tenant, now_s)
        if buckets.requests is not None:
            wait_s = buckets.requests.wait_s(now_s)
            if wait_s > 0:
                return _too_many(f"{self._requests_per_minute} requests", wait_s)
        if buckets.tokens is not None:
            wait_s = buckets.tokens.wait_s(now_s)
            if wait_s > 0:
                return _too_many(f"{self._tokens_per_minute} tokens", wait_s)
        if buckets.requests is not None:
            buckets.requests.take(1.0, now_s)
        return None

    def spend(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Charge what an answer took."""
        buckets = self._of(tenant, now_s)
        if buckets.tokens is not None:
            buckets.tokens.take(float(num_tokens), now_s)

    def _of(self, tenant: str, now_s: float) -> _Buckets:
        buckets = self._buckets.get(tenant)
        if buckets is None:
            limits = (self._requests_per_minute, self._tokens_per_minute)
            buckets = _Buckets(*(None if limit is None else TokenBucket(limit, now_s) for limit in limits))
            self._buckets[tenant] = buckets
        return buckets


def _too_many(what: str, wait_s: float) -> HttpError:
    retry_s = math.ceil(wait_s)
    return HttpError(
        429,
        f"This key may spend {what} a minute; try again in {retry_s} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_s)},
    )
