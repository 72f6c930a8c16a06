"""Flags of `lockstep serve`, in groups. Names are vLLM's where it has one.

Flags of vLLM that mean nothing here are accepted with a word where harmless, else refused: the message
states what happens instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import SWITCH, Flag, OptionFlags
from lockstep.cli.manifests import BackendName
from lockstep.engine.options import EngineOptions
from lockstep.errors import UsageError
from lockstep.option_fields import Range
from lockstep.server.options import ServerOptions
from lockstep.worker.flight.options import DEFAULT_MAX_MB
from lockstep.worker.health import MAX_SILENCE_S


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """Addresses to listen on, keys and origins that are let in."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65535)] = 9000
    """Port to listen on; 0: any free one."""
    addr: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Both at once; goes before them."""
    api_key: list[str] | None = None
    """A key that opens the server; may be repeated, or hold several with commas between them."""
    admin_key: list[str] | None = None
    """As --api-key, and the only ones that then open the cluster, its manifest and sessions."""
    prefix_cache_per_key: Annotated[bool, SWITCH] = False
    """Let each key find only its own requests in the prefix cache, so that cached_tokens shows nothing of others."""
    allow_unauthenticated: Annotated[bool, SWITCH] = False
    """Listen beyond loopback without a key."""
    allowed_host: list[str] | None = None
    """A name in requests' Host that is answered to; may be repeated; None: loopback's where there is no key, else
    any."""
    cors_origin: list[str] | None = None
    """An origin that browsers may call from, or *; may be repeated."""
    loopback_origins: bool = True
    """Whether pages that this machine serves itself may ask models from a browser."""


LIMITS = OptionFlags(
    ServerOptions,
    {
        "max_body_bytes": Flag(),
        "max_header_bytes": Flag(),
        "max_concurrent_requests": Flag(),
        "requests_per_minute": Flag(),
        "tokens_per_minute": Flag(),
        "max_batch_requests": Flag(),
        "queue_timeout_s": Flag("queue_timeout"),
        "request_timeout_s": Flag("request_timeout"),
        "shutdown_timeout_s": Flag("shutdown_timeout"),
    },
)
"""Limits of requests, and deadlines."""


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Names of the model, and its chat template."""

    served_model_name: Annotated[list[str] | None, Flag(shown="MODEL")] = None
    """Name in requests; repeated: aliases."""
    chat_template: flags.ChatTemplate = None
    chat_template_kwargs: flags.ChatTemplateKwargs = None
    reasoning: flags.Reasoning = "auto"
    task: flags.TaskFlag = None


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """The device worker, and the checks of a load."""

    cache_dir: flags.CacheDir = None
    worker: Literal["process", "thread"] = "process"
    """Where the model runs: a supervised process of its own."""
    worker_timeout: Annotated[float, Range(0)] = MAX_SILENCE_S
    """Seconds without a message until a worker process is replaced; 0: never."""
    stream_interval_ms: Annotated[float, Range(0, 1000)] = 20.0
    """Tokens of a stream that come faster share a frame; 0: never."""
    host_kv_mb: Annotated[int, Flag(metavar="MB"), Range(0)] = 1024
    """Host memory for the KV of sessions that left the device; a manifest's host_kv_budget goes before it."""
    kv_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Keep the KV of sessions here, too, so that it survives a restart."""
    kv_dir_mb: Annotated[int, Flag(metavar="MB"), Range(1)] = 10_240
    """What the KV there may take; a manifest's disk_kv_budget goes before it."""
    kv_check: Annotated[float, Flag(metavar="SHARE"), Range(0, 1)] = 0.0
    """Share of the sessions that come back whose first block is computed again when idle, and compared bit by bit."""


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Many models in the place of one."""

    manifest: Annotated[Path | None, Flag(metavar="FILE")] = None
    """A cluster of models, as YAML, instead of MODEL; SIGHUP brings it in again."""
    backend: BackendName = None
    watch: Annotated[bool, SWITCH] = False
    """Bring the manifest in whenever its file changes."""
    allow_any_source: Annotated[bool, SWITCH] = False
    """Let any key put manifests with any file or hub model; else only an admin key may."""
    allow_private_remotes: Annotated[bool, SWITCH] = False
    """Let any key put manifests with servers at private addresses; else only an admin key may."""


_VLLM_NAMES: Mapping[str, Flag] = {
    "num_blocks": Flag(also=("num-gpu-blocks-override",)),
    "host_kv_memory_bytes": Flag("swap_space_bytes"),
    "max_chunk_tokens": Flag(also=("long-prefill-token-threshold",)),
    "chunking": Flag(also=("enable-chunked-prefill",)),
    "order": Flag(also=("scheduling-policy",)),
}
ENGINE = OptionFlags(EngineOptions, {each.name: _VLLM_NAMES.get(each.name, Flag()) for each in fields(EngineOptions)})
"""A flag for every field: types, ranges, defaults and help are those of EngineOptions."""


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Logs, metrics and traces."""

    log_format: Literal["text", "json"] = "text"
    """How log lines are written."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """From which level on."""
    disable_log_requests: Annotated[bool, SWITCH] = False
    """No line per request."""
    log_prompts: Annotated[bool, SWITCH] = False
    """Put prompts and answers into the line of a request."""
    log_user: Annotated[bool, SWITCH] = False
    """Name a request's user in its line, in the place of a hash."""
    metrics_prefix: str = "lockstep"
    """First part of metric names; vllm makes boards for vLLM work."""
    otlp_traces_endpoint: Annotated[str | None, Flag(metavar="URL")] = None
    """Send a span per request there (OTLP over HTTP)."""
    responses_db: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Keep stored responses in this SQLite file."""
    batch_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Keep uploaded files and batches there, over restarts; None: a temporary folder."""
    enable_debug_endpoints: Annotated[bool, SWITCH] = False
    """POST /reset_prefix_cache and GET /debug/check."""


@dataclass(frozen=True, slots=True)
class RecordFlags:
    """Recordings of decisions, and events of caches."""

    trace: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Record every decision there, for lockstep replay; no text and no tokens."""
    trace_content: Annotated[bool, SWITCH] = False
    """Record prompts and answers too, as token ids."""
    trace_key: Annotated[Path | None, Flag(metavar="FILE")] = None
    """A secret of the recording; digests under equal ones compare."""
    trace_max_mb: Annotated[int, Flag(metavar="MB"), Range(1)] = DEFAULT_MAX_MB
    """Recordings in DIR take as much; the oldest go first."""
    kv_events: Annotated[str | None, Flag(metavar="ENDPOINT")] = None
    """Publish what prefix caches hold there over ZeroMQ, as vLLM does, with token ids: tcp://127.0.0.1:5557."""
    kv_events_replay: Annotated[str | None, Flag(metavar="ENDPOINT")] = None
    """Answer there what was missed of them."""
    kv_events_topic: Annotated[str, Flag(metavar="TEXT")] = "{model}"
    """Topic of KV events; {model} is the name of the model's artifact."""
    kv_events_allow_remote: Annotated[bool, SWITCH] = False
    """KV events may be published beyond loopback."""


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


_ONE_DEVICE = "{flag} is {value}; a model runs on one device here, so it can only be 1"
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((None, 1), _ONE_DEVICE),
    "pipeline_parallel_size": ((None, 1), _ONE_DEVICE),
    "data_parallel_size": ((None, 1), _ONE_DEVICE),
    "dtype": (
        (None, "auto", "float", "float32"),
        "{flag} is {value!r}; activations are float32 here: leave it out, or look at --quantize",
    ),
    "quantization": (
        (None,),
        "the model's files determine {flag}; --quantize int8 or int4 rounds float weights at load",
    ),
    "tokenizer": ((None,), "{flag} is the one in the model's files; give a MODEL that has the right one"),
    "load_format": ((None, "auto"), "{flag} is {value!r}; the model's files determine it: leave it out"),
    "swap_space": ((None,), "{flag} is called --swap-space-bytes here, and counts bytes"),
    "seed": ((None,), "{flag} belongs to requests here: the same seed in a request gives the same answer"),
}
"""By field: values that need nothing unsupported, and the message for any other."""
_HARMLESS: Mapping[str, str] = {
    "gpu_memory_utilization": "no GPU memory is reserved; --kv-cache-memory-bytes sizes the KV pool",
    "trust_remote_code": "no code of a model is ever run",
    "enforce_eager": "there are no CUDA graphs",
    "enable_auto_tool_choice": "tools are always on",
    "tool_call_parser": "the chat template determines the format",
    "reasoning_parser": "tags are in the chat template; see --reasoning",
    "disable_log_stats": "figures are in /metrics only",
    "enable_log_requests": "requests are logged unless --disable-log-requests",
    "enable_prompt_tokens_details": "they are always there",
    "enable_server_load_tracking": "/load always counts",
}
"""By field: what holds instead, or anyway."""


def answers_to(given: ForeignFlags) -> list[str]:
    """Warnings about the flags that were given.

    Raises:
        UsageError: one requests what is not supported.
    """
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    for name, (allowed, refusal) in _REFUSED.items():
        if values[name] not in allowed:
            raise UsageError(refusal.format(flag=_flag_of(name), value=values[name]))
    given_names = [name for name in _HARMLESS if values[name] is not None and values[name] is not False]
    return [f"{_flag_of(name)} has no effect: {_HARMLESS[name]}" for name in given_names]


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
