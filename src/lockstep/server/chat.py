"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted, Cluster, Hop
from lockstep.engine.request import Conversation, checked_messages
from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.answer import Answer, ResponseMetadata, dispatch_calls, encode, frame, metadata_of
from lockstep.server.answer_response import AnswerResponse, Job
from lockstep.server.answer_schema import ChatCompletion, documented
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat_request import ChatBody, ChatCall, chat_call
from lockstep.server.choices import CallsReader, Choice
from lockstep.server.generation import Caller, check_tokens_known, labels_of, not_stored
from lockstep.server.logprobs import Tracer, chat_logprobs, prompt_logprobs
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import serving_of, translated
from lockstep.server.tools.parser import CallDelta

router = APIRouter(route_class=LongBodyRoute, tags=["completions"])


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
    params, plan = asked.call.params, asked.plan
    tokenizer = cluster.tokenizer(accepted.model)
    context.warnings = [*not_stored(body), *asked.unheeded(tokenizer)]
    metadata = metadata_of("chatcmpl", cluster.card(accepted.model), body, context)
    check_tokens_known(
        tokenizer,
        {
            "return_token_ids": bool(body.return_token_ids),
            "stream_options.continuous_usage_stats": metadata.continuous_usage,
        },
    )
    encoder = ChatEncoder(
        metadata,
        tokenizer,
        echo=_echo(body, asked),
        has_functions=body.functions is not None,
        num_choices=params.n,
        has_logprobs=bool(body.logprobs),
        tells_ids=bool(body.return_token_ids),
        hops=accepted.hops if _shows_route(body) else (),
    )
    end_ids = frozenset(tokenizer.end_token_ids)
    after = accepted.prompt_token_ids[-1] if accepted.prompt_token_ids else None

    def tracer() -> Tracer:
        return Tracer(
            tokenizer,
            after,
            verbatim=params.constraint is not None,
            shown_specials=plan.shown_specials if params.skip_special_tokens else None,
        )

    choices = [
        Choice(
            index,
            tracer=tracer() if body.logprobs else None,
            reader=CallsReader(plan, plan.parser(_new_call_id)) if plan.names else None,
            end_ids=end_ids,
            tells_ids=bool(body.return_token_ids),
            shows_end=params.include_stop_str_in_output,
            num_prompt_tokens=len(accepted.prompt_token_ids),
        )
        for index in range(params.n)
    ]
    return Answer([accepted], choices, encoder)


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


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


_TEXT_TAIL = b'},"logprobs":null,"finish_reason":null}]'


class ChatEncoder:
    """Implements `lockstep.server.answer.Encoder`.

    Args:
        echo: what every choice begins with.
        has_functions: a call is told in its deprecated form, `function_call`.
        hops: what is shown of who was asked before, as calls of a function.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        has_logprobs: bool,
        tells_ids: bool,
        echo: str = "",
        has_functions: bool = False,
        hops: Sequence[Hop] = (),
    ) -> None:
        self.metadata = metadata
        self._dispatched = dispatch_calls(metadata.id, hops)
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._echo = echo
        self._has_functions = has_functions
        self._tells_ids = tells_ids
        self._head = metadata.chunk_head("chat.completion.chunk")
        self._text_heads = [
            b"data: " + self._head + b',"choices":[{"index":%d,"delta":{"content":' % index
            for index in range(num_choices)
        ]
        self._text_tail = _TEXT_TAIL + metadata.chunk_usage() + b"}\n\n"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        if not self._dispatched:
            return b""
        calls = [{"index": index, **call} for index, call in enumerate(self._dispatched)]
        delta = {"role": "assistant", "content": self._echo, "tool_calls": calls}
        for choice in choices:
            choice.has_begun = True
        return b"".join([self._frame(choice, delta) for choice in choices])

    def chunk(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            opening = self._frame(choice, {"role": "assistant", "content": self._echo})
        if choice.is_plain:
            tail = self._text_tail
            if self.metadata.continuous_usage:
                tail = _TEXT_TAIL + self.metadata.chunk_usage(choice.usage) + b"}\n\n"
            return opening + self._text_heads[choice.index] + encode(choice.text) + tail
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

    def usage_chunk(self, usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        return frame(self._head + b',"choices":[],' + encode({"usage": usage, "lockstep": extension})[1:])

    def whole(self, answer: Answer) -> bytes:
        metadata = self.metadata
        body: dict[str, Any] = {
            "id": metadata.id,
            "object": "chat.completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": [self._whole_choice(choice) for choice in answer.choices],
            "usage": answer.usage,
            "system_fingerprint": metadata.fingerprint,
            **metadata.told_tier,
            "lockstep": answer.extension,
        }
        [output] = answer.outputs
        if self._tells_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, output.prompt_token_ids, output.prompt_logprobs)
        return encode(body)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        calls = choice.whole_calls
        content = self._echo + choice.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
        }
        if choice.reasoning:
            message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
        if calls and self._has_functions:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls or self._dispatched:
            message["tool_calls"] = self._dispatched + [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        told: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.entries) if self._has_logprobs else None,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if self._tells_ids:
            told["token_ids"] = choice.token_ids
        return told

    def _finish_reason(self, choice: Choice) -> str | None:
        is_old = self._has_functions and choice.finish_reason == "tool_calls"
        return "function_call" if is_old else choice.finish_reason

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
        extension: dict[str, Any] | None = None,
    ) -> bytes:
        usage = choice.usage if delta.get("role") is None else choice.usage_before
        told: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if shown is not None:
            if shown.entries:
                told["logprobs"] = chat_logprobs(shown.entries)
            if shown.token_ids:
                told["token_ids"] = shown.token_ids
        if finish is not None:
            told["finish_reason"] = self._finish_reason(finish)
            told["stop_reason"] = finish.stop_reason
        more = b"" if extension is None else b',"lockstep":' + encode(extension)
        return frame(
            self._head + b',"choices":[' + encode(told) + b"]" + self.metadata.chunk_usage(usage) + more + b"}"
        )


def _call_delta(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, **function}}
