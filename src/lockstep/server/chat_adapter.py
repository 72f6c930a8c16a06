"""Adapters of other APIs to chat completions: the parameter table of an API, and the path of its requests.

A request of another API becomes a chat request, so that all features of chat completions (routing, limits, sessions,
deadlines, recording) apply to it. An adapter has three parts:

1. The body, a pydantic model, is the table of the API's parameters. Annotations state what becomes of each::

       class GreetingBody(SharedBody):
           text: Annotated[str, To("messages", as_messages, dropped)]
           max_words: Annotated[int | None, Field(ge=1), To("max_tokens", lambda words: 2 * words)] = None
           ends: Annotated[list[str] | None, To("stop")] = sampled("stop")
           style: StyleBody | None = None
           tone: Annotated[str | None, NoEffect("the model has one tone")] = None
           image: Annotated[None, unsupported("only text is supported")] = None

   A parameter without an annotation is passed under its own name if the chat request has that name. Members of
   `StyleBody` are parameters named ``style.NAME``. `table_of` creates the table, from which the chat request, the
   parameter names in errors and the warnings follow; the OpenAPI document follows from the model.
2. The encoder of answers implements `lockstep.server.answer_response.Encoder`. It returns frames or lines that
   `lockstep.server.answer` delimits.
3. The route calls `answer_as_chat`. A row of `lockstep.server.dialect` has the form of the API's errors.

`tests/server/test_chat_adapter.py` has a whole adapter in seventy lines.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

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
from lockstep.server.chat import MAX_WARNINGS, ChatBody, ChatReply, chat_call
from lockstep.server.choices import open_choices
from lockstep.server.errors import validation_http_error
from lockstep.server.fields import Body, JsonObject
from lockstep.server.generation import caller_of, check_tokens_known, labels_of, with_request_param_names
from lockstep.server.request_context import context_of
from lockstep.server.serving import card_of, serving_of, translated

T = TypeVar("T", bound=Body)

_TOOL = re.compile(r"tools\[(\d+)\]")
_WRAPPER = re.compile(r"^(\[\d+\])?(?:\.allowed_tools(\.tools\[\d+\]))?\.(?:function|json_schema)\b")
"""Beginning of a path within a value, with the objects in which only chat completions wrap its members."""


def kept(inner: str) -> str:
    """Path within a value that both APIs have in the same form."""
    return inner


def flat(inner: str) -> str:
    """Path within a value that chat completions wrap in a further object: ``[2].function.name`` is ``[2].name``."""
    return _WRAPPER.sub(r"\1\2", inner)


def dropped(inner: str) -> str:
    """Path within a value that has another form here: errors name the whole parameter."""
    return ""


@dataclass(frozen=True, slots=True)
class To:
    """Entry of a parameter: its counterpart in the chat request."""

    target: str
    """Name in the chat request; ``object.key`` is one member of an object, beside which others may be set."""
    convert: Callable[[Any], object] | None = None
    """Converts the value; a result of None is left out."""
    inner: Callable[[str], str] = kept
    """Converts a path within the chat request's value to a path within the parameter, for errors."""
    of_body: bool = False
    """Whether `convert` is called with the whole body, because the value depends on other parameters."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Entry of a parameter that is accepted with a warning and does nothing."""

    because: str
    unless: Callable[[Any], bool] = lambda _: False
    """True for values that cause no warning, because they request what happens anyway."""


@dataclass(frozen=True, slots=True)
class ParameterTable(Generic[T]):
    """Parameters of another API's body: their paths, such as ``options.stop``, with their entries."""

    target: type[T]
    """The chat request."""
    entries: Sequence[tuple[str, To]]
    """Parameters that become parameters of the chat request, in the order of the body."""
    without_effect: Sequence[tuple[str, NoEffect]]
    of_target: Mapping[str, tuple[str, To]]
    """First parameter that becomes a parameter of the chat request, by the latter's name."""
    tool_places: Sequence[int] | None = None
    """Index in the original request of each tool of the chat request; None: the indexes are equal."""

    def with_tools(self, places: Sequence[int]) -> ParameterTable[T]:
        """Copy for a request in which tools are left out or become several functions."""
        return replace(self, tool_places=places)

    def request(self, body: Body, **given: object) -> T:
        """Convert a body to a chat request.

        Args:
            given: parameters of the chat request that do not follow from the table.

        Raises:
            InvalidParameterError: a value is not valid in the chat request; the error has the other API's name.
        """
        members: JsonObject = {}
        for path, entry in self.entries:
            value = _value(body, path)
            if value is not None and entry.convert is not None:
                value = entry.convert(body if entry.of_body else value)
            if value is not None:
                name, _, key = entry.target.partition(".")
                if key:
                    value = {key: value}
                members[name] = {**members[name], **value} if name in members else value
        try:
            return self.target.model_validate(members | given)
        except ValidationError as error:
            fault = validation_http_error(error.errors())
            raise self.error(InvalidParameterError(fault.message, param=fault.param)) from None

    def warnings(self, body: Body) -> Iterator[str]:
        """Warnings, one sentence each, about parameters that have no effect."""
        for path, entry in self.without_effect:
            value = _value(body, path)
            if value is not None and not entry.unless(value):
                yield f"{path}: has no effect, because {entry.because}"

    def name(self, param: str) -> str:
        """Convert a parameter name of the chat request to the other API's name; other names stay."""
        place = _TOOL.match(param)
        if place is not None and self.tool_places is not None and int(place[1]) < len(self.tool_places):
            param = f"tools[{self.tool_places[int(place[1])]}]{param[place.end() :]}"
        target = param
        while target and target not in self.of_target:
            target = target[: max(target.rfind("."), target.rfind("["), 0)]
        path, entry = self.of_target.get(target, ("", To("")))
        return path + entry.inner(param.removeprefix(target))

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


def table_of(body: type[Body], target: type[T]) -> ParameterTable[T]:
    """Create the parameter table of a body whose requests become those of another body."""
    marked = list(_entries(body, ""))
    known = target.model_fields
    entries = [(path, to) for path, to in marked if isinstance(to, To) and to.target.partition(".")[0] in known]
    of_target = {to.target: (path, to) for path, to in reversed(entries)}
    return ParameterTable(target, entries, [(path, it) for path, it in marked if isinstance(it, NoEffect)], of_target)


def _entries(body: type[Body], before: str) -> Iterator[tuple[str, To | NoEffect]]:
    """Entries of a body, and of the bodies within it, which have no entry themselves if none is declared."""
    for name, field in body.model_fields.items():
        types = [each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type)]
        inner = next((each for each in types if issubclass(each, Body)), None)
        marks = [mark for mark in field.metadata if isinstance(mark, To | NoEffect)]
        yield from ((before + name, mark) for mark in marks or ([To(name)] if inner is None else []))
        if inner is not None:
            yield from _entries(inner, f"{before}{name}.")


def _value(body: Body, path: str) -> Any:
    value: Any = body
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def adapted_call(
    request: Request, make_body: Callable[[], ChatBody], table: ParameterTable[ChatBody], tokenizer: Tokenizer
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
        raise table.error(error) from None


async def answer_as_chat(
    request: Request,
    model: str | None,
    make_body: Callable[[], ChatBody],
    table: ParameterTable[ChatBody],
    make_encoder: Callable[[Accepted], Encoder],
    *,
    is_stream: bool,
    new_call_id: Callable[[], str],
    warnings: Iterable[str] = (),
    earlier_ids: Sequence[int] = (),
    returns_ids: bool = False,
    cuts_to_context: bool = True,
    before_end: Callable[[Answer], Awaitable[None]] | None = None,
) -> Response:
    """Answer a request of another API.

    Args:
        make_body: translates the request; called on another thread if the request is long.
        make_encoder: creates the encoder from the accepted call.
        warnings: warnings about parameters that no model supports.
        earlier_ids: tokens of an earlier conversation that the prompt continues.
        returns_ids: whether choices have the token ids of the answer.
        cuts_to_context: reduce a maximum of tokens to what the context leaves; agents often request too many.
        before_end: see `AnswerResponse`.
    """
    cluster, context = serving_of(request).cluster, context_of(request)
    tokenizer = card_of(request, model).tokenizer

    def translate() -> tuple[GenerationRequest, ChatReply]:
        call, reply = adapted_call(request, make_body, table, tokenizer)
        call = replace_struct(call, cuts_to_context=cuts_to_context)
        return _continued(call, tokenizer, earlier_ids) if earlier_ids else call, reply

    call, reply = await translated(request, translate)

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        [first] = accepted
        own = cluster.card(first.model).tokenizer
        context.warnings = [*warnings, *map(table.warning, reply.warnings(own))][:MAX_WARNINGS]
        choices = open_choices(
            call.params, own, first, tool_use=reply.tool_use, new_call_id=new_call_id, returns_ids=returns_ids
        )
        return Answer(accepted, choices, make_encoder(first), context)

    names = table.names(reply.names)
    return AnswerResponse(request, (call,), make_answer, names, is_stream=is_stream, before_end=before_end)


def _continued(call: GenerationRequest, tokenizer: Tokenizer, earlier_ids: Sequence[int]) -> GenerationRequest:
    """Create a call whose prompt starts with the tokens of an earlier conversation."""
    check_tokens_known(tokenizer, {"context": True})
    prompt = call.prompt
    assert isinstance(prompt, Conversation), "the prompt of a chat is a conversation"
    new_ids = tokenizer.encode_chat(prompt.messages, template_kwargs=prompt.template_kwargs)
    ids = (*earlier_ids, *new_ids)
    reasoning = tokenizer.reasoning_after(ids) if prompt.reasoning == "auto" else None
    return replace_struct(call, prompt=ids, reasoning=reasoning)
