"""`run_server`: one server in a process, which listens, loads, answers, drains on SIGTERM and leaves nothing open."""

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

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.snapshot import ClusterSnapshot, EngineSnapshot
from lockstep.errors import LockstepError, UnavailableError, UsageError
from lockstep.server.app import create_app
from lockstep.server.batches import open_batch_store
from lockstep.server.options import ServerOptions
from lockstep.server.protocol import bounded_protocol
from lockstep.server.reload import ManifestReload
from lockstep.server.responses import open_store
from lockstep.server.serving import Phase, Serving
from lockstep.server.tracing import RequestTracer
from lockstep.shown import size

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: longer than clients keep theirs, so that none is closed under a request."""
ENDING_S = 5.0
"""Seconds that streams have to deliver their last frame, after their requests were ended."""
SWITCH_INTERVAL_S = 0.0005
"""So long the event loop waits for the interpreter where another thread has it, which uvloop does once per connection
that has something: while long bodies are parsed beside it, a tenth of the default halves everybody's waits."""
CLOSING_S = 2
"""Seconds that uvicorn waits for what is left before it cancels it."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Announce = Callable[[str], None]
"""Called with a line for people and supervisors: where the server listens, and that it is ready."""


MAX_SHOWN_NAMES = 8
"""More models are announced by their number."""


def run_server(
    cluster: Cluster, options: ServerOptions, announce: Announce, reload: ManifestReload | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        reload: brings the cluster's manifest in again, requested by SIGHUP.

    Raises:
        UsageError: it cannot listen there.
        ConfigError: responses or batches cannot be stored where the options say.
        LockstepError: the cluster cannot be loaded.
    """
    endpoint = options.otlp_traces_endpoint
    tracer = None if endpoint is None else RequestTracer(endpoint)
    try:
        with (
            bind(options) as listener,
            contextlib.closing(open_store(options)) as store,
            contextlib.closing(open_batch_store(options)) as batch_store,
            asyncio.Runner(loop_factory=_loop_factory()) as runner,
        ):
            app = create_app(cluster, options, () if tracer is None else (tracer,), store, batch_store)
            gc.collect()
            gc.freeze()  # modules and routes stay; walking over them takes every full collection 34 ms
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            with app.state.log_lines.listening():
                runner.run(_Run(app, listener, announce, reload).serve())
    finally:
        if tracer is not None:
            tracer.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, where there is one."""
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
        """Make sure of what will be served, and open the port; False: a signal came before."""
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
        web.add_done_callback(lambda _: lifecycle.on_signal())  # a server that broke is not waited for
        try:
            await self._live()
        finally:
            server.should_exit = True
            server.force_exit = lifecycle.phase is Phase.FORCED
            await web

    async def _live(self) -> None:
        """Load, answer, and drain; returns when nothing is in flight or the time is up."""
        serving, url = self._serving, url_of(self._listener)
        self._announce(f"lockstep: listening on {url}, loading {_names(serving.cluster)}")
        loading = asyncio.create_task(serving.cluster.start(), name="load")
        signalled = asyncio.create_task(serving.lifecycle.changed(), name="signal")
        tasks = [loading, signalled]
        try:
            await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                for line in ready_lines(serving.cluster.snapshot(), url, serving.options):
                    log.info("%s", line)
                self._announce(f"lockstep: ready on {url}, serving {_names(serving.cluster)}")
                if sys.stdout.isatty():  # for a person; programs read the line before
                    self._announce(f"lockstep: dashboard on {url}/")
                    self._announce(f"lockstep: try {first_request(url, has_key=bool(serving.options.api_keys))}")
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
        is_first = lifecycle.phase is Phase.DRAINING  # two signals at once are seen together
        if is_first and await _first(traffic.idle(), lifecycle.changed(), timeout_s=timeout_s):
            return
        lifecycle.end()
        log.warning("ending %d requests that are still open", traffic.num_open)
        self._serving.cluster.abort_all(
            UnavailableError("the server is shutting down before this answer was complete; send the request again")
        )
        await _first(traffic.idle(), lifecycle.changed(), timeout_s=ENDING_S)


def first_request(url: str, *, has_key: bool) -> str:
    """A first request to the server, as a command."""
    key = " -H 'authorization: Bearer KEY'" if has_key else ""
    body = '{"messages": [{"role": "user", "content": "I was charged twice."}]}'
    return f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"


def _names(cluster: Cluster) -> str:
    names = [card.name for card in cluster.cards()]
    return ", ".join(names) if 0 < len(names) <= MAX_SHOWN_NAMES else f"{len(names) or 'the'} models"


def ready_lines(snapshot: ClusterSnapshot, url: str, options: ServerOptions) -> list[str]:
    """Lines for people on a server that begins to answer: its engines, its other models, and who may call."""
    engines = [(replica.models, replica.engine) for replica in snapshot.replicas if replica.engine is not None]
    lines = [f"{_some(models)}: {_engine_text(engine)}" for models, engine in engines[:MAX_SHOWN_NAMES]]
    if len(engines) > MAX_SHOWN_NAMES:
        lines.append(f"{len(engines) - MAX_SHOWN_NAMES} engines more: GET {url}/v1/cluster")
    for state, meaning in (("standby", "loaded at the first request"), ("remote", "answered by another server")):
        if names := [model.id for model in snapshot.models if model.state == state]:
            lines.append(f"{_some(names)}: {state}, {meaning}")
    lines.append(f"metrics: {url}/metrics; documentation of the API: {url}/docs")
    return [*lines, _callers(options)]


def _engine_text(engine: EngineSnapshot) -> str:
    host = f" and {engine.host_kv_tokens:,} on the host" if engine.host_kv_tokens else ""
    parts = [
        f"context of {engine.max_model_len:,} tokens",
        f"KV of {engine.kv_tokens:,} tokens in {size(engine.kv_bytes)}{host}",
        f"{engine.max_num_seqs:,} sequences at once",
    ]
    if engine.weights_bytes is not None:
        weights = f"weights of {size(engine.weights_bytes)}, KV in {engine.kv_precision}"
        parts += [weights, f"{engine.isa}, {engine.threads} threads"]
    if engine.quantize not in ("", "none"):
        parts.append(f"weights rounded to {engine.quantize}")
    return "; ".join(parts)


def _callers(options: ServerOptions) -> str:
    if options.admin_keys:
        return "an admin key is needed for what all callers share" + ("; a key for all else" * bool(options.api_keys))
    if options.api_keys:
        return "a key is needed"
    if options.allow_unauthenticated:
        return "no key is needed: every caller may use and change this server"
    return "no key is needed: every caller on this machine is its admin"


def _some(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN_NAMES
    return ", ".join(names[:MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: SIGTERM means draining here, with the port still open."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _first(idle: Awaitable[object], changed: Awaitable[object], *, timeout_s: float) -> bool:
    """True if the first of two coroutines ended before the second, and in time. Neither runs on afterwards."""
    tasks = (asyncio.ensure_future(idle), asyncio.ensure_future(changed))
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def _signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the loop for every SIGTERM and SIGINT, until the block ends."""
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
    """Ask for the manifest again on every SIGHUP, until the block ends; where there is such a signal."""
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
"""Connections that the kernel holds until they are accepted."""


def bind(options: ServerOptions) -> socket.socket:
    """A socket that has its address, and refuses connections until `listen`.

    Raises:
        UsageError: the address does not exist, is taken or forbidden; or it can be reached from elsewhere and there is
            no key.
    """
    family, address = _resolve(options.host, options.port)
    if not options.api_keys and not options.allow_unauthenticated and not _is_loopback(address[0]):
        raise UsageError(
            f"--host {options.host} can be reached from other machines, and there is no key: give --api-key KEY, "
            "listen on 127.0.0.1, or say --allow-unauthenticated"
        )
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one address
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise UsageError(_refused(options, error)) from error
    return taken


def listen(bound: socket.socket, options: ServerOptions) -> None:
    """Let connections come; UsageError where another process was faster."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise UsageError(_refused(options, error)) from error


def url_of(listener: socket.socket) -> str:
    """The address as clients write it, with the port that was really taken."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """The first address of a name, IPv4 before IPv6, as most clients try them on loopback."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"--host {host} --port {port} is no address to listen on ({error})") from error
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, (str(address[0]), port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _refused(options: ServerOptions, error: OSError) -> str:
    where = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; give another --port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"{where} is not for this user; give a --port from 1024 on"
    return f"cannot listen on {where}: {error.strerror or error}"
