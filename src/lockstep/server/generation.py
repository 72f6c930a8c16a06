"""Parameters that generating endpoints share: their shapes, their rules, and what they become for the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from lockstep.core.request import Priority
from lockstep.engine.request import GenerationRequest, Prompt
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, RequestError
from lockstep.executors.constraint import PARAM as CONSTRAINT
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from lockstep.server.fields import (
    MAX_LABEL_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_SEQUENCE_TOKENS,
    Body,
    JsonObject,
    JsonSchema,
    Name,
    Penalty,
    RepetitionPenalty,
    SamplingBody,
    TokenId,
    text_or_list,
)
from lockstep.server.foreign import without_foreign
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import PEOPLE

MAX_METADATA = 16
"""Labels of a request; OpenAI's bound."""
MAX_DEADLINE_MS = 86_400_000
UNBOUNDED = -1
"""A number of tokens that sets no bound but the context's."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
StopStrings = Annotated[
    Annotated[StopString, Tag("[text]")]
    | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), Tag("[list]")],
    Discriminator(text_or_list),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False}),
]


MaxTokens = Annotated[int, Field(ge=UNBOUNDED, le=MAX_SEQUENCE_TOKENS)]
DeadlineMs = Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)]
Labels = Annotated[
    dict[Annotated[str, Field(max_length=MAX_LABEL_CHARS)], Annotated[str, Field(max_length=MAX_LABEL_VALUE_CHARS)]],
    Field(max_length=MAX_METADATA),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    """One more chunk before the end, with `usage` and no choices."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the `usage` of its choice so far. So has the end, unless `include_usage` is false."""
    include_obfuscation: Literal[False] | None = None
    """Not done here, so only false."""


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """The answer always obeys the schema, whatever is set here."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """Of type `json_schema`."""


class StructuredOutputs(Body):
    """vLLM's way to say what the answer must be; exactly one member."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SharedBody(SamplingBody):
    """Parameters that the APIs of OpenAI and Anthropic have in common here."""

    stream: bool | None = None
    repetition_penalty: RepetitionPenalty | None = None
    priority: Annotated[int | None, Field(ge=-(2**31), le=2**31 - 1)] = None
    """Lower is served first; other than 0 only where the scheduling policy is by priority."""
    cache_salt: Name | None = None
    """Prefix-cache blocks are shared only with requests of the same salt."""
    session_id: Name | None = None
    deadline_ms: DeadlineMs | None = None
    """The answer is complete by then, or the request ends with 504 or an error event."""


class RequestBody(SharedBody):
    """Parameters of every endpoint of OpenAI's that generates."""

    user: Name | None = None
    """Logged; without API keys also whose share of the queue this is."""
    metadata: Labels | None = None
    """Labels that are logged with the request."""
    service_tier: Name | None = None
    """There is one, `default`, which the answer names."""


class GenerationBody(RequestBody):
    """Parameters of chat completions and completions."""

    model: Name | None = None
    """A served name; absent: the model that the cluster's routing finds, or the only one."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    """Token id to what is added to its logit."""
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_SEQUENCE_TOKENS)] = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKEN_IDS)] = None
    ignore_eos: bool | None = None
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]] | None,
        Field(max_length=MAX_BAD_WORDS),
    ] = None
    """Words whose tokens never come in a row, with a space before them or without."""
    skip_special_tokens: bool | None = None
    """False: special tokens are shown as they are written."""
    include_stop_str_in_output: bool | None = None
    """True: what ends the answer is its last text, where it is text."""
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    """Only the value of `n`: nothing is generated and thrown away."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    """Rust's syntax, without look-around and back-references."""
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """llguidance's dialect of Lark."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """Not with `stream`. The prefix cache is not read then."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_SEQUENCE_TOKENS)] = None
    """Keep the last so many tokens of the prompt; -1: as many as the context holds."""
    keep_alive: str | float | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices and `prompt_token_ids` to the answer."""
    store: bool | None = None
    """Nothing is stored: true is answered, with a warning."""
    _warnings: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _without_foreign(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Take parameters of vLLM and llama-server; see `server.foreign`."""
        if not isinstance(given, dict):
            return handler(given)
        kept, warnings = without_foreign(given)
        body = handler(kept)
        body._warnings = warnings
        return body

    @property
    def warnings(self) -> list[str]:
        """Warnings of parameters that change nothing, whichever model answers; a sentence each."""
        stored = ["store: nothing is stored here (/v1/responses keeps what it answers)"] if self.store else []
        return [*stored, *self._warnings]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and the operator's options for callers."""

    tenant: str
    """Name of the API key; empty where none is requested."""
    options: ServerOptions
    request_id: str = ""
    segment: str = ""


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constraint and the parameter that requested it."""

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
    """The constraint of an answer, from the one parameter that sets it.

    Raises:
        InvalidParameterError: two of them do, or one has a wrong value.
    """
    given = [
        Constrained(build(value, f"guided_{kind}"), f"guided_{kind}")
        for kind, build in _CONSTRAINTS.items()
        if (value := getattr(body, f"guided_{kind}")) is not None
    ]
    if body.structured_outputs is not None:
        given.append(Constrained(_structured(body.structured_outputs), "structured_outputs"))
    if body.response_format is not None and (constraint := _response_format(body.response_format)) is not None:
        given.append(Constrained(constraint, "response_format"))
    if len(given) > 1:
        raise InvalidParameterError(
            f"{given[0].param} and {given[1].param} both say what the answer must be; only one of them may",
            param=given[0].param,
        )
    for each in given:
        _check_source(each)
    return given[0] if given else Constrained()


def _check_source(given: Constrained) -> None:
    """Refuse a constraint that is too long before anything is done with it; the rest is for who builds it."""
    try:
        assert given.constraint is not None, "it was given"
        given.constraint.validate()
    except InvalidParameterError as error:
        raise in_the_requests_words(error, {CONSTRAINT: given.param or CONSTRAINT}) from None


def _json_schema(schema: Any, param: str) -> Constraint:
    try:
        return Constraint.json_schema(schema)
    except InvalidParameterError as error:
        raise in_the_requests_words(error, {CONSTRAINT: param}) from None


_CONSTRAINTS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "json": _json_schema,
    "regex": lambda pattern, _: Constraint.regex(pattern),
    "choice": lambda choices, _: Constraint.choice(choices),
    "grammar": lambda grammar, _: Constraint.lark(grammar),
}
"""From the value of ``guided_KIND``, or of a member of ``structured_outputs``, and that parameter's name."""


def _structured(outputs: StructuredOutputs) -> Constraint:
    members = {name.removesuffix("_"): value for name, value in outputs}
    given = [
        build(members[kind], "structured_outputs") for kind, build in _CONSTRAINTS.items() if members[kind] is not None
    ]
    if outputs.json_object:
        given.append(Constraint.json_object())
    if len(given) != 1:
        raise InvalidParameterError(
            f"structured_outputs has {len(given)} constraints; it must have one of json, regex, choice, grammar, "
            "json_object",
            param="structured_outputs",
        )
    return given[0]


def _response_format(given: ResponseFormat) -> Constraint | None:
    if given.type != "json_schema":
        if given.json_schema is not None:
            raise InvalidParameterError(
                f"response_format.json_schema is given with type {given.type}; its type is json_schema",
                param="response_format.json_schema",
            )
        return Constraint.json_object() if given.type == "json_object" else None
    if given.json_schema is None:
        raise InvalidParameterError(
            "response_format.json_schema is missing; type json_schema needs it", param="response_format.json_schema"
        )
    schema = given.json_schema.schema_
    return Constraint.json_object() if schema is None else _json_schema(schema, "response_format")


_SAMPLING = frozenset(SamplingParams.__struct_fields__) & GenerationBody.model_fields.keys()
"""Parameters that have one name here and in the sampler."""


def sampling_params(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingParams:
    """The parameters of the sampler, where null is its default; ranges are checked where the model is known."""
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if body.logit_bias is not None:
        given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, constraint=constraint, **values)


def call_of(
    body: GenerationBody,
    caller: Caller,
    prompt: Prompt,
    params: SamplingParams,
    *,
    prompt_logprobs: int | None,
    shown_specials: tuple[str, ...] = (),
) -> GenerationRequest:
    """One call of the request. Without API keys, ``user`` determines the share of the queue that it takes."""
    return GenerationRequest(
        prompt,
        params,
        model=body.model,
        priority=Priority.NORMAL if body.priority is None else body.priority,
        tenant=caller.tenant or body.user or "",
        cache_salt=cache_salt_of(caller, body.cache_salt or ""),
        session_id=body.session_id,
        session_owner=caller.tenant,
        queue_deadline_s=caller.options.queue_timeout_s,
        deadline_s=shorter_s(body.deadline_ms, caller.options.request_timeout_s),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        prompt_logprobs=prompt_logprobs,
        shown_specials=shown_specials,
        external_id=caller.request_id,
        segment=caller.segment,
    )


def cache_salt_of(caller: Caller, salt: str) -> str:
    """The salt that a request's blocks have in the prefix cache; with the name of its key where keys are kept apart."""
    return f"{caller.tenant}\0{salt}" if caller.options.prefix_cache_per_key and caller.tenant else salt


def check_tokens_known(tokenizer: Tokenizer, wishes: Mapping[str, bool]) -> None:
    """Refuse parameters in tokens where only another server has the vocabulary.

    Args:
        asked: by parameter, whether it is requested.
    """
    if tokenizer.vocab_size > 0:
        return
    for param, is_wished in wishes.items():
        if is_wished:
            raise InvalidParameterError(
                f"{param} cannot be served: another server answers for this model, and its tokens are not known here",
                param=param,
            )


def labels_of(body: GenerationBody) -> dict[str, str]:
    """Labels that are logged with the request: its metadata, and whom it was sent for."""
    people = {name: getattr(body, name, None) for name in PEOPLE}
    return {**(body.metadata or {}), **{name: value for name, value in people.items() if value is not None}}


def bounded(max_tokens: int | None) -> int | None:
    """A limit of tokens as the sampler has it, which refuses what is less than 1; None: what the context leaves."""
    return None if max_tokens == UNBOUNDED else max_tokens


def shorter_s(deadline_ms: int | None, limit_s: float | None) -> float | None:
    """The request's deadline or the server's limit, whichever comes first, in seconds."""
    given = [s for s in (None if deadline_ms is None else deadline_ms / 1_000, limit_s) if s is not None]
    return min(given, default=None)


def param_names(constraint_param: str | None, **others: str) -> Mapping[str, str]:
    """Names of the engine's parameters in the request, where they differ."""
    names = {"deadline_s": "deadline_ms", **others}
    if constraint_param is not None:
        names[CONSTRAINT] = constraint_param
    return names


def in_the_requests_words(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, naming the parameter as the request did."""
    name = None if error.param is None else names.get(error.param)
    if name is not None and error.param is not None:
        message = str(error)
        if message.startswith((f"{error.param} ", f"{error.param}:")):
            error.args = (name + message.removeprefix(error.param),)
        error.param = name
    return error
