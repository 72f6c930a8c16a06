"""Adapters of other APIs to chat completions: translate request bodies to chat requests and parameter names back.

A request in another API's format is translated to a chat request, so that all features of chat completions (routing,
limits, sessions, deadlines, recording) apply to it. Only the encoding of its answer differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as replace_struct
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, RequestError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.answer_response import Answer, AnswerResponse, Encoder
from lockstep.server.chat import ChatBody, ChatReply, chat_call
from lockstep.server.choices import open_choices
from lockstep.server.errors import validation_http_error
from lockstep.server.generation import caller_of, check_tokens_known, labels_of, with_request_param_names
from lockstep.server.request_context import context_of
from lockstep.server.serving import card_of, serving_of, translated

_TOOL = re.compile(r"tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class ParamNames:
    """Parameter names of another API, by patterns of chat completions' names. Others have the same name."""

    rules: Sequence[tuple[re.Pattern[str], str]]
    tool_places: Sequence[int] | None = None
    """Index in the original request of each tool of the chat request; None: the indexes are equal."""

    def with_tools(self, places: Sequence[int]) -> ParamNames:
        """Copy for a request in which tools are left out or become several functions."""
        return replace(self, tool_places=places)

    def name(self, param: str) -> str:
        """Convert a parameter name of chat completions to the other API's name."""
        place = _TOOL.match(param)
        if place is not None and self.tool_places is not None and int(place[1]) < len(self.tool_places):
            param = f"tools[{self.tool_places[int(place[1])]}]{param[place.end() :]}"
        for pattern, name in self.rules:
            match = pattern.fullmatch(param)
            if match is not None:
                return match.expand(name)
        return param

    def names(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Return the other API's parameter names by engine parameter name, given those of the chat request."""
        same = dict.fromkeys(SamplingParams.__struct_fields__) | {"prompt": None}
        return {engines: self.name(names.get(engines, engines)) for engines in {**same, **names}}

    def error(self, error: RequestError) -> RequestError:
        """Convert the parameter name in an error to the other API's name."""
        return error if error.param is None else with_request_param_names(error, {error.param: self.name(error.param)})

    def warning(self, warning: str) -> str:
        """Convert the parameter name at the start of a warning to the other API's name."""
        param, colon, rest = warning.partition(":")
        return self.name(param) + colon + rest


def chat_body_of(members: Mapping[str, Any], param_names: ParamNames) -> ChatBody:
    """Create a chat request from members. None means absent.

    Raises:
        InvalidParameterError: a value is valid in the other API but not in chat completions; the error has the other
            API's parameter name.
    """
    try:
        return ChatBody.model_validate({name: value for name, value in members.items() if value is not None})
    except ValidationError as error:
        fault = validation_http_error(error.errors())
        raise param_names.error(InvalidParameterError(fault.message, param=fault.param)) from None


def adapted_call(
    request: Request, make_body: Callable[[], ChatBody], param_names: ParamNames, tokenizer: Tokenizer
) -> tuple[GenerationRequest, ChatReply]:
    """Create the engine call for a request of another API. Errors have that API's parameter names.

    Args:
        make_body: translates the request; its own errors already have that API's names.
    """
    context, caller = context_of(request), caller_of(request)
    body = make_body()
    context.labels, context.session_id = labels_of(body), body.session_id
    try:
        return chat_call(body, caller, tokenizer)
    except RequestError as error:
        raise param_names.error(error) from None


async def answer_as_chat(
    request: Request,
    model: str | None,
    make_body: Callable[[], ChatBody],
    param_names: ParamNames,
    make_encoder: Callable[[Accepted], Encoder],
    *,
    is_stream: bool,
    new_call_id: Callable[[], str],
    warnings: Sequence[str] = (),
    earlier_ids: Sequence[int] = (),
    returns_ids: bool = False,
) -> Response:
    """Answer a request of another API.

    Args:
        make_body: translates the request; called on another thread if the request is long.
        make_encoder: creates the encoder from the accepted call.
        warnings: warnings about parameters that no model supports.
        earlier_ids: tokens of an earlier conversation that the prompt continues.
        returns_ids: whether choices have the token ids of the answer.
    """
    cluster, context = serving_of(request).cluster, context_of(request)
    tokenizer = card_of(request, model).tokenizer

    def translate() -> tuple[GenerationRequest, ChatReply]:
        call, reply = adapted_call(request, make_body, param_names, tokenizer)
        call = replace_struct(call, cuts_to_context=True)  # agents often request too many tokens
        return _continued(call, tokenizer, earlier_ids) if earlier_ids else call, reply

    call, reply = await translated(request, translate)

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        [first] = accepted
        own = cluster.card(first.model).tokenizer
        context.warnings = [*warnings, *map(param_names.warning, reply.warnings(own))]
        choices = open_choices(
            call.params, own, first, tool_use=reply.tool_use, new_call_id=new_call_id, returns_ids=returns_ids
        )
        return Answer(accepted, choices, make_encoder(first), context)

    return AnswerResponse(request, (call,), make_answer, param_names.names(reply.names), is_stream=is_stream)


def _continued(call: GenerationRequest, tokenizer: Tokenizer, earlier_ids: Sequence[int]) -> GenerationRequest:
    """Create a call whose prompt starts with the tokens of an earlier conversation."""
    check_tokens_known(tokenizer, {"context": True})
    prompt = call.prompt
    assert isinstance(prompt, Conversation), "the prompt of a chat is a conversation"
    new_ids = tokenizer.encode_chat(prompt.messages, template_kwargs=prompt.template_kwargs)
    ids = (*earlier_ids, *new_ids)
    reasoning = tokenizer.reasoning_after(ids) if prompt.reasoning == "auto" else None
    return replace_struct(call, prompt=ids, reasoning=reasoning)
