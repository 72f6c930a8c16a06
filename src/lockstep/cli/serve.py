"""`lockstep serve MODEL` and `lockstep serve --manifest FILE`: converts flags, environment variables and a file of
flags to options, and runs the server with them."""

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
from lockstep.cli.adapter_flags import adapters_of
from lockstep.cli.config_file import use_config
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.manifests import backend_of, read_manifest
from lockstep.cli.progress import ServingProgress
from lockstep.cli.serve_flags import (
    ENGINE,
    LIMITS,
    AdapterFlags,
    ClusterFlags,
    ForeignFlags,
    ListenFlags,
    ModelFlags,
    RecordFlags,
    ReportFlags,
    WorkerFlags,
    foreign_flag_warnings,
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
"""Served name of the demo model if no MODEL is given."""
NO_MODEL = (
    "no MODEL is given: serving pocket, the embedded demo model; "
    "to serve another one, give a path, hf://org/name or --manifest FILE"
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
            help="YAML file with flags as keys; flags and LOCKSTEP_* variables override it.",
            callback=use_config,
            is_eager=True,
        ),
    ] = None
    debug: flags.Debug = False
    listen: ListenFlags = field(default_factory=ListenFlags)
    model_flags: ModelFlags = field(default_factory=ModelFlags)
    adapters: AdapterFlags = field(default_factory=AdapterFlags)
    executor: flags.Executor = field(default_factory=ExecutorOptions)
    worker: WorkerFlags = field(default_factory=WorkerFlags)
    cluster: ClusterFlags = field(default_factory=ClusterFlags)
    engine: Annotated[EngineOptions, ENGINE] = field(default_factory=EngineOptions)
    limits: Annotated[ServerOptions, LIMITS] = field(default_factory=ServerOptions)
    report: ReportFlags = field(default_factory=ReportFlags)
    record: RecordFlags = field(default_factory=RecordFlags)
    foreign: ForeignFlags = field(default_factory=ForeignFlags)

    def server_options(self) -> ServerOptions:
        """Options of the server; UsageError if two flags contradict each other."""
        return replace(
            server_options(self.listen, self.model_flags, self.engine, self.limits, self.report),
            allow_any_source=self.cluster.allow_any_source,
            allow_private_remotes=self.cluster.allow_private_remotes,
        )

    def load(self) -> LoadOptions:
        """Options of loading the models; ConfigError if they cannot work with any model, or on this machine."""
        engine = engine_options(self.engine, "fcfs" if self.cluster.manifest is None else "priority")
        return LoadOptions(engine, self.executor, self.worker.cache_dir, task=self.model_flags.task)


@with_flags
def serve(given: ServeFlags) -> None:
    """Serve a model, or a cluster of models, to OpenAI clients."""
    with _worker(given.worker, given.report, given.record) as worker:
        from lockstep.server.run import run_server
        from lockstep.worker.logs import log_to_stderr

        options, progress = given.server_options(), ServingProgress.of_process(given.report.log_format)
        cluster, reload = _cluster(given, worker, progress.update)
        warnings = foreign_flag_warnings(given.foreign)
        log_to_stderr(given.report.log_format, given.report.log_level, "server")
        if given.model is None and given.cluster.manifest is None:
            warnings = [*warnings, NO_MODEL]
        for warning in warnings:
            log.warning(warning)
        with progress.running():
            run_server(cluster, options, progress.announce, reload)


@contextmanager
def _worker(worker_flags: WorkerFlags, report: ReportFlags, record: RecordFlags) -> Iterator[WorkerOptions]:
    """Options of the device worker. A worker process is started here, so that its imports run in parallel to those of
    the server, which take as long."""
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
    """Convert flags to options of the server; UsageError if two of them contradict each other."""
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
    """Valid ``Host`` headers. If loopback is the only protection, these are only loopback names and the given ones."""
    from lockstep.server.admission import loopback_hosts

    given = tuple(name.lower() for name in listen.allowed_host or ())
    is_bare = not listen.api_key and not listen.allow_unauthenticated
    return (*loopback_hosts(host), *given) if is_bare else given


def engine_options(given: EngineOptions, order: Order = "fcfs") -> EngineOptions:
    """Options of one engine: the flags, with the default order filled in.

    Raises:
        ConfigError: the limits cannot work with any model, or on this machine.
    """
    return flags.checked(replace(given, order=given.order or order))


def _cluster(given: ServeFlags, worker: WorkerOptions, progress: LoadProgress) -> tuple[Cluster, ManifestReload | None]:
    """Make the cluster behind the server, and the reload of its manifest if it has one."""
    from lockstep.cluster.cluster import Cluster
    from lockstep.cluster.manifest import Manifest, names_of_source
    from lockstep.cluster.state import ClusterOptions
    from lockstep.pocket import SCHEME as EMBEDDED
    from lockstep.server.reload import ManifestReload, stamp_of

    load, kv = given.load(), kv_options(given.worker)
    model, model_flags, cluster_flags = given.model, given.model_flags, given.cluster
    _check_together(model, model_flags, cluster_flags)
    names = model_flags.served_model_name or ((DEMO_NAME,) if model is None else names_of_source(model))
    bases = tuple(dict.fromkeys((*names, *names_of_source(model or EMBEDDED))))
    adapters = {each.name: each.path for each in adapters_of(given.adapters.lora_modules, bases)}
    if adapters and cluster_flags.manifest is not None:
        raise UsageError("--lora-modules does not apply to --manifest; set `adapter:` for models in the manifest")
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
        if taken := [name for name in names if name in adapters]:
            raise UsageError(f"--lora-modules names {taken[0]!r}, which is the model's own name; choose another")
        if adapters:  # before any file is read, so that the flag holds for adapters that are loaded later
            options = replace(options, load=replace(load, engine=replace(load.engine, enable_lora=True)))
        manifest = Manifest.of_model(model or EMBEDDED, names, template, adapters)
        return Cluster(manifest, options, progress=progress), None
    seen = stamp_of(cluster_flags.manifest)  # before the file is read: later changes of it are reloaded
    manifest = read_manifest(cluster_flags.manifest)
    if manifest.hosts is not None and worker.kv_events is not None:
        raise UsageError("--kv-events does not support `hosts:`, which places models elsewhere; remove one of them")
    cluster = Cluster(manifest, options, progress=progress)
    return cluster, ManifestReload(cluster, cluster_flags.manifest, os.environ, seen, watches=cluster_flags.watch)


def kv_options(worker_flags: WorkerFlags) -> KVStoreOptions:
    """Options of the KV store; UsageError if the directory cannot be used for it."""
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
    """Options of the recording; UsageError if another flag of recordings is given without --trace."""
    from lockstep.worker.flight.options import TraceOptions

    if record.trace is None:
        given = {"--trace-content": record.trace_content, "--trace-key": record.trace_key is not None}
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} requires --trace DIR")
        return None
    key_file = "" if record.trace_key is None else str(record.trace_key.expanduser().absolute())
    directory = str(record.trace.absolute())
    options = TraceOptions(directory, record.trace_max_mb << 20, record.trace_content, key_file)
    options.secret()  # reads the key, so that its faults are reported now
    return options


def kv_events_options(record: RecordFlags) -> KVEventsOptions | None:
    """Options of KV events; UsageError if they are invalid, or another flag of theirs is given without --kv-events."""
    from lockstep.worker.kv_events import MODEL, KVEventsOptions

    if record.kv_events is None:
        given = {
            "--kv-events-replay": record.kv_events_replay is not None,
            "--kv-events-topic": record.kv_events_topic != MODEL,
            "--kv-events-allow-remote": record.kv_events_allow_remote,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} requires --kv-events ENDPOINT")
        return None
    options = KVEventsOptions(record.kv_events, record.kv_events_replay or "", record.kv_events_topic)
    options.check(record.kv_events_allow_remote)
    return options


def _check_together(model: str | None, model_flags: ModelFlags, cluster_flags: ClusterFlags) -> None:
    """Reject a model together with a manifest, and flags that do not apply to the given one of them."""
    if cluster_flags.manifest is None:
        if model == "":  # an unset variable in a systemd unit or a script, which should not serve the demo model
            raise UsageError("MODEL is empty; give a model, --manifest FILE, or pocket:// for the demo model")
        given = {
            "--backend": cluster_flags.backend is not None,
            "--watch": cluster_flags.watch,
            "--allow-any-source": cluster_flags.allow_any_source,
            "--allow-private-remotes": cluster_flags.allow_private_remotes,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise UsageError(f"{flag} requires --manifest FILE")
        return
    if model:
        raise UsageError(f"MODEL is {model!r} and --manifest is {cluster_flags.manifest}; give only one of them")
    single = {
        "--served-model-name": bool(model_flags.served_model_name),
        "--chat-template": model_flags.chat_template is not None,
        "--task": model_flags.task is not None,
    }
    for flag in (flag for flag, is_given in single.items() if is_given):
        raise UsageError(f"{flag} does not apply to --manifest; set it for each model in the manifest")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, in which an IPv6 host is in brackets. Without a host: all addresses."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"--addr is {text!r}; it must be HOST:PORT, e.g. 127.0.0.1:9000 or [::1]:9000")
    return host.strip("[]") or "0.0.0.0", int(port)


def split_keys(given: tuple[str, ...] | list[str], flag: str = "--api-key") -> tuple[str, ...]:
    """Distinct keys. A comma separates keys, because one environment variable may contain several."""
    keys = [key.strip() for text in given for key in text.split(",")]
    if not all(keys):
        raise UsageError(f"{flag} is empty; give a key, or leave it out")
    return tuple(dict.fromkeys(keys))
