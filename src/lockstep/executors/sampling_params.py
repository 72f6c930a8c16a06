"""Sampling parameters: what a caller may say about one generation, with checks and defaults, and what that resolves to.

`SamplingParams` is what the request intends: one field is one parameter, with its default, the check of any other value
and a sentence of documentation. `ResolvedSampling` is what the sampler obeys after the artifact's defaults and the
neutral values have filled the gaps. Depends on no model: a vocabulary size and a mapping of defaults come in.
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
"""Temperatures below it are greedy, as in vLLM: dividing by them would only overflow."""


@dataclass(frozen=True, slots=True)
class Strings:
    """Check of a field that is a list of strings: how many, and how long each may be."""

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
    """Check of a field that is a constraint of the right shape and size."""
    if not isinstance(value, Constraint):
        raise InvalidParameterError.of(name, value, "a Constraint, e.g. Constraint.json_schema({...})")
    value.validate()


class ResolvedSampling(msgspec.Struct, frozen=True):
    """Rules by which one sequence's tokens are chosen, every value known."""

    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), ascending ids."""
    logprobs: int | None = None
    """None: none. k: the sampled token's log-probability and the k most likely."""

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if the tokens so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of one generation; names and meanings are OpenAI's and vLLM's. None: the model's default."""

    temperature: Annotated[float | None, TEMPERATURE] = None
    """0: greedy. Default: the value in the artifact's generation_config.json, else 1."""
    top_k: Annotated[int | None, TOP_K] = None
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: Annotated[float | None, TOP_P] = None
    """Keep the fewest most likely tokens that hold this share of the probability; above 0, at most 1."""
    min_p: Annotated[float | None, MIN_P] = None
    """Keep tokens at least this many times as likely as the likeliest; 0 to 1."""
    repetition_penalty: Annotated[float | None, REPETITION_PENALTY] = None
    """Above 1 makes tokens of prompt and output less likely; 1: none."""
    presence_penalty: Annotated[float, PENALTY] = 0.0
    """Subtracted from the logit of every token of the output; -2 to 2."""
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    """Subtracted once per occurrence in the output; -2 to 2."""
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    """Token id to what is added to its logit; -100 to 100."""
    seed: Annotated[int | None, SEED] = None
    """None: the engine draws one at submission, so that a recording can repeat it."""
    max_tokens: Annotated[int | None, Range(1)] = None
    """None: as much as the context leaves."""
    min_tokens: Annotated[int, Range(0)] = 0
    """No end before this many tokens."""
    stop: Annotated[tuple[str, ...], Strings(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    include_stop_str_in_output: bool = False
    """The stop string that ends the text is its last part, and so is a stop token that is text."""
    skip_special_tokens: bool = True
    """False: special tokens are shown as they are written."""
    bad_words: Annotated[tuple[str, ...], Strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)] = ()
    """Words whose tokens never come in a row, with a space before them or without. A request whose constraint allows
    nothing else fails."""
    n: Annotated[int, Range(1, MAX_CHOICES)] = 1
    """Choices to generate."""
    logprobs: int | None = None
    """None: none. k: the sampled token's log-probability and the k most likely."""
    constraint: Annotated[Constraint | None, is_constraint] = None
    """What the text must be. Where it allows no more text the sequence ends, also before `min_tokens`."""

    def validate(self, vocab_size: int) -> None:
        """Check every field against its range and the vocabulary. What is at its default is right by definition.

        Raises:
            InvalidParameterError: names a field at fault in `param`, its value, and what would be right.
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
        """Fill the gaps: the request's value, else the artifact's default, else the neutral one. Call `validate` first.

        Args:
            defaults: any of temperature, top_k, top_p, min_p, repetition_penalty; other names are not ours to obey.

        Raises:
            InvalidParameterError: a default that is used lies outside its range; the message states where it came from.
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
        """With an artifact's defaults where the request sets nothing; their ranges are those of a request's values."""
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
                f"the model's default sampling parameters cannot be used: {error}; give {error.param} in the request",
                param=error.param,
            ) from None
        return replace(self, **given)


def check_logprobs(name: str, value: int | None, vocab_size: int) -> None:
    """Check how many of the most likely tokens are wanted beside one; InvalidParameterError names the parameter."""
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
    """A field, its default, and the check of any other value; fields that depend on the vocabulary have none."""
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
