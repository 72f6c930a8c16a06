"""The flags of `lockstep serve`, in groups. Names are vLLM's where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import Flag, OptionFlags, field_docs
from lockstep.cli.manifests import BackendName
from lockstep.core.policy import POSITIVE, SchedulerConfig
from lockstep.engine.options import DEFAULTS, EngineOptions
from lockstep.worker.flight.options import DEFAULT_MAX_MB
from lockstep.worker.health import MAX_SILENCE_S


@dataclass(frozen=True, slots=True)
class ListenFlags:
    """Where, and for whom."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 9000
    addr: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Both at once; goes before them.")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that opens the server; may be repeated, or hold several with commas between them."),
    ] = None
    admin_key: Annotated[
        list[str] | None,
        typer.Option(help="As --api-key, and the only ones that then open the cluster, its manifest and sessions."),
    ] = None
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Listen beyond loopback without a key.")
    ] = False
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name in requests' Host that is answered to; may be repeated.",
            show_default="loopback's where there is no key, else any",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin that browsers may call from, or *; may be repeated.")
    ] = None
    loopback_origins: Annotated[
        bool,
        typer.Option(
            "--loopback-origins/--no-loopback-origins",
            help="Whether pages that this machine serves itself may ask models from a browser.",
        ),
    ] = True


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """How much, and for how long."""

    max_body_bytes: Annotated[int, typer.Option(help="A larger request is refused.", min=1)] = 8 << 20
    max_header_bytes: Annotated[int, typer.Option(help="Larger headers are refused.", min=1024)] = 32 << 10
    max_concurrent_requests: Annotated[int, typer.Option(help="Requests answered at once.", min=1)] = 2_048
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests that a key may send.", min=1)] = None
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens that a key may use.", min=1)] = None
    queue_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request may wait for its first step.", min=0.001)
    ] = None
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that an answer may take.", min=0.001)] = None
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that requests have to finish after SIGTERM.", min=0.0)
    ] = 30.0


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """What is served, and how conversations are written for it."""

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in requests; repeated: aliases.", show_default="MODEL")
    ] = None
    chat_template: flags.ChatTemplate = None
    chat_template_kwargs: flags.ChatTemplateKwargs = None
    reasoning: flags.Reasoning = "auto"


@dataclass(frozen=True, slots=True)
class WorkerFlags:
    """Where the model runs, and how its load is checked."""

    cache_dir: flags.CacheDir = None
    probe: flags.Probe = True
    worker: Annotated[
        Literal["process", "thread"], typer.Option(help="Where the model runs: a supervised process of its own.")
    ] = "process"
    worker_timeout: Annotated[
        float,
        typer.Option(help="Seconds without a sign of life until a worker process is replaced; 0: never.", min=0.0),
    ] = MAX_SILENCE_S
    stream_interval_ms: Annotated[
        float, typer.Option(help="Tokens of a stream that come faster share a frame; 0: never.", min=0.0, max=1000.0)
    ] = 20.0


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Many models in the place of one."""

    manifest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A cluster of models, as YAML, instead of MODEL; SIGHUP brings it in again."),
    ] = None
    backend: BackendName = None
    watch: Annotated[bool, typer.Option("--watch", help="Bring the manifest in whenever its file changes.")] = False
    allow_any_source: Annotated[
        bool,
        typer.Option(
            "--allow-any-source",
            help="Let any key put manifests with any file or hub model; else only an admin key may.",
        ),
    ] = False
    allow_private_remotes: Annotated[
        bool,
        typer.Option(
            "--allow-private-remotes",
            help="Let any key put manifests with servers at private addresses; else only an admin key may.",
        ),
    ] = False


_SPECIAL: Mapping[str, Flag] = {
    "max_model_len": Flag(),
    "num_blocks": Flag(also=("num-gpu-blocks-override",), low=1),
    "kv_cache_memory_bytes": Flag(),
    "host_kv_memory_bytes": Flag("swap_space_bytes", low=0),
    "max_num_batched_tokens": Flag(low=1, shown="512, or what max-num-seqs needs"),
    "max_chunk_tokens": Flag(also=("long-prefill-token-threshold",), low=0, default=DEFAULTS["max_chunk_tokens"]),
    "chunking": Flag(also=("enable-chunked-prefill",), default=DEFAULTS["chunking"]),
    "order": Flag(also=("scheduling-policy",), shown="fcfs; with --manifest by the models' priority"),
}
"""Flags with further names, which are vLLM's, with defaults that depend on what else is said, or without a range."""


def _engine_flag(name: str) -> Flag:
    default = DEFAULTS.get(name)
    is_number = default is None or type(default) is int
    return _SPECIAL.get(name) or Flag(low=int(name in POSITIVE) if is_number else None, default=default)


ENGINE = OptionFlags(
    EngineOptions, {each.name: _engine_flag(each.name) for each in fields(EngineOptions)}, field_docs(SchedulerConfig)
)
"""A flag for every field: types, defaults and help are the fields' of EngineOptions and SchedulerConfig."""


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """What is said about it all."""

    log_format: Annotated[Literal["text", "json"], typer.Option(help="How log lines are written.")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="From which level on.")] = (
        "info"
    )
    disable_log_requests: Annotated[bool, typer.Option("--disable-log-requests", help="No line per request.")] = False
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Put prompts and answers into the line of a request.")
    ] = False
    log_user: Annotated[
        bool, typer.Option("--log-user", help="Name a request's user in its line, in the place of a hash.")
    ] = False
    metrics_prefix: Annotated[
        str, typer.Option(help="First part of metric names; vllm makes boards for vLLM work.")
    ] = "lockstep"
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send a span per request there (OTLP over HTTP).")
    ] = None
    responses_db: Annotated[
        str | None, typer.Option(metavar="FILE", help="Keep stored responses in this SQLite file.")
    ] = None
    enable_debug_endpoints: Annotated[
        bool, typer.Option("--enable-debug-endpoints", help="POST /reset_prefix_cache and GET /debug/check.")
    ] = False
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record every decision there, for lockstep replay; no text and no tokens."),
    ] = None
    trace_content: Annotated[
        bool, typer.Option("--trace-content", help="Record prompts and answers too, as token ids.")
    ] = False
    trace_max_mb: Annotated[
        int, typer.Option(metavar="MB", help="Recordings in DIR take as much; the oldest go first.", min=1)
    ] = DEFAULT_MAX_MB
