"""Adapters of other APIs to chat completions: their bodies as chat requests, and errors in their own words.

A question that came in another API's shape is translated to the one body of a chat request, so that whatever is true
of chat (routing, limits, sessions, deadlines, records) is true of it; only its answer is encoded otherwise.
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
from lockstep.server.chat import ChatBody, ChatCall, chat_call
from lockstep.server.choices import open_choices
from lockstep.server.errors import of_validation
from lockstep.server.generation import Caller, check_tokens_known, labels_of, with_request_param_names
from lockstep.server.request_context import context_of
from lockstep.server.serving import serving_of, translated

_TOOL = re.compile(r"tools\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names of parameters in another API, by patterns of those in chat completions; others have one name in both."""

    rules: Sequence[tuple[re.Pattern[str], str]]
    tool_places: Sequence[int] | None = None
    """Places in the request of the tools of the chat request; None: they are the same."""

    def with_tools(self, places: Sequence[int]) -> ParameterNames:
        """A vocabulary for a request some of whose tools are left out, or become several functions."""
        return replace(self, tool_places=places)

    def name(self, param: str) -> str:
        """The other API's name of a parameter of chat completions."""
        place = _TOOL.match(param)
        if place is not None and self.tool_places is not None and int(place[1]) < len(self.tool_places):
            param = f"tools[{self.tool_places[int(place[1])]}]{param[place.end() :]}"
        for pattern, name in self.rules:
            match = pattern.fullmatch(param)
            if match is not None:
                return match.expand(name)
        return param

    def names(self, names: Mapping[str, str]) -> Mapping[str, str]:
        """Names of the engine's parameters in the other API, from those in a chat request."""
        same = dict.fromkeys(SamplingParams.__struct_fields__) | {"prompt": None}
        return {engines: self.name(names.get(engines, engines)) for engines in {**same, **names}}

    def error(self, error: RequestError) -> RequestError:
        """An error that names a parameter of chat completions, naming the other API's."""
        return error if error.param is None else with_request_param_names(error, {error.param: self.name(error.param)})

    def warning(self, warning: str) -> str:
        """A warning that begins with a parameter's name, beginning with the other API's."""
        param, colon, rest = warning.partition(":")
        return self.name(param) + colon + rest


def chat_body_of(members: Mapping[str, Any], words: ParameterNames) -> ChatBody:
    """A chat request of some members, where None is absent.

    Raises:
        InvalidParameterError: what fits the other API's schema does not fit this one; names that API's parameter.
    """
    try:
        return ChatBody.model_validate({name: value for name, value in members.items() if value is not None})
    except ValidationError as error:
        fault = of_validation(error.errors())
        raise words.error(InvalidParameterError(fault.message, param=fault.param)) from None


def adapted_call(
    request: Request, make_body: Callable[[], ChatBody], words: ParameterNames, tokenizer: Tokenizer
) -> ChatCall:
    """The call of a request of another API; errors name that API's parameters.

    Args:
        make_body: translates the question; its own errors are in that API's words.
    """
    context = context_of(request)
    caller = Caller(context.tenant, serving_of(request).options, context.request_id, context.segment)
    body = make_body()
    context.labels, context.session_id = labels_of(body), body.session_id
    try:
        return chat_call(body, caller, tokenizer)
    except RequestError as error:
        raise words.error(error) from None


async def answer_as_chat(
    request: Request,
    model: str | None,
    make_body: Callable[[], ChatBody],
    words: ParameterNames,
    make_encoder: Callable[[Accepted, ChatCall], Encoder],
    *,
    is_stream: bool,
    new_call_id: Callable[[], str],
    warnings: Sequence[str] = (),
    earlier_ids: Sequence[int] = (),
    returns_ids: bool = False,
) -> Response:
    """Answer a request of another API.

    Args:
        make_body: translates it; on another thread, where it is long.
        make_encoder: from who answers, by its served name, and the call.
        warnings: what was requested and is not done by any model.
        earlier_ids: tokens of a conversation that the prompt goes on with.
        returns_ids: whether choices have the tokens of the answer.
    """
    cluster, context = serving_of(request).cluster, context_of(request)
    context.model = cluster.card(model).name
    tokenizer = cluster.tokenizer(model)

    def translate() -> tuple[ChatCall, GenerationRequest]:
        chat = adapted_call(request, make_body, words, tokenizer)
        call = replace_struct(chat.call, cuts_to_context=True)  # agents ask for more than small models have
        return chat, _continued(call, tokenizer, earlier_ids) if earlier_ids else call

    chat, call = await translated(request, translate)

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        [first] = accepted
        own = cluster.tokenizer(first.model)
        context.warnings = [*warnings, *map(words.warning, chat.warnings(own))]
        choices = open_choices(
            chat.call.params, own, first, tool_use=chat.tool_use, new_call_id=new_call_id, returns_ids=returns_ids
        )
        return Answer(accepted, choices, make_encoder(first, chat), context)

    return AnswerResponse(request, (call,), make_answer, words.names(chat.names), is_stream=is_stream)


def _continued(call: GenerationRequest, tokenizer: Tokenizer, earlier_ids: Sequence[int]) -> GenerationRequest:
    """A chat's call whose prompt begins with the tokens of an earlier conversation."""
    check_tokens_known(tokenizer, {"context": True})
    prompt = call.prompt
    assert isinstance(prompt, Conversation), "a chat's prompt is one"
    new_ids = tokenizer.encode_chat(prompt.messages, template_kwargs=prompt.template_kwargs)
    ids = (*earlier_ids, *new_ids)
    reasoning = tokenizer.reasoning_after(ids) if prompt.reasoning == "auto" else None
    return replace_struct(call, prompt=ids, reasoning=reasoning)
