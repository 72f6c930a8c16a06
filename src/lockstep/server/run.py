"""Server process: listens, loads the models, serves requests, drains on SIGTERM and closes everything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from lockstep.artifacts.task import Task
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.snapshot import ClusterSnapshot, EngineSnapshot, ModelSnapshot
from lockstep.errors import LockstepError, UnavailableError, UsageError
from lockstep.server.app import create_app
from lockstep.server.batches import BatchStore
from lockstep.server.options import ServerOptions
from lockstep.server.protocol import bounded_protocol
from lockstep.server.reload import ManifestReload
from lockstep.server.responses import ResponseStore
from lockstep.server.serving import ServerPhase, Serving
from lockstep.server.tracing import RequestTracer
from lockstep.shown import size

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept open: longer than clients keep it, so it is not closed under a request."""
ENDING_S = 5.0
"""Seconds that streams have to send their last frame after their requests were aborted."""
SWITCH_INTERVAL_S = 0.0005
"""Maximum time, in seconds, that a thread holds the interpreter while another one waits for it.

uvloop acquires the interpreter once per readable connection. While long bodies are parsed on another thread, a tenth of
the default halves the latency of all requests.
"""
CLOSING_S = 2
"""Seconds that uvicorn waits for open connections before it cancels them."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Announce = Callable[[str], None]
"""Called with a line for users and supervisors: the address on which the server listens, or that it is ready."""


MAX_SHOWN_NAMES = 8
"""Maximum number of models that are announced by name. A larger number is announced as a count."""


def run_server(
    cluster: Cluster, options: ServerOptions, announce: Announce, reload: ManifestReload | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        reload: reloads the cluster's manifest on SIGHUP.

    Raises:
        UsageError: the server cannot listen on the given address.
        ConfigError: responses or batches cannot be stored in the configured folders.
        LockstepError: the cluster cannot be loaded.
    """
    endpoint = options.otlp_traces_endpoint
    tracer = None if endpoint is None else RequestTracer(endpoint)
    try:
        with (
            bind(options) as listener,
            contextlib.closing(ResponseStore(options.responses_db, options.max_stored_responses)) as store,
            contextlib.closing(BatchStore(options.batch_dir)) as batch_store,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            app = create_app(cluster, options, () if tracer is None else (tracer,), store, batch_store)
            gc.collect()
            gc.freeze()  # modules and routes stay alive; scanning them takes 34 ms per full collection
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            with app.state.log_lines.listening():
                runner.run(_Run(app, listener, announce, reload).serve())
    finally:
        if tracer is not None:
            tracer.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, if it is available."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


class _Run:
    def __init__(
        self, app: FastAPI, listener: socket.socket, announce: Announce, reload: ManifestReload | None
    ) -> None:
        self._app = app
        self._serving: Serving = app.state.serving
        self._listener = listener
        self._announce = announce
        self._reload = reload

    async def serve(self) -> None:
        serving = self._serving
        server = _Uvicorn(
            uvicorn.Config(
                self._app,
                http=bounded_protocol(serving.options.max_header_bytes),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSING_S,
            )
        )
        with _signals(serving.lifecycle.on_signal), _hangups(self._reload):
            try:
                if await self._prepare():
                    await self._serve(server)
            finally:
                await serving.cluster.close()

    async def _prepare(self) -> bool:
        """Check the cluster's models, then open the port. Return False if a signal arrived first."""
        serving = self._serving
        preparing = asyncio.create_task(serving.cluster.prepare(), name="prepare")
        signalled = asyncio.create_task(serving.lifecycle.changed(), name="signal")
        try:
            await asyncio.wait((preparing, signalled), return_when=asyncio.FIRST_COMPLETED)
            if not serving.lifecycle.is_admitting:
                return False
            preparing.result()
        finally:
            preparing.cancel()
            signalled.cancel()
        listen(self._listener, serving.options)
        return True

    async def _serve(self, server: uvicorn.Server) -> None:
        lifecycle = self._serving.lifecycle
        web = asyncio.create_task(server.serve(sockets=[self._listener]), name="web")
        web.add_done_callback(lambda _: lifecycle.on_signal())  # stop if the web server fails
        try:
            await self._live()
        finally:
            server.should_exit = True
            server.force_exit = lifecycle.phase is ServerPhase.FORCED
            await web

    async def _live(self) -> None:
        """Load the models, serve, and drain. Return when no request is open or the time limit is reached."""
        serving, url = self._serving, url_of(self._listener)
        self._announce(f"lockstep: listening on {url}, loading {_names(serving.cluster)}")
        loading = asyncio.create_task(serving.cluster.start(), name="load")
        signalled = asyncio.create_task(serving.lifecycle.changed(), name="signal")
        tasks = [loading, signalled]
        try:
            await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                snapshot = serving.cluster.snapshot()
                for line in ready_lines(snapshot, url, serving.options):
                    log.info("%s", line)
                self._announce(f"lockstep: ready on {url}, serving {_names(serving.cluster)}")
                if sys.stdout.isatty():  # only for users; programs read the line above
                    self._announce(f"lockstep: dashboard on {url}/")
                    command = first_request(url, snapshot.models, has_key=bool(serving.options.api_keys))
                    self._announce(f"lockstep: try {command}")
                tasks.append(asyncio.create_task(self._app.state.batches.run(), name="batches"))
                if self._reload is not None:
                    tasks.append(asyncio.create_task(self._reload.run(), name="reload"))
            await signalled
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, LockstepError):
                    await task
        await self._drain()

    async def _drain(self) -> None:
        lifecycle, traffic = self._serving.lifecycle, self._serving.traffic
        timeout_s = self._serving.options.shutdown_timeout_s
        log.info("draining: %d requests have up to %g s to finish", traffic.num_open, timeout_s)
        is_first = lifecycle.phase is ServerPhase.DRAINING  # two signals may arrive at the same time
        if is_first and await _first(traffic.idle(), lifecycle.changed(), timeout_s=timeout_s):
            return
        lifecycle.end()
        log.warning("ending %d requests that are still open", traffic.num_open)
        self._serving.cluster.abort_all(
            UnavailableError("the server is shutting down and did not complete this answer; send the request again")
        )
        await _first(traffic.idle(), lifecycle.changed(), timeout_s=ENDING_S)


def first_request(url: str, models: Sequence[ModelSnapshot] = (), *, has_key: bool) -> str:
    """A curl command for a first request to the server: for text, or else for what its first model is for."""
    key = " -H 'authorization: Bearer KEY'" if has_key else ""
    path, body = "chat/completions", '{"messages": [{"role": "user", "content": "I was charged twice."}]}'
    if models and all(model.task in ("embed", "rerank") for model in models):
        id_ = models[0].id
        if models[0].task == "embed":
            path, body = "embeddings", f'{{"model": "{id_}", "input": "I was charged twice."}}'
        else:
            path, body = "rerank", f'{{"model": "{id_}", "query": "refund", "documents": ["I was charged twice."]}}'
    return f"curl {url}/v1/{path} -H 'content-type: application/json'{key} -d '{body}'"


def _names(cluster: Cluster) -> str:
    names = [card.name for card in cluster.cards()]
    return ", ".join(names) if 0 < len(names) <= MAX_SHOWN_NAMES else f"{len(names) or 'the'} models"


def ready_lines(snapshot: ClusterSnapshot, url: str, options: ServerOptions) -> list[str]:
    """Log lines of a server that becomes ready: its engines, its other models, and the access rules."""
    engines = [(replica.models, replica.engine) for replica in snapshot.replicas if replica.engine is not None]
    tasks = {model.id: model.task for model in snapshot.models}
    lines = [
        f"{_some(models)}: {_task_text(tasks.get(next(iter(models), '')))}{_engine_text(engine)}"
        for models, engine in engines[:MAX_SHOWN_NAMES]
    ]
    if len(engines) > MAX_SHOWN_NAMES:
        lines.append(f"{len(engines) - MAX_SHOWN_NAMES} more engines: GET {url}/v1/cluster")
    for state, meaning in (("standby", "loaded on the first request"), ("remote", "runs on a remote server")):
        if names := [model.id for model in snapshot.models if model.state == state]:
            lines.append(f"{_some(names)}: {state}, {meaning}")
    lines.append(f"metrics: {url}/metrics; documentation of the API: {url}/docs")
    return [*lines, _callers(options)]


def _task_text(task: Task | None) -> str:
    """A model's task and its paths; empty for a model of text."""
    paths = {"embed": "embeds texts at /v1/embeddings; ", "rerank": "scores documents at /v1/rerank; "}
    return paths.get(task or "", "")


def _engine_text(engine: EngineSnapshot) -> str:
    host = f" and {engine.host_kv_tokens:,} on the host" if engine.host_kv_tokens else ""
    limit = f"context of {engine.max_model_len:,} tokens"
    if engine.is_encoder:
        limit = f"texts of up to {engine.text_limit:,} tokens"
    held = "activations" if engine.is_encoder else "KV"
    parts = [
        limit,
        f"{held} of {engine.kv_tokens:,} tokens in {size(engine.kv_bytes)}{host}",
        f"{engine.max_num_seqs:,} {'texts' if engine.is_encoder else 'sequences'} at once",
    ]
    if engine.weights_bytes is not None:
        weights = f"weights of {size(engine.weights_bytes)}, KV in {engine.kv_precision}"
        parts += [weights, f"{engine.isa}, {engine.threads} threads"]
    if engine.quantize not in ("", "none"):
        parts.append(f"weights rounded to {engine.quantize}")
    return "; ".join(parts)


def _callers(options: ServerOptions) -> str:
    if options.admin_keys:
        return "an admin key is required for shared state" + ("; an API key otherwise" * bool(options.api_keys))
    if options.api_keys:
        return "an API key is required"
    if options.allow_unauthenticated:
        return "no API key is required: every caller can use and change this server"
    return "no API key is required: every caller on this machine is an admin"


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN_NAMES
    return ", ".join(names[:MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: on SIGTERM the server drains, with the port still open."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _first(idle: Awaitable[object], changed: Awaitable[object], *, timeout_s: float) -> bool:
    """Return True if the first of two awaitables ended before the second and in time. Both are then cancelled."""
    tasks = (asyncio.ensure_future(idle), asyncio.ensure_future(changed))
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the event loop for every SIGTERM and SIGINT, until the block ends."""
    loop = asyncio.get_running_loop()
    if sys.platform == "win32":
        previous = {
            number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(on_signal)) for number in SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _hangups(reload: ManifestReload | None) -> Iterator[None]:
    """Request a manifest reload on every SIGHUP, until the block ends. Has no effect on Windows."""
    if reload is None or sys.platform == "win32":
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload.request)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


BACKLOG = 2_048
"""Number of connections that the kernel queues until they are accepted."""


def bind(options: ServerOptions) -> socket.socket:
    """Return a socket that is bound to its address. It refuses connections until `listen` is called.

    Raises:
        UsageError: the address does not exist, is in use or is forbidden; or it can be reached from other machines and
            no API key is set.
    """
    family, address = _resolve(options.host, options.port)
    if not options.api_keys and not options.allow_unauthenticated and not _is_loopback(address[0]):
        raise UsageError(
            f"--host {options.host} can be reached from other machines, but no API key is set: give --api-key KEY, "
            "listen on 127.0.0.1, or pass --allow-unauthenticated"
        )
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows it would allow two servers on one address
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise UsageError(_refused(options, error)) from error
    return taken


def listen(bound: socket.socket, options: ServerOptions) -> None:
    """Start to accept connections. Raises UsageError if another process listens on the address by now."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise UsageError(_refused(options, error)) from error


def url_of(listener: socket.socket) -> str:
    """URL of the server, with the port that was actually bound."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """Return the first address of a host name. IPv4 comes before IPv6, the order of most clients on loopback."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"--host {host} --port {port} is not an address to listen on ({error})") from error
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, (str(address[0]), port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _refused(options: ServerOptions, error: OSError) -> str:
    where = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; choose another --port, or 0 for any free port"
    if error.errno == errno.EACCES:
        return f"{where} requires privileges; choose a --port of 1024 or higher"
    return f"cannot listen on {where}: {error.strerror or error}"
