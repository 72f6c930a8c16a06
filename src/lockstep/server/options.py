"""Options of a server: limits and manners that the flags of `lockstep serve` set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from lockstep.option_fields import Range

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and manners of one server."""

    host: str = "127.0.0.1"
    port: int = 9000
    api_keys: tuple[str, ...] = ()
    """Any of them opens the guarded endpoints; none: no key is requested."""
    admin_keys: tuple[str, ...] = ()
    """Open all endpoints; where there are any, only they open those that show or change what all callers share."""
    prefix_cache_per_key: bool = False
    """Whether a key's requests find only blocks in the prefix cache that its own requests computed."""
    allow_unauthenticated: bool = False
    """Whether to listen beyond loopback without a key."""
    allow_any_source: bool = False
    """Whether every key may have a manifest name any file here and any model on the hub; see `cluster.trust`."""
    allow_private_remotes: bool = False
    """Whether every key may have a manifest name servers at addresses that are not public."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which requests may call this server, in their ``Host``; empty: any. See `access.host_fault`."""
    cors_origins: tuple[str, ...] = ()
    """Origins from which browsers may call every path; ``*``: all."""
    allows_loopback_origins: bool = True
    """Whether browsers may ask models from pages of loopback origins."""
    max_body_bytes: Annotated[int, Range(1)] = 8 * MIB
    """A larger request is refused."""
    max_header_bytes: Annotated[int, Range(1024)] = 32 << 10
    """Larger headers are refused."""
    max_concurrent_requests: Annotated[int, Range(1)] = 2_048
    """Requests answered at once.

    Those to models, streams and others."""
    requests_per_minute: Annotated[int | None, Range(1)] = None
    """Requests that a key may send.

    A token bucket per key, as is the next; without a number there is no limit."""
    tokens_per_minute: Annotated[int | None, Range(1)] = None
    """Tokens that a key may use."""
    queue_timeout_s: Annotated[float | None, Range(0.001)] = None
    """Seconds that a request may wait for its first step.

    The request's own deadline may be shorter."""
    request_timeout_s: Annotated[float | None, Range(0.001)] = None
    """Seconds that an answer may take."""
    shutdown_timeout_s: Annotated[float, Range(0)] = 30.0
    """Seconds that requests have to finish after SIGTERM."""
    ping_interval_s: float = 15.0
    """Silence in a stream after which a comment is sent."""
    max_pending_bytes: int = MIB
    """Text that may wait for a slow reader before its stream is ended."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for every conversation; a request's own go before them."""
    reasoning: str = "auto"
    """``auto`` keeps thoughts apart from the answer; ``off`` leaves them in it."""
    metrics_prefix: str = "lockstep"
    supports_priority: bool = False
    """Whether the scheduling policy looks at ``priority``; if not, a priority other than 0 is refused."""
    log_requests: bool = True
    log_prompts: bool = False
    log_user: bool = False
    """Whether lines name whom a request was sent for; if not, they have a hash of it."""
    enable_debug_endpoints: bool = False
    """``POST /reset_prefix_cache`` and ``GET /debug/check``."""
    otlp_traces_endpoint: str | None = None
    responses_db: str | None = None
    """SQLite file for stored responses; None: in memory."""
    max_stored_responses: int = 4_096
    batch_dir: str | None = None
    """Folder for uploaded files and batches; None: a temporary one."""
    max_batch_requests: Annotated[int, Range(1)] = 4
    """Requests of batches that are answered at once, while no others are."""
