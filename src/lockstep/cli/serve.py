"""`lockstep serve MODEL`, or `--manifest FILE`: flags, environment and a file become option values; the server does
the rest."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options as flags
from lockstep.cli.config_file import use_config
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.manifests import backend_of, read_manifest
from lockstep.cli.progress import ServingProgress
from lockstep.cli.serve_flags import (
    ENGINE,
    LIMITS,
    ClusterFlags,
    ForeignFlags,
    ListenFlags,
    ModelFlags,
    RecordFlags,
    ReportFlags,
    WorkerFlags,
    answers_to,
)
from lockstep.core.policy import Order
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import UsageError
from lockstep.executors.options import ExecutorOptions
from lockstep.server.options import ServerOptions

if TYPE_CHECKING:
    from lockstep.cluster.cluster import Cluster
    from lockstep.cluster.resolve import LoadProgress
    from lockstep.engine.kv_tiers import KVStoreOptions
    from lockstep.server.reload import ManifestReload
    from lockstep.worker.flight.options import TraceOptions
    from lockstep.worker.kv_events import KVEventsOptions
    from lockstep.worker.link import WorkerOptions

log = logging.getLogger(__name__)

DEMO_NAME = "pocket"
"""Name of the demo model where no model is named."""
NO_MODEL = (
    "no MODEL is given: pocket answers, the embedded demo model; "
    "`lockstep serve PATH`, hf://org/name or --manifest FILE serves another"
)
METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Flags of `lockstep serve`."""

    model: Annotated[
        str | None, typer.Argument(help=flags.MODEL_HELP, show_default="pocket://, or none with --manifest")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML with flags as keys; flags and LOCKSTEP_* variables go before it.",
            callback=use_config,
            is_eager=True,
        ),
    ] = None
    debug: flags.Debug = False
    listen: ListenFlags = field(default_factory=ListenFlags)
    model_flags: ModelFlags = field(default_factory=ModelFlags)
    executor: flags.Executor = field(default_factory=ExecutorOptions)
    worker: WorkerFlags = field(default_factory=WorkerFlags)
    cluster: ClusterFlags = field(default_factory=ClusterFlags)
    engine: Annotated[EngineOptions, ENGINE] = field(default_factory=EngineOptions)
    limits: Annotated[ServerOptions, LIMITS] = field(default_factory=ServerOptions)
    report: ReportFlags = field(default_factory=ReportFlags)
    record: RecordFlags = field(default_factory=RecordFlags)
    foreign: ForeignFlags = field(default_factory=ForeignFlags)

    def server_options(self) -> ServerOptions:
        """The server's options; UsageError where two flags do not fit."""
        return replace(
            server_options(self.listen, self.model_flags, self.engine, self.limits, self.report),
            allow_any_source=self.cluster.allow_any_source,
            allow_private_remotes=self.cluster.allow_private_remotes,
        )

    def load(self) -> LoadOptions:
        """Options of loading the models; ConfigError where they cannot work with any model, or on this machine."""
        decided = decided_options(self.engine, "fcfs" if self.cluster.manifest is None else "priority")
        return LoadOptions(decided, self.executor, self.worker.cache_dir, task=self.model_flags.task)


@with_flags
def serve(given: ServeFlags) -> None:
    """Serve a model, or a cluster of them, to OpenAI clients."""
    with _worker(given.worker, given.report, given.record) as worker:
        from lockstep.server.run import run_server
        from lockstep.worker.logs import log_to_stderr

        options, progress = given.server_options(), ServingProgress.for_this(given.report.log_format)
        cluster, reload = _cluster(given, worker, progress.update)
        warnings = answers_to(given.foreign)
        log_to_stderr(given.report.log_format, given.report.log_level, "server")
        if given.model is None and given.cluster.manifest is None:
            warnings = [*warnings, NO_MODEL]
        for warning in warnings:
            log.warning(warning)
        with progress.running():
            run_server(cluster, options, progress.announce, reload)


@contextmanager
def _worker(worker_flags: WorkerFlags, report: ReportFlags, record: RecordFlags) -> Iterator[WorkerOptions]:
    """The device worker's options, with its process started ahead of the server's imports, which take as long as its
    own."""
    from lockstep.worker.health import HealthLimits
    from lockstep.worker.link import SpawnedWorker, WorkerOptions

    trace, kv_events = trace_options(record), kv_events_options(record)
    prestarted = None
    if worker_flags.worker == "process":
        prestarted = SpawnedWorker(report.log_format, report.log_level, trace, kv_events=kv_events)
    try:
        yield WorkerOptions(
            kind=worker_flags.worker,
            health=HealthLimits(silence_s=worker_flags.worker_timeout),
            log_format=report.log_format,
            log_level=report.log_level,
            stream_interval_s=worker_flags.stream_interval_ms / 1000,
            trace=trace,
            kv_events=kv_events,
            prestarted=prestarted,
        )
    finally:
        if prestarted is not None:
            prestarted.discard()


def server_options(
    listen: ListenFlags, model_flags: ModelFlags, engine: EngineOptions, limits: ServerOptions, report: ReportFlags
) -> ServerOptions:
    """The flags as the server's options; UsageError where two of them do not fit."""
    if not METRICS_PREFIX.fullmatch(report.metrics_prefix):
        raise UsageError(f"--metrics-prefix is {report.metrics_prefix!r}; it must be a name like lockstep or vllm")
    host, port = (listen.host, listen.port) if listen.addr is None else split_address(listen.addr)
    return replace(
        limits,
        host=host,
        port=port,
        api_keys=split_keys(listen.api_key or ()),
        admin_keys=split_keys(listen.admin_key or (), "--admin-key"),
        prefix_cache_per_key=listen.prefix_cache_per_key,
        allow_unauthenticated=listen.allow_unauthenticated,
        allowed_hosts=_allowed_hosts(listen, host),
        cors_origins=tuple(listen.cors_origin or ()),
        allows_loopback_origins=listen.loopback_origins,
        chat_template_kwargs=flags.template_kwargs(model_flags.chat_template_kwargs),
        reasoning=model_flags.reasoning,
        metrics_prefix=report.metrics_prefix,
        supports_priority=engine.order == "priority",
        log_requests=not report.disable_log_requests,
        log_prompts=report.log_prompts,
        log_user=report.log_user,
        enable_debug_endpoints=report.enable_debug_endpoints,
        otlp_traces_endpoint=report.otlp_traces_endpoint,
        responses_db=report.responses_db,
        batch_dir=report.batch_dir,
    )


def _allowed_hosts(listen: ListenFlags, host: str) -> tuple[str, ...]:
    """Names that requests may call the server; where loopback is the only protection, only its own."""
    from lockstep.server.admission import loopback_hosts

    given = tuple(name.lower() for name in listen.allowed_host or ())
    is_bare = not listen.api_key and not listen.allow_unauthenticated
    return (*loopback_hosts(host), *given) if is_bare else given


def decided_options(given: EngineOptions, order: Order = "fcfs") -> EngineOptions:
    """Options of one engine: the flags, and what follows from them where they say nothing.

    Raises:
        ConfigError: the limits cannot work with any model, or on this machine.
    """
    return flags.checked(replace(given, order=given.order or order))


def _cluster(given: ServeFlags, worker: WorkerOptions, progress: LoadProgress) -> tuple[Cluster, ManifestReload | None]:
    """Make the cluster behind the server, and the reload of its manifest where there is one."""
    from lockstep.cluster.backend import POCKET
    from lockstep.cluster.cluster import Cluster
    from lockstep.cluster.manifest import Manifest, names_of_source
    from lockstep.cluster.state import ClusterOptions
    from lockstep.server.reload import ManifestReload, stamp_of

    load, kv = given.load(), kv_options(given.worker)
    model, model_flags, cluster_flags = given.model, given.model_flags, given.cluster
    _check_together(model, model_flags, cluster_flags)
    options = ClusterOptions(
        backend_of(cluster_flags.backend),
        load,
        worker,
        kv=kv,
        environment=os.environ,
        folder=None if cluster_flags.manifest is None else cluster_flags.manifest.expanduser().absolute().parent,
        is_fixed=cluster_flags.manifest is None,
    )
    if cluster_flags.manifest is None:
        template = flags.read_template(model_flags.chat_template)
        names = model_flags.served_model_name or ((DEMO_NAME,) if model is None else names_of_source(model))
        manifest = Manifest.of_model(model or POCKET, names, template)
        return Cluster(manifest, options, progress=progress), None
    seen = stamp_of(cluster_flags.manifest)  # before it is read: what is written from now on is brought in
    manifest = read_manifest(cluster_flags.manifest)
    if manifest.hosts is not None and worker.kv_events is not None:
        raise UsageError("--kv-events is of this machine's models, and `hosts:` places them elsewhere; leave one out")
    cluster = Cluster(manifest, options, progress=progress)
    return cluster, ManifestReload(cluster, cluster_flags.manifest, os.environ, seen, watches=cluster_flags.watch)


def kv_options(worker_flags: WorkerFlags) -> KVStoreOptions:
    """Options of the KV store; UsageError where it cannot be kept there."""
    from lockstep.engine.kv_files import check_folder
    from lockstep.engine.kv_tiers import KVStoreOptions

    folder = worker_flags.kv_dir
    if folder is not None:
        folder = folder.expanduser().absolute()
        check_folder(folder)
    return KVStoreOptions(
        host_bytes=worker_flags.host_kv_mb << 20,
        disk_dir="" if folder is None else str(folder),
        disk_bytes=worker_flags.kv_dir_mb << 20,
        check_share=worker_flags.kv_check,
    )


def trace_options(record: RecordFlags) -> TraceOptions | None:
    """Options of the recording; UsageError where a flag of it is given without --trace."""
    from lockstep.worker.flight.options import TraceOptions

    if record.trace is None:
        given = {"--trace-content": record.trace_content, "--trace-key": record.trace_key is not None}
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} applies to a recording; give --trace DIR, or leave it out")
        return None
    key_file = "" if record.trace_key is None else str(record.trace_key.expanduser().absolute())
    directory = str(record.trace.absolute())
    options = TraceOptions(directory, record.trace_max_mb << 20, record.trace_content, key_file)
    options.secret()  # what is wrong with it is reported now
    return options


def kv_events_options(record: RecordFlags) -> KVEventsOptions | None:
    """Endpoints of KV events; UsageError where they are invalid, or a flag of them is given without --kv-events."""
    from lockstep.worker.kv_events import MODEL, KVEventsOptions

    if record.kv_events is None:
        given = {
            "--kv-events-replay": record.kv_events_replay is not None,
            "--kv-events-topic": record.kv_events_topic != MODEL,
            "--kv-events-allow-remote": record.kv_events_allow_remote,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} applies to KV events; give --kv-events ENDPOINT, or leave it out")
        return None
    options = KVEventsOptions(record.kv_events, record.kv_events_replay or "", record.kv_events_topic)
    options.check(record.kv_events_allow_remote)
    return options


def _check_together(model: str | None, model_flags: ModelFlags, cluster_flags: ClusterFlags) -> None:
    """A model or a manifest; flags of the one do not apply to the other."""
    if cluster_flags.manifest is None:
        if model == "":  # left of an argument by a unit's variable that is not set: nobody meant the demo model
            raise UsageError("MODEL is empty; give one to serve, or --manifest FILE; pocket:// is the demo model")
        given = {
            "--backend": cluster_flags.backend is not None,
            "--watch": cluster_flags.watch,
            "--allow-any-source": cluster_flags.allow_any_source,
            "--allow-private-remotes": cluster_flags.allow_private_remotes,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} applies to a manifest's models; give --manifest FILE, or leave it out")
        return
    if model:
        raise UsageError(
            f"MODEL is {model!r} and --manifest {cluster_flags.manifest}; serve one model, or a manifest of many"
        )
    single = {
        "--served-model-name": bool(model_flags.served_model_name),
        "--chat-template": model_flags.chat_template is not None,
        "--task": model_flags.task is not None,
    }
    for flag in (flag for flag, is_given in single.items() if is_given):
        raise UsageError(f"{flag} applies to one model; in a manifest each model has its own")


def split_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, an IPv6 host in brackets; without a host: all addresses."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"--addr is {text!r}; it must be HOST:PORT, e.g. 127.0.0.1:9000 or [::1]:9000")
    return host.strip("[]") or "0.0.0.0", int(port)


def split_keys(given: tuple[str, ...] | list[str], flag: str = "--api-key") -> tuple[str, ...]:
    """Keys, each once. One variable may hold several, so a comma always separates."""
    keys = [key.strip() for text in given for key in text.split(",")]
    if not all(keys):
        raise UsageError(f"{flag} is empty; give a key, or leave it out")
    return tuple(dict.fromkeys(keys))
