"""Samples: requests to send, drawn at random or read from JSON lines and traces. Their prompts are recipes."""

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
"""Maximum number of requests of a run."""


class TokenSegment(NamedTuple):
    """Tokens that are equal for equal keys. A shorter segment is a prefix of a longer one with the same key."""

    key: tuple[int, ...]
    num_tokens: int


Messages = tuple[Mapping[str, Any], ...]
Recipe = str | Messages | tuple[TokenSegment, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Request to send."""

    recipe: Recipe
    """Text or messages of the prompt, or segments to fill with words or tokens."""
    output_tokens: int
    at_s: float | None = None
    """Due time in a trace, in seconds after the start; None: the arrival process sets the time."""

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt's segments, without a template; None for a text or messages."""
        segments = [part for part in self.recipe if isinstance(part, TokenSegment)]
        return sum(segment.num_tokens for segment in segments) if segments else None


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths of random requests in tokens."""

    input_tokens: int
    output_tokens: int
    range_ratio: float = 0.0
    """Relative range of the uniform distribution of lengths; 0: all are equal."""
    prefix_tokens: int = 0
    """Length of a common prefix of all prompts, in addition to ``input_tokens``."""

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1 or self.prefix_tokens < 0:
            raise UsageError("--random-input-len and --random-output-len must be from 1, --random-prefix-len from 0")
        if not 0.0 <= self.range_ratio < 1.0:
            raise UsageError(f"--random-range-ratio is {self.range_ratio}; it must be at least 0 and below 1")


def random_samples(count: int, lengths: RandomLengths, seed: int) -> tuple[Sample, ...]:
    """``count`` samples of random length and content; equal seeds give equal samples."""
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
        name: name of the file, for errors.
        output_tokens: output length of lines without one.
        limit: maximum number of samples.

    Raises:
        UsageError: a line has another form; the message has its number.
    """
    samples: list[Sample] = []
    for number, line in enumerate(lines, 1):
        if len(samples) >= limit:
            break
        if line.strip():
            samples.append(_jsonl_sample(line, f"{name}:{number}", output_tokens))
    if not samples:
        raise UsageError(f'{name} has no requests; each line must be {{"prompt": "…"}} or {{"messages": […]}}')
    return tuple(samples)


def _jsonl_sample(line: str, place: str, output_tokens: int) -> Sample:
    fields = json_object(line, place)
    num_output = fields.get("output_tokens", output_tokens)
    if not isinstance(num_output, int) or isinstance(num_output, bool) or num_output < 1:
        raise UsageError(f"{place}: output_tokens is {num_output!r}; it must be a whole number from 1")
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str) and prompt:
        return Sample(prompt, num_output)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Sample(tuple(messages), num_output)
    raise UsageError(f'{place}: the line must have a "prompt" with text or a list of "messages"')


def json_object(line: str, place: str) -> dict[str, Any]:
    """Parse a line as a JSON object; UsageError, with the line's location ``place``, if it is not one."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{place}: not a JSON object")
    return value


log = logging.getLogger(__name__)


def trace_samples(path: Path, options: ReadOptions) -> tuple[Sample, ...]:
    """Samples of a trace's requests. Equal contents become equal segments; priorities and tenants are ignored.

    Raises:
        TraceError: the file cannot be read, or its requests have no times; the message has the line.
    """
    workload = read_workload(path, options)
    for note in workload.notes:
        log.warning("%s", note)
    if workload.unit is ArrivalUnit.TICKS:
        raise TraceError(f"{workload.name} has arrivals in ticks of a simulation; a server bench requires arrival_ms")
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
