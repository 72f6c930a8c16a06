"""The flags of `lockstep serve`, in groups. Names are vLLM's where it has one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import field_docs
from lockstep.cli.manifests import BackendName
from lockstep.core.policy import POSITIVE, SchedulerConfig
from lockstep.engine.sizing import DECIDED_AT_LOAD
from lockstep.worker.flight.options import DEFAULT_MAX_MB
from lockstep.worker.health import MAX_SILENCE_S

ENVIRONMENT_PREFIX = "LOCKSTEP"
"""``--max-model-len`` is also ``LOCKSTEP_MAX_MODEL_LEN``."""


class _Variables(list[str]):
    """The environment variables of a flag that has several names; messages show them as a text."""

    def __init__(self, *flags: str) -> None:
        super().__init__(f"{ENVIRONMENT_PREFIX}_{flag.lstrip('-').replace('-', '_').upper()}" for flag in flags)

    def __str__(self) -> str:
        return "' or '".join(self)


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
    """What is served, and how it is loaded."""

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in requests; repeated: aliases.", show_default="MODEL")
    ] = None
    chat_template: flags.ChatTemplate = None
    chat_template_kwargs: flags.ChatTemplateKwargs = None
    reasoning: flags.Reasoning = "auto"
    threads: flags.Threads = None
    device: flags.Device = "auto"
    kv_cache_dtype: flags.KvDtype = "f16"
    quantize: flags.Quantize = None
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


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """An engine's context and its KV pool."""

    max_model_len: flags.MaxModelLen = None
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV block.", min=1, show_default="what the executor has")
    ] = None
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-blocks",
            "--num-gpu-blocks-override",
            help="KV blocks, instead of what follows from memory.",
            min=1,
            envvar=_Variables("--num-blocks", "--num-gpu-blocks-override"),
        ),
    ] = None
    num_host_blocks: Annotated[
        int | None, typer.Option(help="Blocks for the KV of preempted sequences, instead of what is below.", min=0)
    ] = None
    kv_cache_memory_bytes: flags.KvBytes = None
    swap_space_bytes: Annotated[
        int | None,
        typer.Option(help="Memory for the KV of preempted sequences.", min=0, show_default="half of the KV pool"),
    ] = None


class SchedulerFlags:
    """A flag for every field of SchedulerConfig that is not decided at load; types, defaults and help are the fields'.

    Attributes:
        given: what was said, or is the default, by field.
    """

    def __init__(self, **values: Any) -> None:
        self.given = {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def flags() -> Iterator[inspect.Parameter]:
        hints, docs = get_type_hints(SchedulerConfig), field_docs(SchedulerConfig)
        for field in fields(SchedulerConfig):
            if field.name not in DECIDED_AT_LOAD:
                yield _scheduler_flag(field.name, hints[field.name], field.default, docs.get(field.name, ""))


_ALSO = {
    "max_chunk_tokens": ("long-prefill-token-threshold",),
    "chunking": ("enable-chunked-prefill",),
    "order": ("scheduling-policy",),
}
"""Further names of flags, which are vLLM's."""
_LEFT_OPEN = {
    "order": "fcfs; with --manifest by the models' priority",
    "max_num_batched_tokens": "512, or what max-num-seqs needs",
}
"""Defaults that depend on what else is said."""


def _scheduler_flag(name: str, hint: Any, default: Any, doc: str) -> inspect.Parameter:
    """A field as a parameter that is a flag.

    Args:
        hint: of the field.
        default: its own.
        doc: the sentences under it; ``None: field.`` at their end says whose value it then has.
    """
    words, _, instead = doc.partition("; None: ")
    is_flag = hint is bool
    names = [f"--{each}" for each in (name.replace("_", "-"), *_ALSO.get(name, ()))]
    is_open = name in _LEFT_OPEN or default is None
    shown = _LEFT_OPEN.get(name, f"as {instead.rstrip('.').replace('_', '-')}" if instead else True)
    option = typer.Option(
        *(f"{each}/--no-{each[2:]}" if is_flag else each for each in names),
        help=words if words.endswith(".") else f"{words}.",
        min=int(name in POSITIVE) if int in (hint, *get_args(hint)) else None,
        show_default=shown,
        envvar=_Variables(*names) if len(names) > 1 else None,  # else it is found by the flag's name
    )
    type_ = hint | None if is_open else hint
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if is_open else default,
        annotation=Annotated[type_, option],
    )


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
