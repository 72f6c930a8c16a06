"""Shared parameters of generating endpoints: their shapes, their checks, and their conversion to engine parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator
from starlette.requests import Request

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
    SamplingBody,
    TokenId,
    sampled,
    text_or_list,
)
from lockstep.server.foreign import without_foreign
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import PEOPLE, context_of
from lockstep.server.serving import serving_of

MAX_METADATA = 16
"""Maximum number of labels per request, as in OpenAI's API."""
MAX_DEADLINE_MS = 86_400_000
BACKGROUND_PRIORITY = 2**31 - 1
"""Priority of background requests, behind every priority that a client can choose."""
UNBOUNDED = -1
"""A token limit that means: only the context length limits the answer."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
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
    """Adds one chunk before the end, with `usage` and no choices."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the current `usage` of its choice. So does the last chunk, unless `include_usage` is false."""
    include_obfuscation: Literal[False] | None = None
    """Only false is supported."""


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)]
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Ignored: the answer always obeys the schema."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """Required with type `json_schema`."""


class StructuredOutputs(Body):
    """vLLM's parameter for a constraint on the answer. Exactly one member must be set."""

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SharedBody(SamplingBody):
    """Parameters that the OpenAI and Anthropic APIs share."""

    stream: bool | None = None
    repetition_penalty: float | None = sampled("repetition_penalty")
    priority: Annotated[int | None, Field(ge=-(2**31), le=2**31 - 1)] = None
    """Lower values are served first. Values other than 0 require the priority scheduling policy."""
    cache_salt: Name | None = None
    """Prefix-cache blocks are shared only between requests with the same salt."""
    session_id: Name | None = None
    deadline_ms: DeadlineMs | None = None
    """Time limit for the complete answer. When it is exceeded, the request ends with status 504 or an error event."""


class RequestBody(SharedBody):
    """Parameters of all generating endpoints of the OpenAI API."""

    model: Name | None = None
    """Name of a served model. Absent: the model that the routing selects, or the only model."""
    user: Name | None = None
    """Logged. Without API keys, the scheduler's fair share is per user."""
    metadata: Labels | None = None
    """Labels that are logged with the request."""
    service_tier: Name | None = None
    """Ignored. The answer always reports `default`."""


class ConversationBody(RequestBody):
    """Parameters of chat completions and responses."""

    parallel_tool_calls: bool | None = None
    """False: the answer has at most one call."""
    chat_template_kwargs: JsonObject | None = None
    """Variables for the model's chat template, e.g. `enable_thinking`. A warning lists those that it does not read."""
    safety_identifier: Name | None = None
    """Logged, like `user`."""
    prompt_cache_key: Name | None = None
    """Logged. The prefix cache does not need it."""
    prompt_cache_retention: Name | None = None
    """Ignored, like the next: cached blocks are kept until their space is needed."""
    prompt_cache_options: JsonObject | None = None


class GenerationBody(RequestBody):
    """Parameters of chat completions and completions."""

    presence_penalty: float | None = sampled("presence_penalty")
    frequency_penalty: float | None = sampled("frequency_penalty")
    logit_bias: LogitBias | None = sampled("logit_bias")
    min_tokens: int | None = sampled("min_tokens", le=MAX_SEQUENCE_TOKENS)
    stop: StopStrings | None = sampled("stop")
    stop_token_ids: list[TokenId] | None = sampled("stop_token_ids", max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = sampled("ignore_eos")
    bad_words: list[BadWord] | None = sampled("bad_words", max_length=MAX_BAD_WORDS)
    skip_special_tokens: bool | None = sampled("skip_special_tokens")
    include_stop_str_in_output: bool | None = sampled("include_stop_str_in_output")
    n: int | None = sampled("n")
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    """Must equal `n`: no extra choices are generated."""
    stream_options: StreamOptions | None = None
    """Requires `stream`."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    """Regular expression in Rust's syntax, without look-around and backreferences."""
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """Grammar in llguidance's dialect of Lark."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """Cannot be combined with `stream`. Disables reads of the prefix cache for this request."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, le=MAX_SEQUENCE_TOKENS)] = None
    """Keeps only this many tokens from the end of the prompt; -1: as many as fit in the context."""
    keep_alive: str | float | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices and `prompt_token_ids` to the answer."""
    store: bool | None = None
    """Ignored, with a warning if true: answers are not stored."""
    _warnings: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _without_foreign(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Handle parameters of vLLM and llama-server; see `server.foreign`."""
        if not isinstance(given, dict):
            return handler(given)
        kept, warnings = without_foreign(given)
        body = handler(kept)
        body._warnings = warnings
        return body

    @property
    def warnings(self) -> list[str]:
        """Warnings, one sentence each, about parameters that have no effect with any model."""
        text = "store: has no effect, because only /v1/responses stores answers"
        stored = [text] if self.store else []
        return [*stored, *self._warnings]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, and the operator's options for callers."""

    tenant: str
    """Name of the API key; empty if the server requires none."""
    options: ServerOptions
    request_id: str = ""
    segment: str = ""
    is_background: bool = False
    """True for a batch request, which yields to all others."""

    def priority(self, given: int | None = None) -> int:
        """Priority of the caller's request; None: the request sets none."""
        if self.is_background:
            return BACKGROUND_PRIORITY
        return Priority.NORMAL if given is None else given


def caller_of(request: Request) -> Caller:
    """Caller of a request that has passed the server's middleware."""
    context, options = context_of(request), serving_of(request).options
    return Caller(context.tenant, options, context.request_id, context.segment, context.is_background)


@dataclass(frozen=True, slots=True)
class Constrained:
    """A constraint and the parameter that requested it."""

    constraint: Constraint | None = None
    param: str | None = None


def check_shared(body: GenerationBody, options: ServerOptions) -> None:
    """Check rules that the body's schema cannot express.

    Raises:
        InvalidParameterError: a parameter is invalid; the error names it.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is given without stream; set stream or leave it out", param="stream_options"
        )
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameterError(
            f"best_of is {body.best_of} and n is {n}; they must be equal, because no extra choices are generated",
            param="best_of",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidParameterError("prompt_logprobs cannot be streamed; leave stream out", param="prompt_logprobs")
    if body.priority and not options.supports_priority:
        raise InvalidParameterError(
            f"priority is {body.priority}, but the scheduling policy is not priority; "
            "serve with --scheduling-policy priority, or leave it out",
            param="priority",
        )
    if body.keep_alive is not None:
        raise InvalidParameterError(
            "keep_alive is not a request parameter of this API: set it in the manifest; otherwise a model stays "
            "loaded until its memory is needed",
            param="keep_alive",
        )


def constraint_of(body: GenerationBody) -> Constrained:
    """Return the constraint of an answer, with the one parameter that sets it.

    Raises:
        InvalidParameterError: two parameters set a constraint, or its value is invalid.
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
            f"{given[0].param} and {given[1].param} both constrain the answer; give only one of them",
            param=given[0].param,
        )
    for each in given:
        _check_source(each)
    return given[0] if given else Constrained()


def _check_source(given: Constrained) -> None:
    """Reject a constraint that is too long before it is processed. The constraint compiler does all other checks."""
    try:
        assert given.constraint is not None, "only given constraints are checked"
        given.constraint.validate()
    except InvalidParameterError as error:
        raise with_request_param_names(error, {CONSTRAINT: given.param or CONSTRAINT}) from None


def _json_schema(schema: Any, param: str) -> Constraint:
    try:
        return Constraint.json_schema(schema)
    except InvalidParameterError as error:
        raise with_request_param_names(error, {CONSTRAINT: param}) from None


_CONSTRAINTS: Mapping[str, Callable[[Any, str], Constraint]] = {
    "json": _json_schema,
    "regex": lambda pattern, _: Constraint.regex(pattern),
    "choice": lambda choices, _: Constraint.choice(choices),
    "grammar": lambda grammar, _: Constraint.lark(grammar),
}
"""Builders of constraints by kind. Called with the value and its parameter, ``guided_KIND`` or
``structured_outputs``."""


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
                f"response_format.json_schema is given with type {given.type}; it requires type json_schema",
                param="response_format.json_schema",
            )
        return Constraint.json_object() if given.type == "json_object" else None
    if given.json_schema is None:
        raise InvalidParameterError(
            "response_format.json_schema is missing; type json_schema requires it", param="response_format.json_schema"
        )
    schema = given.json_schema.schema_
    return Constraint.json_object() if schema is None else _json_schema(schema, "response_format")


_SAMPLING = frozenset(SamplingParams.__struct_fields__) & GenerationBody.model_fields.keys()
"""Parameters that have the same name in requests and in the sampler."""


def sampling_params(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None, constraint: Constraint | None
) -> SamplingParams:
    """Convert a body to sampling parameters. Null means the default. Ranges are checked once the model is known."""
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
    """Create one engine call for the request. Without API keys, ``user`` is the tenant for fair scheduling."""
    return GenerationRequest(
        prompt,
        params,
        model=body.model,
        priority=caller.priority(body.priority),
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
    """Salt of a request's prefix-cache blocks. It includes the key name if the prefix cache is separate per key."""
    return f"{caller.tenant}\0{salt}" if caller.options.prefix_cache_per_key and caller.tenant else salt


def check_tokens_known(tokenizer: Tokenizer, requested: Mapping[str, bool]) -> None:
    """Reject parameters that need token ids if only a remote server has the model's vocabulary.

    Args:
        requested: whether each parameter is set, by its name.
    """
    if tokenizer.vocab_size > 0:
        return
    for param, is_requested in requested.items():
        if is_requested:
            raise InvalidParameterError(
                f"{param} is not supported for this model: it runs on a remote server, and its tokens are unknown",
                param=param,
            )


def labels_of(body: GenerationBody) -> dict[str, str]:
    """Labels that are logged with the request: its metadata and the parameters that identify the end user."""
    people = {name: getattr(body, name, None) for name in PEOPLE}
    return {**(body.metadata or {}), **{name: value for name, value in people.items() if value is not None}}


def bounded(max_tokens: int | None) -> int | None:
    """Convert a token limit to the sampler's form, which rejects values below 1. None: limited by the context only."""
    return None if max_tokens == UNBOUNDED else max_tokens


def shorter_s(deadline_ms: int | None, limit_s: float | None) -> float | None:
    """Return the request's deadline or the server's limit in seconds, whichever is shorter."""
    given = [s for s in (None if deadline_ms is None else deadline_ms / 1_000, limit_s) if s is not None]
    return min(given, default=None)


def param_names(constraint_param: str | None, **others: str) -> Mapping[str, str]:
    """Request parameter names by engine parameter name, where the two differ."""
    names = {"deadline_s": "deadline_ms", **others}
    if constraint_param is not None:
        names[CONSTRAINT] = constraint_param
    return names


def with_request_param_names(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Rename the parameter in an error from the engine's name to the request's name."""
    name = None if error.param is None else names.get(error.param)
    if name is not None and error.param is not None:
        message = str(error)
        if message.startswith((f"{error.param} ", f"{error.param}:")):
            error.args = (name + message.removeprefix(error.param),)
        error.param = name
    return error
