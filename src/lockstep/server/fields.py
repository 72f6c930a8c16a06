"""Field types of request bodies: JSON objects without unknown members, names, tokens and long lists.

Unknown parameters are rejected by name. So are unsupported parameters of OpenAI's API, unless their value requests
nothing. Null means "not set" for every optional member, known or not, because clients serialize objects with all unset
members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, cast

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

from lockstep.executors.sampling_params import SamplingParams
from lockstep.option_fields import field_docs, option_types

ListT = TypeVar("ListT")

MAX_LABEL_CHARS = 64
"""Maximum length of a label; that of its value follows. Both are OpenAI's limits."""
MAX_LABEL_VALUE_CHARS = 512
MAX_NAME_CHARS = 256
"""Maximum length of model names, users, salts and session ids."""
MAX_SEQUENCE_TOKENS = 2**31 - 1
"""Upper bound on token counts. No context is this long."""
MAX_VALUES = 1 << 19
"""Maximum number of values in a body, counted as commas, and so of token ids in a prompt. No context is this long."""
_PIECE = 1_024
"""Number of list members that are validated at a time."""


def text_or_list(value: object) -> str:
    """Tag of the union member for a value. Tags contain ``[`` so that `errors.field_path` leaves them out."""
    return "[list]" if isinstance(value, list) else "[text]"


def tokens_or_list(value: object) -> str:
    """Like `text_or_list`, for lists that may hold tokens: a list holds tokens if it begins with a number."""
    is_tokens = isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))
    return "[tokens]" if is_tokens else text_or_list(value)


def text_or_object(value: object) -> str:
    return "[object]" if isinstance(value, dict) else "[text]"


def in_pieces(most: int, least: int = 1) -> Sequence[object]:
    """Annotations of a list of ``least`` to ``most`` members that may be long.

    The list is validated in pieces, between which other threads can run. Validation stops at the first error, because
    only that one is reported.
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
                raise ValidationError.from_exception_data(error.title, [_shifted_error(error, first)]) from None
        return checked

    return (Field(min_length=least, max_length=most, fail_fast=True), WrapValidator(check))


def _shifted_error(error: ValidationError, first: int) -> InitErrorDetails:
    """The first error in a piece, with its index in the whole list."""
    details = error.errors(include_url=False)[0]
    index, *inner = details["loc"]
    loc = (first + index if isinstance(index, int) else index, *inner)
    context = {**details.get("ctx", {}), "message": details["msg"]}
    return InitErrorDetails(
        type=PydanticCustomError(details["type"], "{message}", context), loc=loc, input=details["input"]
    )


def _json(value: object) -> object:
    try:
        msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it cannot be written as JSON: {error}") from None
    return value


def unsupported(why: str) -> BeforeValidator:
    """Validator for unsupported parameters of OpenAI's API: only null is accepted. ``why`` is the error message."""

    def check(value: object) -> None:
        if value is not None:
            raise ValueError(why)

    return BeforeValidator(check)


NOTHING = WithJsonSchema(
    {"anyOf": [{"type": "null"}, {"const": ""}, {"type": "array", "maxItems": 0}, {"const": False}]}
)
"""JSON schema of values without content, for use with `only_empty`."""


def only_empty(why: str) -> BeforeValidator:
    """Validator for unsupported members: only null and empty values are accepted. ``why`` is the error message."""

    def check(value: object) -> None:
        if value not in (None, "", [], False):
            raise ValueError(why)

    return BeforeValidator(check)


_TYPES, _TEXTS = option_types(SamplingParams), field_docs(SamplingParams)


def sampled(name: str, le: float | None = None, max_length: int | None = None) -> Any:
    """Optional field of a body for a sampling parameter. Its range and its text are those of `SamplingParams`.

    Args:
        le: upper bound of numbers, where the parameter itself has none.
        max_length: maximum length of lists.
    """
    range_ = _TYPES[name].range
    least, above = (None, range_.low) if range_.above_low else (range_.low, None)
    most = range_.high if le is None else le
    return Field(default=None, description=_TEXTS.get(name), ge=least, gt=above, le=most, max_length=max_length)


JsonObject = Annotated[dict[str, Any], BeforeValidator(_json)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_SEQUENCE_TOKENS)]
Tokens = Annotated[list[TokenId], *in_pieces(MAX_VALUES)]
TextOr = Annotated[Annotated[str, Tag("[text]")] | Annotated[ListT, Tag("[list]")], Discriminator(text_or_list)]
"""A string or a list of the given type."""
TextOrTokens = TextOr[Tokens]
JsonSchema = Annotated[
    Annotated[JsonObject, Tag("[object]")] | Annotated[str, Tag("[text]")],
    Discriminator(text_or_object),
]


def _unknown(value: object) -> None:
    if value is not None:
        raise PydanticCustomError("extra_forbidden", "it is not supported")


class Body(BaseModel):
    """A JSON object, or null. Unknown members are rejected, numbers must be finite, and no value is converted."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, frozen=True
    )
    __pydantic_extra__: dict[str, Annotated[None, BeforeValidator(_unknown)]] = Field(init=False)


class ParameterBody(Body):
    """A JSON object of parameters. Integers may be written as 4.0, which JSON Schema also accepts as an integer."""

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not any(_is_whole(value) for value in given.values()):
            return given
        return {name: int(value) if _is_whole(value) else value for name, value in given.items()}


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


class SamplingBody(ParameterBody):
    """Sampling parameters that have the same names in all APIs."""

    temperature: float | None = sampled("temperature")
    top_p: float | None = sampled("top_p")
    top_k: int | None = sampled("top_k")
    min_p: float | None = sampled("min_p")
    seed: int | None = sampled("seed")


class Marked(Body):
    """A part of a conversation, to which clients may add metadata that is not for the model."""

    cache_control: JsonObject | None = None
    """Ignored: the prefix cache does not need it."""
    provider_specific_fields: JsonObject | None = None
    """Ignored: metadata of LiteLLM."""


FinishReasonName = Literal["stop", "length", "tool_calls", "function_call"]
"""Reason why a choice ended."""


@with_config(extra="forbid", use_attribute_docstrings=True)
class Shape(TypedDict):
    """A JSON object in an answer. Encoders write it, the type checker verifies it, and the OpenAPI document includes
    it.

    Every member is declared. The docstring of a member is its description.
    """
