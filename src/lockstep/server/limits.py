"""Token buckets: how many requests and tokens a key may spend in a minute. Time enters as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.server.errors import HttpError

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
        "rate_limit_error",
        f"This key may spend {what} a minute; try again in {retry_s} s.",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_s)},
    )
