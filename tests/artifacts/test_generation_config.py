"""Defaults that a file carries: those present, in range, under one set of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.artifacts.generation_config import from_generation_config, from_gguf
from lockstep.errors import CorruptArtifactError

PATH = Path("generation_config.json")
FULL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}


def test_present_values_are_read_and_others_left_alone() -> None:
    assert from_generation_config({**FULL, "max_length": 5, "do_sample": True}, PATH) == FULL
    assert from_generation_config({"max_length": 5}, PATH) == {}
    assert from_generation_config({"top_k": 20.0, "temperature": 1}, PATH) == {"top_k": 20, "temperature": 1.0}


def test_do_sample_is_not_consulted() -> None:
    """As vLLM: what a file sets it means, and greedy is a request's word."""
    assert from_generation_config({"do_sample": False, "temperature": 0.6}, PATH) == {"temperature": 0.6}


def test_gguf_keys_have_the_same_meaning() -> None:
    keys = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
    metadata = {f"general.sampling.{key}": value for key, value in zip(keys, FULL.values(), strict=True)}
    assert from_gguf(metadata, PATH) == FULL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("temperature", "0.6"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(CorruptArtifactError, match=f"sampling default '{name}' is .* it must be"):
        from_generation_config({name: value}, PATH)
