"""Flags of vLLM that people paste and that mean nothing here: accepted with a word where harmless, else refused.

None is ignored in silence: who asked for something is told what happens instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from lockstep.errors import UsageError

_Text = Annotated[str | None, typer.Option(hidden=True)]
_Number = Annotated[float | None, typer.Option(hidden=True)]
_Count = Annotated[int | None, typer.Option(hidden=True)]


@dataclass(frozen=True, slots=True)
class ForeignFlags:
    """Hidden in the help; see `answers_to`."""

    dtype: _Text = None
    tokenizer: _Text = None
    load_format: _Text = None
    tensor_parallel_size: Annotated[int | None, typer.Option("--tensor-parallel-size", "-tp", hidden=True)] = None
    pipeline_parallel_size: Annotated[int | None, typer.Option("--pipeline-parallel-size", "-pp", hidden=True)] = None
    data_parallel_size: Annotated[int | None, typer.Option("--data-parallel-size", "-dp", hidden=True)] = None
    gpu_memory_utilization: _Number = None
    swap_space: _Number = None
    seed: _Count = None
    quantization: Annotated[str | None, typer.Option("--quantization", "-q", hidden=True)] = None
    tool_call_parser: _Text = None
    reasoning_parser: _Text = None
    enable_auto_tool_choice: Annotated[bool, typer.Option("--enable-auto-tool-choice", hidden=True)] = False
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", hidden=True)] = False
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", hidden=True)] = False
    disable_log_stats: Annotated[bool, typer.Option("--disable-log-stats", hidden=True)] = False
    enable_log_requests: Annotated[bool, typer.Option("--enable-log-requests", hidden=True)] = False
    enable_prompt_tokens_details: Annotated[bool, typer.Option("--enable-prompt-tokens-details", hidden=True)] = False
    enable_server_load_tracking: Annotated[bool, typer.Option("--enable-server-load-tracking", hidden=True)] = False


def answers_to(given: ForeignFlags) -> list[str]:
    """What to say about the flags that were given.

    Raises:
        UsageError: one asks for what cannot be had, so the server would not be the one that was meant.
    """
    for refusal in _refusals(given):
        raise UsageError(refusal)
    return [f"{flag} has no effect: {instead}" for flag, was_given, instead in _harmless(given) if was_given]


def _refusals(given: ForeignFlags) -> Iterator[str]:
    for flag, size in (
        ("--tensor-parallel-size", given.tensor_parallel_size),
        ("--pipeline-parallel-size", given.pipeline_parallel_size),
        ("--data-parallel-size", given.data_parallel_size),
    ):
        if size not in (None, 1):
            yield f"{flag} is {size}; a model runs on one device here, so it can only be 1"
    if given.dtype not in (None, "auto", "float", "float32"):
        yield f"--dtype is {given.dtype!r}; activations are float32 here: leave it out, or look at --quantize"
    if given.quantization is not None:
        yield "--quantization is told by the model's files; --quantize int8 or int4 rounds float weights at load"
    if given.tokenizer is not None:
        yield "--tokenizer is the one in the model's files; give a MODEL that has the right one"
    if given.load_format not in (None, "auto"):
        yield f"--load-format is {given.load_format!r}; it is told by the model's files: leave it out"
    if given.swap_space is not None:
        yield "--swap-space is called --swap-space-bytes here, and counts bytes"
    if given.seed is not None:
        yield "--seed belongs to requests here: the same seed in a request gives the same answer"


def _harmless(given: ForeignFlags) -> Iterator[tuple[str, bool, str]]:
    memory = "no GPU memory is reserved; --kv-cache-memory-bytes sizes the KV pool"
    yield "--gpu-memory-utilization", given.gpu_memory_utilization is not None, memory
    yield "--trust-remote-code", given.trust_remote_code, "no code of a model is ever run"
    yield "--enforce-eager", given.enforce_eager, "there are no CUDA graphs"
    yield "--enable-auto-tool-choice", given.enable_auto_tool_choice, "tools are always on"
    yield "--tool-call-parser", given.tool_call_parser is not None, "the format is told by the chat template"
    yield (
        "--reasoning-parser",
        given.reasoning_parser is not None,
        "tags are in the chat template; see --reasoning",
    )
    yield "--disable-log-stats", given.disable_log_stats, "figures are in /metrics only"
    yield "--enable-log-requests", given.enable_log_requests, "requests are logged unless --disable-log-requests"
    yield "--enable-prompt-tokens-details", given.enable_prompt_tokens_details, "they are always there"
    yield "--enable-server-load-tracking", given.enable_server_load_tracking, "/load always counts"
