"""Sampling parameters: defines, checks and resolves the parameters of one generation.

`SamplingParams` holds the request's values. Each field is one parameter, with its default, the check of other values
and its documentation, which request bodies use as well. `ResolvedSampling` holds the sampler's values, after the
artifact's defaults and neutral values have been filled in. The module depends on no model: the vocabulary size and the
defaults are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec.structs import fields, replace

from lockstep.artifacts.generation_config import MIN_P, REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_P
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.option_fields import OptionType, Range, option_types

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIASES = 1_024
MAX_LOGPROBS = 64
MAX_CHOICES = 128
PENALTY = Range(-2, 2)
SEED = Range(-(2**63), 2**64 - 1)

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM, since dividing by them would only overflow."""


@dataclass(frozen=True, slots=True)
class Strings:
    """Check of a field that is a list of strings: their maximum number and length."""

    count: int
    num_chars: int

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, (tuple, list)):
            raise InvalidParameterError.of(name, value, f"a list of at most {self.count} strings")
        if len(value) > self.count:
            raise InvalidParameterError(
                f"{name} has {len(value)} strings; it must have at most {self.count}", param=name
            )
        for index, text in enumerate(value):
            if not isinstance(text, str) or not 1 <= len(text) <= self.num_chars:
                right = f"a string of 1..{self.num_chars} characters"
                raise InvalidParameterError.of(f"{name}[{index}]", text, right, param=name)


def is_constraint(name: str, value: object) -> None:
    """Check of a field that is a constraint of valid type and size."""
    if not isinstance(value, Constraint):
        raise InvalidParameterError.of(name, value, "a Constraint, e.g. Constraint.json_schema({...})")
    value.validate()


class ResolvedSampling(msgspec.Struct, frozen=True):
    """Rules for choosing one sequence's tokens, with every value set."""

    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit), in ascending order of ids."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported, in addition to the sampled token's; None: no
    log-probabilities."""

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if previous tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of one generation, with the names and meanings of OpenAI and vLLM. None: the model's default."""

    temperature: Annotated[float | None, TEMPERATURE] = None
    """Sampling temperature; 0: greedy decoding. Default: the model's value, otherwise 1.

    The model's value is that of its generation_config.json."""
    top_k: Annotated[int | None, TOP_K] = None
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: Annotated[float | None, TOP_P] = None
    """Keep the smallest set of most likely tokens with this share of the probability; above 0, at most 1."""
    min_p: Annotated[float | None, MIN_P] = None
    """Keep tokens whose probability is at least this fraction of the most likely token's; 0 to 1."""
    repetition_penalty: Annotated[float | None, REPETITION_PENALTY] = None
    """A value above 1 makes tokens of prompt and output less likely; 1: no penalty."""
    presence_penalty: Annotated[float, PENALTY] = 0.0
    """Number subtracted from the logit of every token that the output has; -2 to 2."""
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    """Number subtracted once per occurrence in the output; -2 to 2."""
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Number added to the logit of each token id; -100 to 100."""
    seed: Annotated[int | None, SEED] = None
    """Seed of the random draws. The same seed and parameters produce the same answer, independent of other requests.

    None: the engine chooses one at submission, so that a recording can repeat it."""
    max_tokens: Annotated[int | None, Range(1)] = None
    """Maximum tokens of the output; None: as many as the context leaves."""
    min_tokens: Annotated[int, Range(0)] = 0
    """Minimum tokens of the output before it may end."""
    stop: Annotated[tuple[str, ...], Strings(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)] = ()
    """Strings that end the text and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, in addition to the model's own."""
    ignore_eos: bool = False
    """True to continue after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """True to include the stop string that ends the text, or a stop token that is text."""
    skip_special_tokens: bool = True
    """False to show special tokens in the text."""
    bad_words: Annotated[tuple[str, ...], Strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)] = ()
    """Words whose token sequences are not generated, with or without a leading space. If the request's constraint
    allows nothing else, it fails."""
    n: Annotated[int, Range(1, MAX_CHOICES)] = 1
    """Number of choices to generate."""
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are reported, in addition to the sampled token's; None: no
    log-probabilities."""
    constraint: Annotated[Constraint | None, is_constraint] = None
    """Constraint on the text. The sequence ends when no more text is allowed, even before `min_tokens`."""

    def validate(self, vocab_size: int) -> None:
        """Check every field against its range and the vocabulary. Default values are always valid.

        Raises:
            InvalidParameterError: a field is invalid; `param` names it, and the message states its value and the valid
                ones.
        """
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                check(name, value)
        check_logprobs("logprobs", self.logprobs, vocab_size)
        _check_biases(self.logit_bias, vocab_size)
        _check_stop_tokens(self.stop_token_ids, vocab_size)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError.of(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )

    def resolve(self, defaults: Mapping[str, float | int]) -> ResolvedSampling:
        """Fill in missing values: the request's, else the artifact's default, else the neutral one. Call `validate`
        first.

        Args:
            defaults: any of temperature, top_k, top_p, min_p, repetition_penalty; other names are ignored.

        Raises:
            InvalidParameterError: a default that is used is out of range; the message names its source.
        """
        chosen = self if not defaults else self._filled(defaults)
        temperature = 1.0 if chosen.temperature is None else float(chosen.temperature)
        return ResolvedSampling(
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=max(0, int(chosen.top_k or 0)),
            top_p=1.0 if chosen.top_p is None else float(chosen.top_p),
            min_p=float(chosen.min_p or 0.0),
            repetition_penalty=1.0 if chosen.repetition_penalty is None else float(chosen.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=tuple(sorted((int(token), float(bias)) for token, bias in self.logit_bias.items() if bias))
            if self.logit_bias
            else (),
            logprobs=self.logprobs,
        )

    def _filled(self, defaults: Mapping[str, float | int]) -> SamplingParams:
        """Fill in an artifact's defaults for values that the request does not set. Their ranges are those of a
        request's values."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given: dict[str, Any] = {
            name: defaults[name] for name in names if getattr(self, name) is None and name in defaults
        }
        top_k = given.get("top_k")
        if isinstance(top_k, float) and top_k.is_integer():
            given["top_k"] = int(top_k)
        try:
            SamplingParams(**given).validate(vocab_size=1)
        except InvalidParameterError as error:
            raise InvalidParameterError(
                f"the model's default sampling parameters cannot be used: {error}; set {error.param} in the request",
                param=error.param,
            ) from None
        return replace(self, **given)


def check_logprobs(name: str, value: int | None, vocab_size: int) -> None:
    """Check the number of most likely tokens to report.

    Raises:
        InvalidParameterError: it is out of range; `param` names the parameter.
    """
    if value is not None:
        _check(OptionType(int, Range(0, min(MAX_LOGPROBS, vocab_size))), name, value)


def _check_biases(value: object, vocab_size: int) -> None:
    if value == {}:
        return
    if not isinstance(value, Mapping):
        raise InvalidParameterError.of("logit_bias", value, "a map of token ids to numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise InvalidParameterError(
            f"logit_bias has {len(value)} entries; it must have at most {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    token_type = OptionType(int, Range(0, vocab_size - 1))
    for token, bias in value.items():
        _check(token_type, "logit_bias: a token id", token, "logit_bias")
        _check(_BIAS, f"logit_bias: the bias of token {token}", bias, "logit_bias")


def _check_stop_tokens(value: object, vocab_size: int) -> None:
    if value == ():
        return
    if not isinstance(value, (tuple, list)):
        raise InvalidParameterError.of("stop_token_ids", value, f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameterError(
            f"stop_token_ids has {len(value)} ids; it must have at most {MAX_STOP_TOKEN_IDS}", param="stop_token_ids"
        )
    token_type = OptionType(int, Range(0, vocab_size - 1))
    for index, token in enumerate(value):
        _check(token_type, f"stop_token_ids[{index}]", token, "stop_token_ids")


def _check(type_: OptionType, name: str, value: object, param: str | None = None) -> None:
    if not type_.fits(value):
        raise InvalidParameterError.of(name, value, type_.right(value), param=param)


def _declared_checks() -> Iterator[tuple[str, object, Callable[[str, object], None]]]:
    """Yield each field, its default, and the check of any other value. Fields that depend on the vocabulary have
    none."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    types = option_types(SamplingParams)
    for field in fields(SamplingParams):
        checks = [each for each in getattr(hints[field.name], "__metadata__", ()) if callable(each)]
        if checks:
            yield field.name, field.default, checks[0]
        elif types[field.name].kind in (bool, int, float) and field.name != "logprobs":
            yield field.name, field.default, partial(_check, types[field.name])


_BIAS = OptionType(float, Range(-100, 100))
_CHECKS = tuple(_declared_checks())
