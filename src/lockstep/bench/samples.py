"""Samples: requests to come, drawn at random or read from JSON lines and traces. Prompts are recipes, no text yet."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import TraceError, UsageError
from lockstep.replay.readers import ReadOptions, read_workload
from lockstep.replay.readers.fields import PS_PER_S
from lockstep.replay.workload import ArrivalUnit, WorkloadRequest

MAX_SAMPLES = 1_000_000
"""More requests than this are no benchmark but a mistake in a flag."""


class TokenSegment(NamedTuple):
    """A run of tokens that is the same wherever the key is the same; a shorter one is a prefix of a longer one."""

    key: tuple[int, ...]
    num_tokens: int


Messages = tuple[Mapping[str, Any], ...]
Recipe = str | Messages | tuple[TokenSegment, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A request to come."""

    recipe: Recipe
    """Text or messages as they are, or segments to be filled with words or tokens."""
    output_tokens: int
    at_s: float | None = None
    """Seconds after the start at which a trace has it; None: the arrival process sets the time."""

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt as far as the recipe has them, without any template."""
        segments = [part for part in self.recipe if isinstance(part, TokenSegment)]
        return sum(segment.num_tokens for segment in segments) if segments else None


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """The shape of random requests, in tokens."""

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    """Lengths are uniform within this part of themselves; 0: all equal."""
    prefix_tokens: int = 0
    """Shared by all prompts, in front of ``input_tokens``."""

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1 or self.prefix_tokens < 0:
            raise UsageError("--random-input-len and --random-output-len begin at 1, --random-prefix-len at 0")
        if not 0.0 <= self.range_ratio < 1.0:
            raise UsageError(f"--random-range-ratio is {self.range_ratio}; it must be at least 0 and below 1")


def random_samples(count: int, lengths: RandomLengths, seed: int) -> tuple[Sample, ...]:
    """``count`` samples of random length and content, the same for the same seed."""
    rng = np.random.default_rng([seed, 1])
    inputs = _lengths(rng, lengths.input_tokens, lengths.range_ratio, count)
    outputs = _lengths(rng, lengths.output_tokens, lengths.range_ratio, count)
    prefix = (TokenSegment((0,), lengths.prefix_tokens),) if lengths.prefix_tokens else ()
    return tuple(
        Sample((*prefix, TokenSegment((1, index), num_input)), num_output)
        for index, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True))
    )


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, math.floor(mean * (1.0 - ratio))), math.ceil(mean * (1.0 + ratio))
    return [int(length) for length in rng.integers(low, high + 1, count)]


def jsonl_samples(lines: Iterable[str], name: str, output_tokens: int, limit: int) -> tuple[Sample, ...]:
    """Samples from lines with ``prompt`` (text) or ``messages`` and, optionally, ``output_tokens``.

    Args:
        name: of the file, for errors.
        output_tokens: for lines that do not say.
        limit: samples at most.

    Raises:
        UsageError: a line is none of these; the message has its number.
    """
    samples: list[Sample] = []
    for number, line in enumerate(lines, 1):
        if len(samples) >= limit:
            break
        if line.strip():
            samples.append(_jsonl_sample(line, f"{name}:{number}", output_tokens))
    if not samples:
        raise UsageError(f'{name} holds no request; each line is {{"prompt": "…"}} or {{"messages": […]}}')
    return tuple(samples)


def _jsonl_sample(line: str, place: str, output_tokens: int) -> Sample:
    fields = json_object(line, place)
    wanted = fields.get("output_tokens", output_tokens)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise UsageError(f"{place}: output_tokens is {wanted!r}; it must be a whole number from 1")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str) and prompt:
        return Sample(prompt, wanted)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Sample(tuple(messages), wanted)
    raise UsageError(f'{place}: neither a "prompt" with text nor a "messages" list')


def json_object(line: str, place: str) -> dict[str, Any]:
    """A line as a JSON object; UsageError names the place when it is none."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{place}: not a JSON object")
    return value


log = logging.getLogger(__name__)


def trace_samples(path: Path, options: ReadOptions) -> tuple[Sample, ...]:
    """The requests of a trace; equal contents are equal segments, and priorities and tenants stay behind.

    Raises:
        TraceError: the file cannot be read, or its requests have no times; the message names the line.
    """
    workload = read_workload(path, options)
    for note in workload.notes:
        log.warning("%s", note)
    if workload.unit is ArrivalUnit.TICKS:
        raise TraceError(f"{workload.name} counts arrivals in ticks of a simulation; a server needs arrival_ms")
    return tuple([_sample(request, index, workload.content_size) for index, request in enumerate(workload.requests)])


def _sample(request: WorkloadRequest, index: int, content_size: int) -> Sample:
    left = request.num_prompt_tokens
    segments = []
    for content in request.contents:
        segments.append(TokenSegment((2, content), min(left, content_size)))
        left -= content_size
    if left > 0:
        segments.append(TokenSegment((1, index), left))
    return Sample(tuple(segments), request.num_output_tokens, request.arrival / PS_PER_S)
