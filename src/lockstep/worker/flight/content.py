"""What a recording with content holds of a request: enough to compute it again, and not who sent it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from lockstep.core.request import FinishReason
from lockstep.core.step import StepResult
from lockstep.engine.generation import Generation, LiveRequest
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.worker.wire import request_decoder, request_encoder


def encode_request(live: LiveRequest, name_of: Callable[[str], int]) -> bytes:
    """The request as msgpack: its prompt as token ids, its seed as it was drawn, its salt by a number; without tenant,
    session, model and deadlines, whose effects are recorded as commands, and without the caller's names for it."""
    request = live.request
    return request_encoder().encode(
        replace(
            request,
            prompt=live.prompt_ids,
            params=replace(request.params, seed=live.seed),
            cache_salt=str(name_of(request.cache_salt)) if request.cache_salt else "",
            tenant="",
            deadline_s=None,
            queue_deadline_s=None,
            session_id=None,
            session_owner="",
            model=None,
            external_id="",
            segment="",
        )
    )


def decode_request(data: bytes) -> GenerationRequest:
    """The other way.

    Raises:
        msgspec.MsgspecError: it is no request.
    """
    request = request_decoder().decode(data)
    assert not isinstance(request.prompt, (str, Conversation)), "a recorded prompt is token ids"
    return replace(request, prompt=tuple(request.prompt))


def tokens_of(result: StepResult, touched: Sequence[Generation]) -> list[tuple[int, ...]]:
    """What each row that sampled got; nothing where an error or a vector came instead of a token."""
    return [
        () if reason is FinishReason.ERROR or generation.pooler is not None else generation.delta_ids
        for generation, reason in zip(touched, result.finishes, strict=True)
    ]
