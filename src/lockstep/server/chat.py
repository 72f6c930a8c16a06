"""`POST /v1/chat/completions`: the route, the shapes of its answers, and their bytes.

What is the same in every chunk of a choice is encoded once; a token costs the encoding of its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted, Hop
from lockstep.cluster.cluster import Cluster
from lockstep.engine.chat_template import checked_messages
from lockstep.engine.request import Conversation
from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.answer import (
    Answer,
    AnswerFunction,
    AnswerToolCall,
    Chunks,
    Extension,
    ResponseMetadata,
    Usage,
    dispatch_calls,
    documented,
    encode,
    metadata_of,
)
from lockstep.server.answer_response import AnswerResponse, Job
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat_request import ChatBody, ChatCall, chat_call
from lockstep.server.choices import Choice, open_choices
from lockstep.server.fields import FinishReasonName, Shape
from lockstep.server.generation import Caller, check_tokens_known, labels_of, not_stored
from lockstep.server.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import serving_of, translated
from lockstep.server.tools.parser import CallDelta

router = APIRouter(route_class=LongBodyRoute, tags=["completions"])


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    """Thoughts before the content."""
    reasoning: NotRequired[str | None]
    """The same under the name that newer clients read."""
    tool_calls: NotRequired[list[AnswerToolCall] | None]
    function_call: NotRequired[AnswerFunction | None]
    """In place of `tool_calls` where the request had `functions`."""


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    """The stop string or stop token that ended it; null for the model's own."""
    token_ids: NotRequired[Sequence[int] | None]


class ChatCompletion(Shape):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default"] | None]
    """Where the request named one."""
    lockstep: Extension
    prompt_token_ids: NotRequired[Sequence[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


@router.post("/v1/chat/completions", responses=documented(ChatCompletion))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving, context = serving_of(request), context_of(request)
    context.model = serving.cluster.card(body.model).name
    context.labels = labels_of(body)
    caller, tokenizer = Caller(context.tenant, serving.options), serving.cluster.tokenizer(body.model)
    asked = await translated(request, lambda: chat_call(body, caller, tokenizer))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return chat_answer(serving.cluster, body, asked, accepted[0], context)

    job = Job((asked.call,), make_answer, asked.names, bool(body.stream), shows_route=_shows_route(body))
    return AnswerResponse(request, job)


def chat_answer(
    cluster: Cluster, body: ChatBody, asked: ChatCall, accepted: Accepted, context: RequestContext
) -> Answer:
    """The answer to an accepted call, still empty."""
    tokenizer, tells_ids = cluster.tokenizer(accepted.model), bool(body.return_token_ids)
    context.warnings = [*not_stored(body), *asked.unheeded(tokenizer)]
    metadata = metadata_of("chatcmpl", cluster.card(accepted.model), body, context)
    check_tokens_known(
        tokenizer,
        {"return_token_ids": tells_ids, "stream_options.continuous_usage_stats": metadata.continuous_usage},
    )
    choices = open_choices(asked.call.params, tokenizer, accepted, tool_use=asked.tool_use, tells_ids=tells_ids)
    hops = accepted.hops if _shows_route(body) else ()
    return Answer(
        [accepted], choices, ChatEncoder(metadata, tokenizer, body, len(choices), echo=_echo(body, asked), hops=hops)
    )


def _shows_route(body: ChatBody) -> bool:
    """Whether the router's decision is shown as a call: clients with tools of their own would try to execute it."""
    return not (body.tools or body.functions) and body.lockstep_hops is not False


def _echo(body: ChatBody, asked: ChatCall) -> str:
    """What the answer begins with: the last message, where that is the assistant's and it is asked for."""
    prompt = asked.call.prompt
    if not body.echo or body.messages[-1].role != "assistant" or not isinstance(prompt, Conversation):
        return ""
    [last] = checked_messages(prompt.messages[-1:], knows_developer=True)
    return str(last["content"])


class ChatEncoder:
    """Chat completions as bytes: the chunks of a stream, and the whole answer. Implements `Encoder`.

    Args:
        echo: what every choice begins with.
        hops: what is shown of who was asked before, as calls of a function.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        body: ChatBody,
        num_choices: int,
        *,
        echo: str = "",
        hops: Sequence[Hop] = (),
    ) -> None:
        text = b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}]'
        self.chunks = Chunks(metadata, "chat.completion.chunk", text, num_choices)
        self._tokenizer = tokenizer
        self._echo = echo
        self._dispatched = dispatch_calls(metadata.id, hops)
        self._has_logprobs = bool(body.logprobs)
        self._tells_ids = bool(body.return_token_ids)
        self._has_functions = body.functions is not None
        """Calls are told in their deprecated form, `function_call`."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        if not self._dispatched:
            return b""
        calls = [{"index": index, **call} for index, call in enumerate(self._dispatched)]
        delta = {"role": "assistant", "content": self._echo, "tool_calls": calls}
        for choice in choices:
            choice.has_begun = True
        return b"".join([self._frame(choice, delta) for choice in choices])

    def chunk(self, choice: Choice, extension: Extension | None) -> bytes:
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            opening = self._frame(choice, {"role": "assistant", "content": self._echo})
        if choice.is_plain:
            return opening + self.chunks.text(choice)
        frames = [opening]
        if choice.reasoning:
            frames.append(self._frame(choice, {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}))
        if choice.text or choice.entries or choice.token_ids:
            delta: dict[str, Any] = {"content": choice.text} if choice.text else {}
            frames.append(self._frame(choice, delta, choice))
        if choice.calls:
            frames += [self._frame(choice, delta) for delta in self._call_deltas(choice.calls)]
        if choice.finish_reason is not None:
            frames.append(self._frame(choice, {}, finish=choice, extension=extension))
        return b"".join(frames)

    def whole(self, answer: Answer) -> bytes:
        metadata, [output] = self.chunks.metadata, answer.outputs
        completion: ChatCompletion = {
            "id": metadata.id,
            "object": "chat.completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": [self._whole_choice(choice) for choice in answer.choices],
            "usage": answer.usage,
            "system_fingerprint": metadata.fingerprint,
            **metadata.tier,  # type: ignore[typeddict-item]  # a final `Tier` has no other members
            "lockstep": answer.extension,
        }
        if self._tells_ids:
            completion["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            logprobs = prompt_logprobs(self._tokenizer, output.prompt_token_ids, output.prompt_logprobs)
            completion["prompt_logprobs"] = logprobs
        return encode(completion)

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        calls = choice.whole_calls
        content = self._echo + choice.text
        message: AnswerMessage = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if calls and self._has_functions:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls or self._dispatched:
            message["tool_calls"] = self._dispatched + [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        whole: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.entries) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self._tells_ids:
            whole["token_ids"] = choice.token_ids
        return whole

    def _finish_reason(self, choice: Choice) -> FinishReasonName:
        is_old = self._has_functions and choice.finish_reason == "tool_calls"
        return "function_call" if is_old else choice.ended_by

    def _call_deltas(self, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
        """News of calls as deltas, each by itself, as OpenAI tells them."""
        if not self._has_functions:
            return [{"tool_calls": [_call_delta(call)]} for call in calls]
        named = [({} if call.name is None else {"name": call.name}, call.arguments) for call in calls]
        return [{"function_call": {**name, "arguments": arguments}} for name, arguments in named]

    def _frame(
        self,
        choice: Choice,
        delta: dict[str, Any],
        shown: Choice | None = None,
        *,
        finish: Choice | None = None,
        extension: Extension | None = None,
    ) -> bytes:
        usage = choice.usage if delta.get("role") is None else choice.usage_before
        members: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if shown is not None:
            if shown.entries:
                members["logprobs"] = chat_logprobs(shown.entries)
            if shown.token_ids:
                members["token_ids"] = shown.token_ids
        if finish is not None:
            members["finish_reason"] = self._finish_reason(finish)
            members["stop_reason"] = finish.stop_reason
        return self.chunks.choice(members, usage, extension)


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}
