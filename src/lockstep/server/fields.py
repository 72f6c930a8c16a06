"""Types of which request bodies are made: JSON objects whose members are all known, names, tokens, long lists.

Unknown parameters are refused by name, and so are those of OpenAI's that we cannot do, unless they carry the value that
asks for nothing. Null asks for nothing wherever a member may be left out, known or not: clients dump their objects with
all that is unset.
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
    WithJsonSchema,
    WrapValidator,
    model_validator,
    with_config,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError
from typing_extensions import TypedDict

from lockstep.artifacts.generation_config import MIN_P, REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_P
from lockstep.executors.sampling_params import PENALTY, SEED
from lockstep.option_fields import Range

MAX_LABEL_CHARS = 64
"""Of labels and their values: OpenAI's bounds."""
MAX_LABEL_VALUE_CHARS = 512
MAX_NAME_CHARS = 256
"""Of model names, users, salts and sessions."""
MAX_SEQUENCE_TOKENS = 2**31 - 1
"""More tokens than any context holds."""
MAX_VALUES = 1 << 19
"""Of a whole body, as commas part them, and so token ids of one prompt: more than any context holds."""
_PIECE = 1_024
"""Members of a list that are checked in one go."""


def text_or_list(value: object) -> str:
    """The member of a union that a value is intended to be. A tag with ``[`` is no name in an error's place."""
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
    reported.
    """

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> list[Any]:
        if not isinstance(value, list) or len(value) <= _PIECE:
            return cast("list[Any]", handler(value))
        if len(value) > most:
            details = {"field_type": "List", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", details)
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
    details = error.errors(include_url=False)[0]
    index, *inner = details["loc"]
    loc = (first + index if isinstance(index, int) else index, *inner)
    context = {**details.get("ctx", {}), "told": details["msg"]}
    return InitErrorDetails(
        type=PydanticCustomError(details["type"], "{told}", context), loc=loc, input=details["input"]
    )


def _json(value: object) -> object:
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None
    return value


def absent(why: str) -> BeforeValidator:
    """For parameters of OpenAI's that are not done here: only null is taken, and the error states why."""

    def check(value: object) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(check)


NOTHING = WithJsonSchema(
    {"anyOf": [{"type": "null"}, {"const": ""}, {"type": "array", "maxItems": 0}, {"const": False}]}
)
"""The schema of values without content; beside `empty`."""


def empty(why: str) -> BeforeValidator:
    """For members that are not supported: only null and values without content are accepted; the error states why."""

    def check(value: object) -> None:
        if value not in (None, "", [], False):
            raise ValueError(why)

    return BeforeValidator(check)


def within(range_: Range) -> Any:
    """pydantic's form of a range."""
    low, high = range_.low, range_.high
    return Field(gt=low, le=high) if range_.above_low else Field(ge=low, le=high)


JsonObject = Annotated[dict[str, Any], BeforeValidator(_json)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_SEQUENCE_TOKENS)]
RepetitionPenalty = Annotated[float, within(REPETITION_PENALTY)]
Penalty = Annotated[float, within(PENALTY)]
Tokens = Annotated[list[TokenId], *in_pieces(MAX_VALUES)]
TextOrTokens = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Tokens, Tag("[list]")],
    Discriminator(text_or_list),
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


class ParameterBody(Body):
    """A JSON object of parameters: a whole number may be written as 4.0, which JSON's schemas call an integer too."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not any(_is_whole(value) for value in given.values()):
            return given
        return {name: int(value) if _is_whole(value) else value for name, value in given.items()}


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


class SamplingBody(ParameterBody):
    """Sampling parameters that all APIs have by these names."""

    temperature: Annotated[float | None, within(TEMPERATURE)] = None
    """0: greedy. Default: the model's, else 1."""
    top_p: Annotated[float | None, within(TOP_P)] = None
    top_k: Annotated[int | None, within(TOP_K)] = None
    """0 or -1: all tokens."""
    min_p: Annotated[float | None, within(MIN_P)] = None
    seed: Annotated[int | None, within(SEED)] = None
    """The same seed and parameters give the same answer, independent of other requests."""


class Marked(Body):
    """A part of a conversation, beside which clients put marks for others than the model."""

    cache_control: JsonObject | None = None
    """Unused: prefixes are found in the cache without it."""
    provider_specific_fields: JsonObject | None = None
    """Unused: LiteLLM's notes."""


FinishReasonName = Literal["stop", "length", "tool_calls", "function_call"]
"""Why a choice ended."""


@with_config(extra="forbid", use_attribute_docstrings=True)
class Shape(TypedDict):
    """A JSON object in an answer: encoders write it, type checking holds them to it, and the OpenAPI document shows it.

    Every member is declared; a sentence under one is its description.
    """
