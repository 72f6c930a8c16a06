"""Requests that are answered by vectors: runs the engine calls of one HTTP request, a limited number at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from starlette.requests import Request

from lockstep.cluster.cluster import Cluster
from lockstep.engine.input_processing import with_input_name
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest, Prompt
from lockstep.errors import RequestError, RequestFailedError
from lockstep.server.answer_response import all_of, conclude
from lockstep.server.generation import Caller, caller_of
from lockstep.server.request_context import CLIENT_LEFT_STATUS, ClientLeft, context_of, disconnected, while_connected
from lockstep.server.serving import card_of, serving_of, translated
from lockstep.worker.progress import CallProgress

MAX_OPEN_INPUTS = 64
"""Maximum number of inputs of one request that are queued at once, so that one request cannot fill the queue."""

Calls = Sequence[tuple[str, GenerationRequest]]
"""Engine calls, each with the name of its input in the HTTP request, e.g. ``input[3]``."""
Check = Callable[[npt.NDArray[np.float32]], None]


async def vector_outputs(
    request: Request,
    model: str | None,
    user: str | None,
    calls_of: Callable[[Caller], Calls],
    check: Check | None = None,
) -> tuple[str, list[RequestOutput]]:
    """Run the calls. Returns the model's name, and the outputs in order. The first error, in order, cancels the rest.

    Args:
        model: requested model name.
        user: ``user`` of the request, for the log.
        calls_of: creates the calls.
        check: raises for a vector that does not fit the request.

    Raises:
        RequestError: a call failed; an error about its text names the input.
        ClientLeft: the client disconnected; the request's context has recorded it.
    """
    serving, context, name = serving_of(request), context_of(request), card_of(request, model).name
    context.labels = {} if user is None else {"user": user}
    caller = caller_of(request)
    named = await translated(request, lambda: calls_of(replace(caller, tenant=caller.tenant or user or "")))

    async def answer(index: int) -> RequestOutput:
        where, call = named[index]
        try:
            output = await _answer(serving.cluster, call, context.progress)
        except RequestError as error:
            raise with_input_name(error, where, call.prompt) from None
        if check is not None:
            check(vector_of(output))
        return output

    try:
        outputs = await while_connected(
            disconnected(request.receive), all_of(answer, range(len(named)), MAX_OPEN_INPUTS), context
        )
    except ClientLeft:
        context.status = CLIENT_LEFT_STATUS
        raise
    conclude(context, outputs)
    return name, outputs


def vector_call(
    caller: Caller, prompt: Prompt, model: str | None, truncate_prompt_tokens: int | None
) -> GenerationRequest:
    """Create a call with what all of them have in common."""
    return GenerationRequest(
        prompt,
        model=model,
        priority=caller.priority(),
        tenant=caller.tenant,
        queue_deadline_s=caller.options.queue_timeout_s,
        deadline_s=caller.options.request_timeout_s,
        truncate_prompt_tokens=truncate_prompt_tokens,
        external_id=caller.request_id,
        segment=caller.segment,
    )


def vector_of(output: RequestOutput) -> npt.NDArray[np.float32]:
    """The vector of an output."""
    if output.embedding is None:
        raise RequestFailedError("the request ended without a vector")
    return output.embedding


def num_prompt_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Number of tokens of all texts together."""
    return sum(len(output.prompt_token_ids) for output in outputs)


async def _answer(cluster: Cluster, call: GenerationRequest, progress: CallProgress) -> RequestOutput:
    async with aclosing(cluster.stream(call, progress)) as stream:
        async for events in stream:
            last = events[-1]
            if isinstance(last, TokenOutput) and last.request is not None:
                return last.request
    raise RequestFailedError("a call ended without its final output; this is a bug in Lockstep")
