"""The parameters that every generating endpoint takes, as the OpenAPI document and the 400s know them.

Only shapes and ranges live here; what a parameter does is `calls.py`'s. Unknown parameters are refused by name, and so
are those of OpenAI's that we cannot do, unless they carry the value that asks for nothing. Null asks for nothing
wherever a member may be left out, known or not: clients dump their objects with all that is unset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from lockstep.executors.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_METADATA = 16
"""Labels of a request; OpenAI's bounds, as are those of their lengths."""
MAX_LABEL_CHARS = 64
MAX_LABEL_VALUE_CHARS = 512
MAX_NAME_CHARS = 256
"""Of model names, users, salts and sessions."""
MAX_DEADLINE_MS = 86_400_000
MAX_SEQUENCE_TOKENS = 2**31 - 1
"""More tokens than any context holds."""
MAX_PROMPT_TOKENS = 1 << 19
"""Token ids of one prompt; as many as a body may have values."""
_PIECE = 1_024
"""Members of a list that are checked in one go."""


def text_or_list(value: object) -> str:
    """Which member of a union a value is meant to be. A tag with ``[`` is no name in an error's place."""
    return "[list]" if isinstance(value, list) else "[text]"


def tokens_or_list(value: object) -> str:
    """The same where a list may also be tokens: it is exactly when it begins with a number."""
    is_tokens = isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))
    return "[tokens]" if is_tokens else text_or_list(value)


def text_or_object(value: object) -> str:
    return "[object]" if isinstance(value, dict) else "[text]"


def in_pieces(most: int, least: int = 1) -> Sequence[object]:
    """Annotations of a list of ``least`` to ``most`` members that may be long.

    It is checked piece by piece, since other threads run only in between, and up to the first fault, since no more is
    told.
    """

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> list[Any]:
        if not isinstance(value, list) or len(value) <= _PIECE:
            return cast("list[Any]", handler(value))
        if len(value) > most:
            told = {"field_type": "List", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", told)
        checked: list[Any] = []
        for first in range(0, len(value), _PIECE):
            try:
                checked += handler(value[first : first + _PIECE])
            except ValidationError as error:
                raise ValidationError.from_exception_data(error.title, [_moved(error, first)]) from None
        return checked

    return (Field(min_length=least, max_length=most, fail_fast=True), WrapValidator(check))


def _moved(error: ValidationError, first: int) -> InitErrorDetails:
    """The first fault in a piece, by its place in the whole list."""
    told = error.errors(include_url=False)[0]
    index, *inner = told["loc"]
    loc = (first + index if isinstance(index, int) else index, *inner)
    return InitErrorDetails(
        type=PydanticCustomError(told["type"], "{told}", {"told": told["msg"]}), loc=loc, input=told["input"]
    )


def _json(value: object) -> object:
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None
    return value


def absent(why: str) -> BeforeValidator:
    """For parameters of OpenAI's that are not done here: only null is taken, and the error says why."""

    def check(value: object) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(check)


JsonObject = Annotated[dict[str, Any], BeforeValidator(_json)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_SEQUENCE_TOKENS)]
Tokens = Annotated[list[TokenId], *in_pieces(MAX_PROMPT_TOKENS)]
TextOrTokens = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Tokens, Tag("[list]")],
    Discriminator(text_or_list),
]
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
JsonSchema = Annotated[
    Annotated[JsonObject, Tag("[object]")] | Annotated[str, Tag("[text]")],
    Discriminator(text_or_object),
]


def _unknown(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "it is not known here")


class Body(BaseModel):
    """A JSON object of which every member is known, or null; numbers are finite, and nothing is converted."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True
    )
    __pydantic_extra__: dict[str, Annotated[None, BeforeValidator(_unknown)]] = Field(init=False)


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
    """The answer always obeys the schema, whatever is said here."""


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


class GenerationBody(Body):
    """Parameters of chat completions and completions."""

    model: Name | None = None
    """A served name; absent: whoever the cluster's routing finds, or the one model that is served."""
    temperature: Annotated[float | None, Field(ge=0)] = None
    """0: greedy. Default: the model's, else 1."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None
    """0 or -1: all tokens."""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: LogitBias | None = None
    """Token id to what is added to its logit."""
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**64 - 1)] = None
    """The same seed and parameters give the same answer, whoever else is being served."""
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
    stream: bool | None = None
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
    priority: Annotated[int | None, Field(ge=-(2**31), le=2**31 - 1)] = None
    """Lower is served first; other than 0 only where the scheduling policy is by priority."""
    cache_salt: Name | None = None
    """Prefix-cache blocks are shared only with requests of the same salt."""
    session_id: Name | None = None
    keep_alive: str | float | None = None
    deadline_ms: Annotated[int | None, Field(ge=1, le=MAX_DEADLINE_MS)] = None
    """The answer is complete by then, or the request ends with 504 or an error frame."""
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices and `prompt_token_ids` to the answer."""
    user: Name | None = None
    """Logged; without API keys also whose share of the queue this is."""
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=MAX_LABEL_CHARS)], Annotated[str, Field(max_length=MAX_LABEL_VALUE_CHARS)]]
        | None,
        Field(max_length=MAX_METADATA),
    ] = None
    """Labels that are logged with the request."""
    store: bool | None = None
    """Nothing is stored: true is answered, with a warning."""
    service_tier: Name | None = None
    """There is one, `default`; the answer says so."""
