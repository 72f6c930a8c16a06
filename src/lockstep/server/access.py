"""Who a request comes from: API keys, compared in constant time, and the paths that need none."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

from lockstep.server.errors import HttpError

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/healthz", "/metrics", "/ping", "/version"})
"""Answered without a key: what probes and scrapers ask for. They tell nothing of any request's content."""
_BEARER = b"bearer "


class AccessKeys:
    """The keys of a server. A key's owner is named by its position, so that no log holds a part of a key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [(f"key-{i + 1}", sha256(key.encode()).digest()) for i, key in enumerate(keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The owner of the key in ``Authorization: Bearer`` or ``X-Api-Key``; None: no key, or none that we know.

        Every key is compared with digests of one length and all of them are, so the time tells nothing.
        """
        found: str | None = None
        for given in _given_keys(headers):
            digest = sha256(given).digest()
            for name, known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = found or name
        return found


def unauthenticated() -> HttpError:
    """What is said to a request without a valid key; not whether it had one."""
    return HttpError(
        401,
        "authentication_error",
        "A valid API key is needed: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def loopback_hosts(host: str) -> tuple[str, ...]:
    """The names of a server that listens on loopback only."""
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", host)))


def host_fault(allowed: Collection[str], headers: Iterable[tuple[bytes, bytes]]) -> HttpError | None:
    """The refusal of a request that calls the server by a name that is not its own.

    A page can point its own name at 127.0.0.1 and so reach a server that only loopback protects; the browser then
    still sends the page's name.
    """
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
            bare = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
            if bare in allowed:
                return None
    return HttpError(
        403,
        "permission_error",
        "This server does not answer to that Host; it can be told to by --allowed-host, or be given an --api-key.",
        code="unknown_host",
    )


def _given_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    keys = []
    for name, value in headers:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            keys.append(value[len(_BEARER) :].strip())
        elif name == b"x-api-key":
            keys.append(value.strip())
    return keys
