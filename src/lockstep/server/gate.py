"""The middleware that decides who comes in: keys, draining, concurrency, rates. It adds nothing to a streamed chunk."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.errors import UnavailableError
from lockstep.server.access import OPEN_PATHS, AccessKeys, host_fault, origin_fault
from lockstep.server.errors import HttpError, http_error
from lockstep.server.limits import RateLimits
from lockstep.server.record import RequestRecord
from lockstep.server.refusals import refuse
from lockstep.server.serving import Serving

DRAINING_RETRY_S = 5.0
"""After this long another server may have taken this one's place."""
WORK = frozenset({"POST", "PUT"})
BUSY_RETRY_S = 1
"""When as many requests as allowed are being answered, some will end soon."""


class GateMiddleware:
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
        record: RequestRecord = scope["state"]["record"]
        is_work = scope["method"] in WORK
        refusal = (
            self._known_host(scope)
            or self._known_origin(scope)
            or self._authenticate(scope, record)
            or (self._admit(record) if is_work else None)
        )
        if refusal is not None:
            await refuse(refusal, scope, receive, send)
        elif is_work:
            await self._serve(record, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known_host(self, scope: Scope) -> HttpError | None:
        allowed = self._serving.options.allowed_hosts
        return host_fault(allowed, scope["headers"]) if allowed else None

    def _known_origin(self, scope: Scope) -> HttpError | None:
        if self._keys:  # which no page of another origin has
            return None
        return origin_fault(self._serving.options.cors_origins, scope["method"], scope["path"], scope["headers"])

    def _authenticate(self, scope: Scope, record: RequestRecord) -> HttpError | None:
        if not self._keys:
            return None
        tenant = self._keys.tenant(scope["headers"])
        record.tenant = tenant or ""
        return self._keys.refusal(tenant, scope["path"])

    def _admit(self, record: RequestRecord) -> HttpError | None:
        serving = self._serving
        if not serving.lifecycle.is_admitting:
            return http_error(
                UnavailableError("the server is shutting down; try again later", retry_after_s=DRAINING_RETRY_S)
            )
        most = serving.options.max_concurrent_requests
        if serving.traffic.num_open >= most:
            return HttpError(
                429,
                "rate_limit_error",
                f"{most} requests are being answered, which is all that this server takes at once; try again later",
                code="too_many_requests",
                headers={"Retry-After": str(BUSY_RETRY_S)},
            )
        return self._limits.admit(record.tenant, self._now_s())

    async def _serve(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        traffic = self._serving.traffic
        traffic.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            traffic.leave()
            self._limits.spend(record.tenant, record.num_tokens, self._now_s())
