"""Generation requests from the parameters that endpoints share: pure, and alone in knowing what each of them does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.request import Priority
from lockstep.engine.request import GenerationRequest, Prompt
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, RequestError
from lockstep.executors.constraint import PARAM as CONSTRAINT
from lockstep.executors.constraint import Constraint, JsonSchema
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.options import ServerOptions
from lockstep.server.record import PEOPLE
from lockstep.server.schema import GenerationBody, ResponseFormat, StructuredOutputs

_SAMPLING = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.model_fields and name not in ("logit_bias", "stop")
)
"""Parameters that a request says as they are."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the operator allows."""

    tenant: str
    """Name of the API key; empty where none is asked for."""
    options: ServerOptions


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constraint and the parameter that asked for it."""

    constraint: Constraint | None = None
    param: str | None = None


def check_shared(body: GenerationBody, options: ServerOptions) -> None:
    """Refuse what the shapes alone cannot.

    Raises:
        InvalidParameterError: names the parameter.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is given without stream; set stream or leave it out", param="stream_options"
        )
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameterError(
            f"best_of is {body.best_of} and n is {n}; nothing is generated and thrown away here, so they must be equal",
            param="best_of",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameterError("prompt_logprobs cannot be streamed; leave stream out", param="prompt_logprobs")
    if body.priority and not options.supports_priority:
        raise InvalidParameterError(
            f"priority is {body.priority}, but requests do not choose theirs here; "
            "serve with --scheduling-policy priority, or leave it out",
            param="priority",
        )
    if body.keep_alive is not None:
        raise InvalidParameterError(
            "keep_alive is not for requests to say here: a manifest's keep_alive does, and otherwise a model stays "
            "loaded until its room is needed; leave it out",
            param="keep_alive",
        )


def constraint_of(body: GenerationBody) -> Constrained:
    """What the answer must be, from the one parameter that says so.

    Raises:
        InvalidParameterError: two of them do, or one says it wrongly.
    """
    guided = {
        "guided_json": None if body.guided_json is None else _json_schema(body.guided_json, "guided_json"),
        "guided_regex": None if body.guided_regex is None else Constraint.regex(body.guided_regex),
        "guided_choice": None if body.guided_choice is None else Constraint.choice(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else Constraint.lark(body.guided_grammar),
        "structured_outputs": None if body.structured_outputs is None else _structured(body.structured_outputs),
        "response_format": None if body.response_format is None else _response_format(body.response_format),
    }
    given = [Constrained(constraint, param) for param, constraint in guided.items() if constraint is not None]
    if len(given) > 1:
        raise InvalidParameterError(
            f"{given[0].param} and {given[1].param} both say what the answer must be; only one of them may",
            param=given[0].param,
        )
    if not given:
        return Constrained()
    _check_source(given[0])
    return given[0]


def _check_source(said: Constrained) -> None:
    """Refuse a constraint that is too long before anything is done with it; the rest is for who builds it."""
    try:
        assert said.constraint is not None, "it was said"
        said.constraint.validate()
    except InvalidParameterError as error:
        raise in_the_requests_words(error, {CONSTRAINT: said.param or CONSTRAINT}) from None


def _json_schema(schema: JsonSchema, param: str) -> Constraint:
    try:
        return Constraint.json_schema(schema)
    except InvalidParameterError as error:
        raise in_the_requests_words(error, {CONSTRAINT: param}) from None


def _structured(said: StructuredOutputs) -> Constraint:
    given = [
        constraint
        for constraint in (
            None if said.json_ is None else _json_schema(said.json_, "structured_outputs"),
            None if said.regex is None else Constraint.regex(said.regex),
            None if said.choice is None else Constraint.choice(said.choice),
            None if said.grammar is None else Constraint.lark(said.grammar),
            Constraint.json_object() if said.json_object else None,
        )
        if constraint is not None
    ]
    if len(given) != 1:
        raise InvalidParameterError(
            f"structured_outputs has {len(given)} constraints; it must have one of json, regex, choice, grammar, "
            "json_object",
            param="structured_outputs",
        )
    return given[0]


def _response_format(said: ResponseFormat) -> Constraint | None:
    if said.type != "json_schema":
        if said.json_schema is not None:
            raise InvalidParameterError(
                f"response_format.json_schema is given with type {said.type}; its type is json_schema",
                param="response_format.json_schema",
            )
        return Constraint.json_object() if said.type == "json_object" else None
    if said.json_schema is None:
        raise InvalidParameterError(
            "response_format.json_schema is missing; type json_schema needs it", param="response_format.json_schema"
        )
    schema = said.json_schema.schema_
    return Constraint.json_object() if schema is None else _json_schema(schema, "response_format")


def sampling_params(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingParams:
    """The parameters of the sampler; ranges are checked where the model is known.

    Members of the body that are called as a parameter are that parameter, and null is its default.
    """
    told = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    params: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    stop = body.stop
    return SamplingParams(
        **params,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=max_tokens,
        logprobs=logprobs,
        constraint=constraint,
    )


def call_of(
    body: GenerationBody,
    caller: Caller,
    prompt: Prompt,
    params: SamplingParams,
    *,
    prompt_logprobs: int | None,
    shown_specials: tuple[str, ...] = (),
) -> GenerationRequest:
    """One call of the request. Without API keys, ``user`` says whose share of the queue it takes."""
    return GenerationRequest(
        prompt,
        params,
        model=body.model,
        priority=Priority.NORMAL if body.priority is None else body.priority,
        tenant=caller.tenant or body.user or "",
        cache_salt=body.cache_salt or "",
        session_id=body.session_id,
        queue_deadline_s=caller.options.queue_timeout_s,
        deadline_s=shorter_s(body.deadline_ms, caller.options.request_timeout_s),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt_logprobs=prompt_logprobs,
        shown_specials=shown_specials,
    )


def check_tokens_known(tokenizer: Tokenizer, asked: Mapping[str, bool]) -> None:
    """Refuse what must be said in tokens where only another server knows them.

    Args:
        asked: by parameter, whether it is asked for.
    """
    if tokenizer.vocab_size > 0:
        return
    for param, is_asked in asked.items():
        if is_asked:
            raise InvalidParameterError(
                f"{param} cannot be served: another server answers for this model, and its tokens are not known here",
                param=param,
            )


def labels_of(body: GenerationBody) -> dict[str, str]:
    """What is logged with the request: its metadata, and who it says is behind it."""
    told = {name: getattr(body, name, None) for name in PEOPLE}
    return {**(body.metadata or {}), **{name: value for name, value in told.items() if value is not None}}


def not_stored(body: GenerationBody) -> list[str]:
    """The warning that nothing is kept, where it was to be."""
    return ["store: nothing is stored here (/v1/responses keeps what it answers)"] if body.store else []


def shorter_s(deadline_ms: int | None, limit_s: float | None) -> float | None:
    """The request's deadline or the server's limit, whichever comes first, in seconds."""
    given = [s for s in (None if deadline_ms is None else deadline_ms / 1_000, limit_s) if s is not None]
    return min(given, default=None)


def param_names(constraint_param: str | None, **others: str) -> Mapping[str, str]:
    """How the engine's names of parameters are called in the request, where they differ."""
    names = {"deadline_s": "deadline_ms", **others}
    if constraint_param is not None:
        names[CONSTRAINT] = constraint_param
    return names


def in_the_requests_words(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, naming the parameter as the request did."""
    name = None if error.param is None else names.get(error.param)
    if name is not None and error.param is not None:
        message = str(error)
        if message.startswith(f"{error.param} "):
            error.args = (name + message.removeprefix(error.param),)
        error.param = name
    return error
