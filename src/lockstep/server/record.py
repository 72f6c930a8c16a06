"""What is known of one HTTP request while it is served: filled by its handler, logged and traced when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from lockstep.cluster.base import Hop
from lockstep.engine.outputs import RequestOutput
from lockstep.server.errors import HttpError

CLIENT_LEFT_STATUS = 499
"""In logs and metrics, of a request whose client left; nobody is there to be told."""

PEOPLE = ("user", "safety_identifier", "prompt_cache_key")
"""Labels that say whom a request was sent for; clients put names and addresses there."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a prompt and its answer, or of one HTTP request: summed over its prompts."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """Made by the outermost middleware, found by handlers with `record_of`."""

    request_id: str
    """The client's ``x-request-id``, or ours."""
    endpoint: str
    """The route's path, with its parameters as names; until the request is routed what the client asked for."""
    started_s: float
    """On the monotonic clock."""
    method: str = ""
    tenant: str = ""
    """Name of the API key that was used; never the key."""
    traceparent: str | None = None
    model: str | None = None
    is_stream: bool = False
    outputs: list[RequestOutput] = field(default_factory=list)
    """One per prompt that was answered: usage and timings are read from them."""
    unfinished: list[Usage] = field(default_factory=list)
    """One per prompt whose answer broke off: what was computed for it all the same."""
    hops: list[Hop] = field(default_factory=list)
    """Of models that were asked before those who answered; their tokens are not in `outputs`."""
    finish_reasons: list[str] = field(default_factory=list)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The client's own labels."""
    num_body_bytes: int = 0
    """Of the request, once it has been read."""
    body: str | None = None
    """The request as it was sent; kept for ``--log-prompts`` only."""
    warnings: Sequence[str] = ()
    """What was asked for and is not done, a sentence each; told in a header and in the answer."""
    error: HttpError | None = None
    is_sent: bool = False
    """The connection has taken the whole answer. What it tells of from then on is no departure."""
    status: int | None = None
    """How it ended: what the client was told; of a stream that failed, its error's, although its head said 200;
    `CLIENT_LEFT_STATUS` when the client left before the end."""

    def usage(self) -> Usage:
        answered = [
            Usage(output.num_prompt_tokens, output.num_cached_tokens, output.num_output_tokens)
            for output in self.outputs
        ] + self.unfinished
        return Usage(
            sum(each.num_prompt_tokens for each in answered),
            sum(each.num_cached_tokens for each in answered),
            sum(each.num_output_tokens for each in answered),
        )

    @property
    def num_tokens(self) -> int:
        """What the request cost in all, routing included."""
        usage = self.usage()
        hops = sum(hop.num_prompt_tokens + hop.num_output_tokens for hop in self.hops)
        return usage.num_prompt_tokens + usage.num_output_tokens + hops


def record_of(request: Request) -> RequestRecord:
    """The record of a request that came through the server's middleware."""
    record: RequestRecord = request.state.record
    return record
