"""Parameters are refused by name, and resolved as request, then artifact, then neutral."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import (
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    ResolvedSampling,
    SamplingParams,
)

VOCAB = 1_000

WRONG: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True, 10**400, 1e7)),
    *(("top_k", value) for value in (-2, 1.0, True, "4")),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, math.nan, "0.9")),
    *(("min_p", value) for value in (-0.01, 1.5, math.nan)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, math.inf, 1e-7, 1e7)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, None)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)),
    *(("logit_bias", value) for value in ({VOCAB: 1.0}, {-1: 1.0}, {"5": 1.0}, {5: 101.0}, {5: math.nan}, [5])),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
    *(("seed", value) for value in (-(2**63) - 1, 2**64, 1.0, False)),
    *(("max_tokens", value) for value in (0, -1, 2.5)),
    *(("min_tokens", value) for value in (-1, None)),
    *(("stop", value) for value in ("END", ("",), ("a" * (MAX_STOP_STRING_CHARS + 1),), (1,), ("a",) * 65)),
    *(("stop_token_ids", value) for value in ((VOCAB,), (-1,), (1.0,), 3, (1,) * (MAX_STOP_TOKEN_IDS + 1))),
    *(("ignore_eos", value) for value in (1, None)),
    *(("n", value) for value in (0, MAX_CHOICES + 1, None)),
    *(("logprobs", value) for value in (-1, MAX_LOGPROBS + 1, True)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:24])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=name) as caught:
        SamplingParams(**{name: value}).validate(VOCAB)
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


def test_the_ends_of_every_range_are_accepted() -> None:
    low: dict[str, Any] = {
        "temperature": 0, "top_k": -1, "top_p": 1e-6, "min_p": 0, "repetition_penalty": 1e-3, "presence_penalty": -2,
        "frequency_penalty": -2.0, "logit_bias": {0: -100}, "seed": -(2**63), "max_tokens": 1, "min_tokens": 0,
        "stop": ("a",), "stop_token_ids": (0,), "n": 1, "logprobs": 0,
    }  # fmt: skip
    high: dict[str, Any] = {
        "temperature": 100.0, "top_k": 10**9, "top_p": 1, "min_p": 1.0, "repetition_penalty": 9, "presence_penalty": 2,
        "frequency_penalty": 2.0, "logit_bias": {VOCAB - 1: 100}, "seed": 2**64 - 1, "max_tokens": 10**6,
        "min_tokens": 10**6, "stop": ("a" * MAX_STOP_STRING_CHARS,) * MAX_STOP_STRINGS,
        "stop_token_ids": (VOCAB - 1,) * MAX_STOP_TOKEN_IDS, "n": MAX_CHOICES, "logprobs": MAX_LOGPROBS,
        "ignore_eos": True,
    }  # fmt: skip
    for values in ({}, low, high):
        SamplingParams(**values).validate(VOCAB)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="max_tokens, which is 4") as caught:
        SamplingParams(max_tokens=4, min_tokens=5).validate(VOCAB)
    assert caught.value.param == "min_tokens"


def test_more_logprobs_than_tokens_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"0 to 3"):
        SamplingParams(logprobs=4).validate(3)


def test_the_request_comes_before_the_artifact_and_the_artifact_before_neutral() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "unknown": 3}
    assert SamplingParams().resolve({}) == ResolvedSampling()
    assert SamplingParams().resolve(defaults) == ResolvedSampling(0.6, 20, 0.95, 0.0, 1.1)
    asked = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.1, repetition_penalty=1.0)
    assert asked.resolve(defaults) == ResolvedSampling(0.0, 0, 1.0, 0.1, 1.0)


@pytest.mark.parametrize(
    "defaults", [{"temperature": math.nan}, {"top_p": 0.0}, {"top_k": 2.5}, {"min_p": 7}, {"repetition_penalty": -1}]
)
def test_a_faulty_default_is_named_unless_the_request_overrides_it(defaults: Mapping[str, float | int]) -> None:
    (name,) = defaults
    with pytest.raises(InvalidParameterError, match="model's default") as caught:
        SamplingParams().resolve(defaults)
    assert caught.value.param == name
    asked = SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1)
    assert asked.resolve(defaults).top_k == 5


def test_values_are_normalised() -> None:
    resolved = SamplingParams(temperature=1e-6, top_k=-1, logit_bias={7: 1, 3: -2.0, 5: 0}).resolve({"top_k": 4})
    assert resolved.is_greedy
    assert resolved.top_k == 0
    assert resolved.logit_bias == ((3, -2.0), (7, 1.0))
    assert SamplingParams().resolve({"top_k": 50.0}).top_k == 50
