"""Server options: limits and behavior that the flags of `lockstep serve` set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lockstep.option_fields import Range

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and behavior of one server."""

    host: str = "127.0.0.1"
    port: int = 9000
    api_keys: tuple[str, ...] = ()
    """Keys that grant access to the protected endpoints; empty: no key is required."""
    admin_keys: tuple[str, ...] = ()
    """Keys that grant access to all endpoints. If there are any, endpoints for shared state require one of them."""
    prefix_cache_per_key: bool = False
    """Whether the requests of a key only use prefix-cache blocks that were computed for the same key."""
    allow_unauthenticated: bool = False
    """Whether the server can listen beyond loopback without a key."""
    allow_any_source: bool = False
    """Whether manifests of every key can name any local file and any model on the hub."""
    allow_private_remotes: bool = False
    """Whether manifests of every key can name servers at non-public addresses."""
    allowed_hosts: tuple[str, ...] = ()
    """Allowed host names in the ``Host`` header; empty: any. See `admission.host_fault`."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages can use every path from a browser; ``*``: all origins."""
    allows_loopback_origins: bool = True
    """Whether pages of loopback origins can use models from a browser."""
    max_body_bytes: Annotated[int, Range(1)] = 8 * MIB
    """Maximum size of a request body in bytes."""
    max_header_bytes: Annotated[int, Range(1024)] = 32 << 10
    """Maximum size of the request headers in bytes."""
    max_concurrent_requests: Annotated[int, Range(1)] = 2_048
    """Maximum number of open model requests.

    Includes streams."""
    requests_per_minute: Annotated[int | None, Range(1)] = None
    """Maximum number of requests per key and minute.

    Enforced by a token bucket per key, like the next option. None: no limit."""
    tokens_per_minute: Annotated[int | None, Range(1)] = None
    """Maximum number of tokens per key and minute."""
    queue_timeout_s: Annotated[float | None, Range(0.001)] = None
    """Time limit in seconds until the first step of a request.

    A request can set a shorter deadline."""
    request_timeout_s: Annotated[float | None, Range(0.001)] = None
    """Time limit in seconds for an answer."""
    shutdown_timeout_s: Annotated[float, Range(0)] = 30.0
    """Time limit in seconds for open requests after SIGTERM."""
    ping_interval_s: float = 15.0
    """Seconds without output after which a stream sends a ping."""
    max_stall_s: float = 60.0
    """Seconds after which a client that reads nothing is treated as disconnected."""
    max_pending_bytes: int = MIB
    """Maximum number of bytes pending for a slow reader, after which its stream is ended."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Chat template variables for every conversation. Variables of the request take precedence."""
    reasoning: str = "auto"
    """``auto`` separates reasoning from the content; ``off`` leaves it in the content."""
    metrics_prefix: str = "lockstep"
    supports_priority: bool = False
    """Whether the scheduling policy uses ``priority``. Otherwise a priority other than 0 is rejected."""
    log_requests: bool = True
    log_prompts: bool = False
    log_user: bool = False
    """Whether log lines name the end user of a request. Otherwise they have a hash."""
    enable_debug_endpoints: bool = False
    """Enables ``POST /reset_prefix_cache`` and ``GET /debug/check``."""
    otlp_traces_endpoint: str | None = None
    responses_db: Path | None = None
    """SQLite file for stored responses; None: in memory."""
    max_stored_responses: int = 4_096
    batch_dir: Path | None = None
    """Folder for uploaded files and batches; None: a temporary folder."""
    max_batch_requests: Annotated[int, Range(1)] = 4
    """Maximum number of concurrent batch requests.

    They run only while no other request is open."""
