"""Flags of `lockstep serve`, in groups. A flag that vLLM has, too, has vLLM's name.

Flags of vLLM that have no effect here are accepted with a warning if that is harmless, and otherwise rejected. The
message states the behaviour of Lockstep.
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
from lockstep.worker.flight.options import DEFAULT_MAX_MIB
from lockstep.worker.health import MAX_SILENCE_S


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """Addresses to listen on, and permitted keys and origins."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65535)] = 9000
    """Port to listen on; 0: any free port."""
    addr: Annotated[str | None, Flag(metavar="HOST:PORT")] = None
    """Address and port in one value; overrides --host and --port."""
    api_key: list[str] | None = None
    """API key that requests must have; may be repeated, or contain several keys separated by commas."""
    admin_key: list[str] | None = None
    """API key with access to cluster, manifest and sessions, which other keys then no longer have; may be repeated."""
    prefix_cache_per_key: Annotated[bool, SWITCH] = False
    """Separate the prefix caches of API keys, so that cached_tokens reveals nothing about requests of other keys."""
    allow_unauthenticated: Annotated[bool, SWITCH] = False
    """Allow addresses beyond loopback without an API key."""
    allowed_host: list[str] | None = None
    """Accepted Host header of requests; may be repeated; None: loopback names if no key is set, else any."""
    cors_origin: list[str] | None = None
    """Origin from which browsers may call the server, or *; may be repeated."""
    loopback_origins: bool = True
    """Let web pages of loopback origins call models from a browser."""


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
"""Flags for limits and deadlines of requests."""


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Names of the model, and its chat template."""

    served_model_name: Annotated[list[str] | None, Flag(shown="MODEL")] = None
    """Name of the model in requests; may be repeated for aliases."""
    chat_template: flags.ChatTemplate = None
    chat_template_kwargs: flags.ChatTemplateKwargs = None
    reasoning: flags.Reasoning = "auto"
    task: flags.TaskFlag = None


@dataclass(frozen=True, slots=True)
class AdapterFlags:
    """LoRA adapters that are served beside the model."""

    lora_modules: Annotated[list[str] | None, Flag(metavar="NAME=PATH")] = None
    """LoRA adapter of the model, served under this name; may be repeated. Implies --enable-lora."""


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """The device worker, and its KV of sessions in host memory and on disk."""

    cache_dir: flags.CacheDir = None
    worker: Literal["process", "thread"] = "process"
    """Run models in a supervised process or in a thread of the server."""
    worker_timeout: Annotated[float, Range(0)] = MAX_SILENCE_S
    """Seconds without a message after which a worker process is replaced; 0: never."""
    stream_interval_ms: Annotated[float, Range(0, 1000)] = 20.0
    """Minimum milliseconds between chunks of a stream; tokens within them share a chunk; 0: no minimum."""
    host_kv_mb: Annotated[int, Flag(metavar="MiB"), Range(0)] = 1024
    """Host memory in MiB for the KV of sessions that left the device; a manifest's host_kv_budget overrides it."""
    kv_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Directory that stores the KV of sessions, so that it survives a restart of the server."""
    kv_dir_mb: Annotated[int, Flag(metavar="MiB"), Range(1)] = 10_240
    """Maximum size of the KV in --kv-dir in MiB; a manifest's disk_kv_budget overrides it."""
    kv_check: Annotated[float, Flag(metavar="SHARE"), Range(0, 1)] = 0.0
    """Share of restored sessions whose first block is computed again in idle time and compared bit by bit."""


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """A cluster of models instead of one model."""

    manifest: Annotated[Path | None, Flag(metavar="FILE")] = None
    """YAML file that declares a cluster of models, instead of MODEL; SIGHUP reloads it."""
    backend: BackendName = None
    watch: Annotated[bool, SWITCH] = False
    """Reload the manifest whenever its file changes."""
    allow_any_source: Annotated[bool, SWITCH] = False
    """Let manifests of any key name any file or hub model; otherwise this requires an admin key."""
    allow_private_remotes: Annotated[bool, SWITCH] = False
    """Let manifests of any key name servers at private addresses; otherwise this requires an admin key."""


_VLLM_NAMES: Mapping[str, Flag] = {
    "num_blocks": Flag(also=("num-gpu-blocks-override",)),
    "host_kv_memory_bytes": Flag("swap_space_bytes"),
    "max_chunk_tokens": Flag(also=("long-prefill-token-threshold",)),
    "chunking": Flag(also=("enable-chunked-prefill",)),
    "order": Flag(also=("scheduling-policy",)),
}
ENGINE = OptionFlags(EngineOptions, {each.name: _VLLM_NAMES.get(each.name, Flag()) for each in fields(EngineOptions)})
"""Flags for all fields of EngineOptions, with its types, ranges, defaults and help."""


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """Logs, metrics and traces."""

    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines."""
    disable_log_requests: Annotated[bool, SWITCH] = False
    """Log no line per request."""
    log_prompts: Annotated[bool, SWITCH] = False
    """Include prompts and answers in the log line of a request."""
    log_user: Annotated[bool, SWITCH] = False
    """Include the user of a request in its log line, instead of a hash."""
    metrics_prefix: str = "lockstep"
    """Prefix of metric names; with vllm, dashboards for vLLM work."""
    otlp_traces_endpoint: Annotated[str | None, Flag(metavar="URL")] = None
    """Endpoint that receives a span per request (OTLP over HTTP)."""
    responses_db: Annotated[Path | None, Flag(metavar="FILE")] = None
    """SQLite file for stored responses; None: in memory."""
    batch_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Directory for uploaded files and batches, which then survive a restart; None: a temporary folder."""
    enable_debug_endpoints: Annotated[bool, SWITCH] = False
    """Enable POST /reset_prefix_cache and GET /debug/check."""


@dataclass(frozen=True, slots=True)
class RecordFlags:
    """Recordings of decisions, and events of caches."""

    trace: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Directory for recordings of all scheduler decisions, for lockstep replay; without text and tokens."""
    trace_content: Annotated[bool, SWITCH] = False
    """Also record prompts and answers, as token ids."""
    trace_key: Annotated[Path | None, Flag(metavar="FILE")] = None
    """File with the secret key of the recording's digests; digests with equal keys are comparable."""
    trace_max_mb: Annotated[int, Flag(metavar="MiB"), Range(1)] = DEFAULT_MAX_MIB
    """Maximum size of the recordings in --trace in MiB; the oldest are deleted first."""
    kv_events: Annotated[str | None, Flag(metavar="ENDPOINT")] = None
    """ZeroMQ endpoint for events of the prefix caches in vLLM's format, with token ids, e.g. tcp://127.0.0.1:5557."""
    kv_events_replay: Annotated[str | None, Flag(metavar="ENDPOINT")] = None
    """ZeroMQ endpoint that sends missed KV events again on request."""
    kv_events_topic: Annotated[str, Flag(metavar="TEXT")] = "{model}"
    """Topic of KV events; {model} is the name of the model's artifact."""
    kv_events_allow_remote: Annotated[bool, SWITCH] = False
    """Allow endpoints of KV events beyond loopback."""


_Text = Annotated[str | None, typer.Option(hidden=True)]
_Number = Annotated[float | None, typer.Option(hidden=True)]
_Count = Annotated[int | None, typer.Option(hidden=True)]


@dataclass(frozen=True, slots=True)
class ForeignFlags:
    """Flags of vLLM that Lockstep does not have. They are hidden in the help; see `foreign_flag_warnings`."""

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
    max_cpu_loras: _Count = None
    lora_dtype: _Text = None
    fully_sharded_loras: Annotated[bool, typer.Option("--fully-sharded-loras", hidden=True)] = False


_ONE_DEVICE = "{flag} is {value}; it must be 1, because a model runs on one device"
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tensor_parallel_size": ((None, 1), _ONE_DEVICE),
    "pipeline_parallel_size": ((None, 1), _ONE_DEVICE),
    "data_parallel_size": ((None, 1), _ONE_DEVICE),
    "dtype": (
        (None, "auto", "float", "float32"),
        "{flag} is {value!r}; activations are float32: remove it, or see --quantize",
    ),
    "quantization": (
        (None,),
        "{flag} is not supported: the model's files determine it; --quantize int8 or int4 rounds float weights at load",
    ),
    "tokenizer": ((None,), "{flag} is not supported: the tokenizer is that of the model's files"),
    "load_format": ((None, "auto"), "{flag} is {value!r}; the model's files determine the format: remove it"),
    "swap_space": ((None,), "{flag} is not supported; use --swap-space-bytes, in bytes"),
    "seed": ((None,), "{flag} is not supported; set the seed in each request"),
}
"""Supported values by field, and the error for any other value."""
_HARMLESS: Mapping[str, str] = {
    "gpu_memory_utilization": "no GPU memory is reserved; --kv-cache-memory-bytes sizes the KV pool",
    "trust_remote_code": "code of models is never run",
    "enforce_eager": "there are no CUDA graphs",
    "enable_auto_tool_choice": "tools are always enabled",
    "tool_call_parser": "the chat template determines the format",
    "reasoning_parser": "the chat template determines the tags; see --reasoning",
    "disable_log_stats": "stats are in /metrics and not in the log",
    "enable_log_requests": "requests are logged unless --disable-log-requests is given",
    "enable_prompt_tokens_details": "answers always have these details",
    "enable_server_load_tracking": "/load always reports the load",
    "max_cpu_loras": "adapters beyond --max-loras stay in their files until a request needs them",
    "lora_dtype": "adapters keep the 16 bits of their files, and F32 is rounded to F16",
    "fully_sharded_loras": "a model runs on one device",
}
"""By field: the reason why the flag has no effect."""


def foreign_flag_warnings(given: ForeignFlags) -> list[str]:
    """Warnings about given flags that have no effect.

    Raises:
        UsageError: a flag requires an unsupported feature.
    """
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    for name, (allowed, refusal) in _REFUSED.items():
        if values[name] not in allowed:
            raise UsageError(refusal.format(flag=_flag_of(name), value=values[name]))
    given_names = [name for name in _HARMLESS if values[name] is not None and values[name] is not False]
    return [f"{_flag_of(name)} has no effect: {_HARMLESS[name]}" for name in given_names]


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
