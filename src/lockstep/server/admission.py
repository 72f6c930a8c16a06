"""Admission control: checks API keys, hosts, page origins, shutdown, concurrency and rate limits of requests.

Keys are compared in constant time. Streamed chunks have no additional cost.
"""

from __future__ import annotations

import hmac
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.cluster.manifest_permissions import Permissions
from lockstep.errors import UnavailableError
from lockstep.server.errors import HttpError, http_error
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext, refuse
from lockstep.server.serving import Serving

DRAINING_RETRY_S = 5.0
"""Seconds after which another server may have replaced a server that shuts down."""
WORK = frozenset({"POST", "PUT"})
BUSY_RETRY_S = 1
"""Seconds after which some of the open requests will probably have ended."""


class AdmissionMiddleware:
    """Counts, rate-limits and rejects requests. The limits apply to every POST or PUT to a path that requires a key."""

    def __init__(self, app: ASGIApp, serving: Serving, now_s: Callable[[], float] = time.monotonic) -> None:
        options = serving.options
        self._app = app
        self._serving = serving
        self._now_s = now_s
        self._keys = AccessKeys(options.api_keys, options.admin_keys)
        self._limits = RateLimits(options.requests_per_minute, options.tokens_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context: RequestContext = scope["state"]["context"]
        if context.is_background:  # admitted with its batch; it yields to all requests counted here
            await self._app(scope, receive, send)
            return
        is_open = scope["path"] in OPEN_PATHS
        is_work = not is_open and scope["method"] in WORK
        refusal = (
            (None if is_open else self._known_host(scope) or self._authenticate(scope, context))
            or self._known_origin(scope, context)
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

    def _known_origin(self, scope: Scope, context: RequestContext) -> HttpError | None:
        if scope["method"] in _READING or context.tenant:  # a foreign page has no key
            return None
        options = self._serving.options
        allows_loopback = options.allows_loopback_origins and is_inference_path(scope["path"])
        return origin_fault(options.cors_origins, allows_loopback, scope["headers"])

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
                f"the server has reached its limit of {most} concurrent requests; try again later",
                code="too_many_requests",
                headers={"Retry-After": str(BUSY_RETRY_S)},
            )
        self._limits.share(serving.cluster.num_gateways, self._now_s())
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
    """Token bucket that fills at ``per_minute``, up to one minute's worth.

    The level can become negative, because the number of tokens of an answer is known only afterwards.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._filled_s = now_s

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Seconds until ``amount`` can be taken; 0: now."""
        self._fill(now_s)
        return max(0.0, (amount - self._level) * MINUTE_S / self._capacity)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def resize(self, capacity: float, now_s: float) -> None:
        """Change the fill rate. The level is limited to one minute's worth of the new rate."""
        self._fill(now_s)
        self._capacity = capacity
        self._level = min(capacity, self._level)

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._filled_s) * self._capacity / MINUTE_S
        self._level = min(self._capacity, self._level + gained)
        self._filled_s = now_s


@dataclass(frozen=True, slots=True)
class _Buckets:
    requests: TokenBucket | None
    tokens: TokenBucket | None


class RateLimits:
    """Rate limit buckets of each tenant: one tenant per key, and one for a server without keys."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._buckets: dict[str, _Buckets] = {}
        self._num_sharing = 1

    def share(self, num: int, now_s: float) -> None:
        """Divide each limit by the number of gateways that share it."""
        if num == self._num_sharing:
            return
        self._num_sharing = num
        for buckets in self._buckets.values():
            self._resize(buckets, now_s)

    def _resize(self, buckets: _Buckets, now_s: float) -> None:
        limits = (self._requests_per_minute, self._tokens_per_minute)
        for bucket, limit in zip((buckets.requests, buckets.tokens), limits, strict=True):
            if bucket is not None and limit is not None:
                bucket.resize(limit / self._num_sharing, now_s)

    def admit(self, tenant: str, now_s: float) -> HttpError | None:
        """Take one request from the tenant's bucket, or return an error if the requests or tokens exceed the limit."""
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
        """Charge the tokens of an answer to the tenant."""
        buckets = self._of(tenant, now_s)
        if buckets.tokens is not None:
            buckets.tokens.take(float(num_tokens), now_s)

    def _of(self, tenant: str, now_s: float) -> _Buckets:
        buckets = self._buckets.get(tenant)
        if buckets is None:
            limits = (self._requests_per_minute, self._tokens_per_minute)
            buckets = _Buckets(*(None if limit is None else TokenBucket(limit, now_s) for limit in limits))
            self._resize(buckets, now_s)
            self._buckets[tenant] = buckets
        return buckets


def _too_many(what: str, wait_s: float) -> HttpError:
    retry_s = math.ceil(wait_s)
    return HttpError(
        429,
        f"The rate limit of this key is {what} per minute; try again in {retry_s} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_s)},
    )


OPEN_PATHS = frozenset(
    {
        "/",
        "/api/version",
        "/docs",
        "/health",
        "/health/live",
        "/health/ready",
        "/healthz",
        "/metrics",
        "/ping",
        "/version",
    }
)
"""Paths that do not require a key, for probes and scrapers. They expose no content of any request."""
_LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
_INFERENCE = re.compile(
    r"/v1/(chat/completions|completions|embeddings|score|responses(/.*)?|messages(/.*)?|models(/.*)?)"
    r"|(/v[12])?/rerank|/score|/tokenize|/detokenize"
    r"|/api/[a-z]+"
)
_READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing. Requests with any other method are checked for their page origin."""
_OWN_SITES = ("same-origin", "none")
"""Values of ``Sec-Fetch-Site`` for the server's own pages and for navigation by the user."""
_SHOWN_CHARS = 64
_BEARER = b"bearer "
_ADMIN = "admin-"
_OPERATED = re.compile(
    r"/v1/(cluster(/hosts/.*)?|stats|logs|manifest|events|sessions(/.*)?|models/.+/(load|unload)|(un)?load_lora_adapter)|/reset_prefix_cache|/debug/.*"
)


_OWN = re.compile(r"/v1/(requests|sessions(/.*)?)")
"""Paths that return only the caller's own data, and so require a key if the server has any keys."""


def is_operator_path(path: str) -> bool:
    """True if a path reads or changes state that is shared by all callers."""
    return _OPERATED.fullmatch(path) is not None


def is_inference_path(path: str) -> bool:
    """True if a path queries or lists models and changes no shared state."""
    return _INFERENCE.fullmatch(path) is not None and not is_operator_path(path)


class OriginMiddleware:
    """CORS by kind of path: determines which pages can read the server's responses in a browser.

    Pages of loopback origins run on the same machine as the browser and can use models. Pages of ``origins`` can use
    every path.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], allows_loopback: bool) -> None:
        def cors(loopback: str | None) -> ASGIApp:
            return CORSMiddleware(
                app,
                allow_origins=origins,
                allow_origin_regex=loopback,
                allow_methods=("GET", "POST", "PUT", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id",),
            )

        self._others = cors(None) if origins else app
        self._models = cors(_LOOPBACK_ORIGIN) if allows_loopback else self._others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._models if is_inference_path(scope.get("path", "")) else self._others)(scope, receive, send)


class AccessKeys:
    """API keys of a server. A key's holder is named by the key's position, so that logs never contain a part of a key.

    Args:
        keys: keys of callers.
        admin_keys: keys that grant access to every path.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        named = [*_named("key-", keys), *_named(_ADMIN, admin_keys)]
        self._digests = [(name, sha256(key.encode()).digest()) for name, key in named]
        self._has_keys, self._has_admin_keys = bool(keys), bool(admin_keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def refusal(self, tenant: str | None, path: str) -> HttpError | None:
        """Return the error for a path if the caller may not use it, otherwise None. No key: ``tenant`` is None."""
        is_own = _OWN.fullmatch(path) is not None
        if self._has_admin_keys and is_operator_path(path) and not is_own:
            is_admin = tenant is not None and tenant.startswith(_ADMIN)
            return None if is_admin else _unauthenticated() if tenant is None else forbidden()
        needs_key = self._has_keys or (self._has_admin_keys and is_own)
        return _unauthenticated() if needs_key and tenant is None else None

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """Name of the key in ``Authorization: Bearer`` or ``X-Api-Key``; None: no key, or an unknown one.

        Every given key is compared with all digests, which have one length, so the response time reveals nothing.
        """
        found: str | None = None
        for given in _given_keys(headers):
            digest = sha256(given).digest()
            for name, known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = found or name
        return found


def is_operator(tenant: str, options: ServerOptions) -> bool:
    """True if the caller's key is an admin key. Without keys: true if only this machine can call the server."""
    has_keys = bool(options.api_keys or options.admin_keys)
    return tenant.startswith(_ADMIN) if has_keys else not options.allow_unauthenticated


def sees_all(tenant: str, options: ServerOptions) -> bool:
    """True if a caller can see the requests of others: with an admin key, or if the server has no keys."""
    return tenant.startswith(_ADMIN) or not (options.api_keys or options.admin_keys)


def permissions_of(tenant: str, options: ServerOptions) -> Permissions:
    """Permissions of a caller over the sources and servers that a manifest names.

    An admin key grants every permission. A server without keys grants them to every caller if only this machine can
    reach it, and to none if ``allow_unauthenticated`` exposes it.

    Args:
        tenant: name of the caller's key, as returned by `AccessKeys.tenant`; empty: no key.
    """
    is_admin = is_operator(tenant, options)
    return Permissions(
        any_source=is_admin or options.allow_any_source, private_remotes=is_admin or options.allow_private_remotes
    )


def _named(prefix: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"{prefix}{i + 1}", key) for i, key in enumerate(keys)]


def forbidden() -> HttpError:
    """Error for a key that is not an admin key, on a path that requires one."""
    return HttpError(
        403,
        "This path requires an admin key, since it shows or changes state that all callers share.",
        code="admin_key_needed",
    )


def _unauthenticated() -> HttpError:
    """Error for a request without a valid key. It does not reveal whether there was a key."""
    return HttpError(
        401,
        "A valid API key is required: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def loopback_hosts(host: str) -> tuple[str, ...]:
    """Host names of a server that listens on loopback only."""
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", host)))


def host_fault(allowed: Collection[str], headers: Iterable[tuple[bytes, bytes]]) -> HttpError | None:
    """Return an error for a request whose Host is not a name of this server, otherwise None.

    A page can point its own domain at 127.0.0.1 and so reach a server that is protected only by listening on loopback
    (DNS rebinding). The browser then still sends the page's host name.
    """
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
            bare = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
            if bare in allowed:
                return None
    return HttpError(
        403,
        "The Host header does not name this server; add the name with --allowed-host, or set --api-key to accept any.",
        code="unknown_host",
    )


def origin_fault(
    allowed: Collection[str], allows_loopback: bool, headers: Iterable[tuple[bytes, bytes]]
) -> HttpError | None:
    """Return an error for a request that may change state and was sent by a page of a foreign origin, otherwise None.

    Browsers send some cross-origin requests without a preflight: requests without a body, forms, and uploads. They send
    the page's origin in ``Origin``, and its relation to the server in ``Sec-Fetch-Site``, which no page can set.
    Clients that are not browsers send neither.

    Args:
        allowed: allowed origins, or ``*``.
        allows_loopback: whether pages of loopback origins can send this request.
    """
    found = dict(headers)
    origin = found.get(b"origin", b"").decode("latin-1")
    site = found.get(b"sec-fetch-site", b"").decode("latin-1")
    if site:
        is_own = site in _OWN_SITES
    else:
        is_own = not origin or origin.lower().partition("://")[2] == found.get(b"host", b"").decode("latin-1").lower()
    if is_own or not {"*", origin}.isdisjoint(allowed):
        return None
    if allows_loopback and re.fullmatch(_LOOPBACK_ORIGIN, origin):
        return None
    shown = repr(origin[:_SHOWN_CHARS]) if origin else "another site"
    return HttpError(
        403,
        f"Pages of {shown} cannot send requests that may change state; start the server with --cors-origin ORIGIN "
        "for pages of that origin, or send an API key.",
        code="unknown_origin",
    )


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    keys = []
    for name, value in headers:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            keys.append(value[len(_BEARER) :].strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys
