"""Links to a device worker: runs a worker in a child process or in threads of this process, and defines their protocol.

A worker process does not compete for this process's interpreter, and a native crash ends only that process. Threads are
for the Python API, tests and stubs. Both exchange the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from lockstep.errors import ExecutorError, InvalidParameterError, QueueFullError, UsageError
from lockstep.system import SYSTEM, Process, System
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.health import HealthLimits
from lockstep.worker.kv_events import KVEventsOptions
from lockstep.worker.logs import LogFormat
from lockstep.worker.messages import Command, Event, Handler, Stop, Submit, TrialOptions
from lockstep.worker.network import WorkerAddress
from lockstep.worker.parent_death import signal_name
from lockstep.worker.remote_clients import ListenOptions
from lockstep.worker.wire import FrameReader, command_encoder, event_decoder, framed

log = logging.getLogger(__name__)

MODULE = "lockstep.worker.child"
JOIN_LIMIT_S = 10.0
"""Time limit for the current step of a worker thread. A thread cannot be killed, so one that takes longer is
abandoned."""
_POLL_INTERVAL_S = 0.005


class Link(Protocol):
    """One running device worker. Used from one event loop."""

    @property
    def pid(self) -> int | None:
        """Id of the worker's process; None: the worker is a thread of this process."""
        ...

    @property
    def name(self) -> str:
        """Description of the worker for the log."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command. Commands to a worker that has ended are dropped.

        Raises:
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: a number of the request does not fit a message.
        """
        ...

    def kill(self) -> None:
        """Kill a process that hangs, so that it counts as lost. A thread cannot be killed and continues."""
        ...

    async def close(self) -> None:
        """End the worker, within a bounded time."""
        ...


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits of the link to a worker of this machine."""

    max_unsent_bytes: int = 64 << 20
    """Maximum size of commands that the process has not read. Beyond it, requests are rejected."""
    max_commands: int = 65_536
    """Maximum number of commands that wait for the receiving thread. Beyond it, requests are rejected."""
    stop_s: float = 5.0
    """Time limit in seconds for an orderly exit. Then the stream is closed, which makes the process exit unless it is
    stuck."""
    eof_s: float = 1.0
    """Time limit in seconds for the exit after the stream was closed. Then the process is killed."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a device worker: thread or process, health, logs, recording."""

    kind: Literal["thread", "process", "network"] = "thread"
    """``process``, for servers: a native crash then ends requests but not the server. ``network``: a worker at
    ``address`` that another process has started."""
    address: WorkerAddress | None = None
    listen: ListenOptions | None = None
    """Network address at which a worker process also listens for gateways."""
    health: HealthLimits = field(default_factory=HealthLimits)
    link: LinkLimits = field(default_factory=LinkLimits)
    trial: TrialOptions = field(default_factory=TrialOptions)
    """Options of trials. Only a worker process tries unknown models; with threads, a crash ends the whole process
    anyway."""
    log_format: LogFormat = "text"
    log_level: str = "warning"
    """Log level of the worker process, which logs to standard error."""
    trace: TraceOptions | None = None
    """Options of the recording; None: nothing is recorded."""
    kv_events: KVEventsOptions | None = None
    """Endpoints of KV events; None: they are not published."""
    stream_interval_s: float = 0.0
    """Minimum interval between wake-ups of a stream's reader. Outputs within it are delivered together, but first
    tokens and ends come at once."""
    system: System = SYSTEM
    """Time, threads, processes and files of the serving process; of a worker, too, if that is a thread."""
    prestarted: SpawnedWorker | None = None
    """Process for the first worker, started early; its creator ends it if it is not used. None: the process is started
    when it is needed, as for later workers."""


async def open_link(options: WorkerOptions, handler: Handler) -> Link:
    """Start a device worker, with nothing loaded.

    Raises:
        UsageError: this system cannot pass a socket to a process, or a network worker rejects our credentials.
        ExecutorError: no process can be started.
        UnavailableError: no worker listens at the address.
    """
    if options.kind == "thread":
        return ThreadLink(handler, options)
    if options.kind == "network":
        from lockstep.worker.network import NetworkLink

        assert options.address is not None, "a worker on a network has an address"
        return await NetworkLink.open(handler, options.address)
    spawned = options.prestarted
    if spawned is None or not spawned.is_free:
        logs = options.log_format, options.log_level
        spawned = SpawnedWorker(*logs, options.trace, options.listen, options.kv_events, options.system)
    return await ProcessLink.open(handler, spawned, options.link)


class SpawnedWorker:
    """A worker process that has not received a command yet. It imports its modules and does nothing else until the
    first command.

    Start it on a thread that lives as long as the worker: on Linux the child process ends when that thread ends.
    """

    def __init__(
        self,
        log_format: LogFormat,
        log_level: str,
        trace: TraceOptions | None = None,
        listen: ListenOptions | None = None,
        kv_events: KVEventsOptions | None = None,
        system: System = SYSTEM,
    ) -> None:
        """Start the process.

        Raises:
            UsageError: this system cannot pass a socket to a process.
            ExecutorError: no process can be started.
        """
        if sys.platform == "win32":
            raise UsageError("worker processes need a Unix system; use the worker thread instead")
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ExecutorError(f"no worker process can be started: {error}") from error
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", MODULE, str(fd), str(os.getpid()), log_format, log_level]
            command += [
                "" if each is None else msgspec.json.encode(each).decode() for each in (trace, listen, kv_events)
            ]
            try:  # standard output is ours, so the worker prints to standard error
                self._process = system.start_process(command, fd)
            except OSError as error:
                raise ExecutorError(f"no worker process can be started: {error}") from error
            on_failure.pop_all()
        ours.setblocking(False)
        self._sock = ours
        self.pid = self._process.pid
        self.system = system
        self.is_free = True
        """True until the process is taken or ended."""

    def take(self) -> tuple[Process, socket.socket]:
        """Return the process and our end of its socket. Can be called once."""
        assert self.is_free, "a process is taken once"
        self.is_free = False
        return self._process, self._sock

    def discard(self) -> None:
        """End the process if it was not taken."""
        if self.is_free:
            _end(*self.take())


class ProcessLink(asyncio.Protocol):
    """`Link` to a child process, over a socket pair. Created by `open`."""

    def __init__(self, handler: Handler, process: Process, system: System, limits: LinkLimits) -> None:
        self.name = f"process {process.pid}"
        self._limits = limits
        self._handler = handler
        self._process, self._system = process, system
        self._reader = FrameReader()
        self._decoder = event_decoder()
        self._encoder = command_encoder()
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._exit_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, handler: Handler, spawned: SpawnedWorker, limits: LinkLimits | None = None) -> ProcessLink:
        """Connect to a worker process. It accepts commands at once and executes them after its imports."""
        process, sock = spawned.take()
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(
                lambda: cls(handler, process, spawned.system, limits or LinkLimits()), sock=sock
            )
        except BaseException:  # the caller was cancelled, so end the process here
            _end(process, sock)
            raise
        return link

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, command: Command) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        most = self._limits.max_unsent_bytes
        if isinstance(command, Submit) and transport.get_write_buffer_size() > most:
            raise QueueFullError(f"{most} bytes of requests already wait for the worker; try again later")
        try:
            body = self._encoder.encode(command)
        except OverflowError as error:
            raise InvalidParameterError(f"a number of the request does not fit 64 bits ({error})") from None
        transport.write(framed(body))

    def kill(self) -> None:
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # also if it is stuck in a device driver and cannot be killed

    async def close(self) -> None:
        self.send(Stop())
        self._is_closing = True
        if not await self._has_ended(self._limits.stop_s):
            log.warning("the worker process %d does not stop; closing its stream", self._process.pid)
        if self._transport is not None:
            self._transport.abort()
        if not await self._has_ended(self._limits.eof_s):
            log.warning("the worker process %d is stuck and is killed", self._process.pid)
            self._process.kill()
            await self._has_ended(self._limits.eof_s)
        if self._exit_task is not None:
            await self._exit_task

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if TYPE_CHECKING:
            assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        decode, received = self._decoder.decode, self._handler.received
        for body in self._reader.feed(data):
            received(decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._exit_task = asyncio.get_running_loop().create_task(self._report_exit())

    async def _report_exit(self) -> None:
        """Report how the process ended. A process that closed its stream but still runs is killed."""
        if not await self._has_ended(self._limits.eof_s):
            self._process.kill()
            await self._has_ended(self._limits.eof_s)
        if not self._is_closing:
            self._handler.lost(_exit_reason(self._process.returncode))

    async def _has_ended(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._process.poll() is None:
            if loop.time() >= until_s:
                return False
            await self._system.sleep(_POLL_INTERVAL_S)
        return True


class ThreadLink:
    """`Link` to a device worker in threads of this process. Create it inside a running event loop."""

    pid = None
    name = "a thread"

    def __init__(self, handler: Handler, options: WorkerOptions) -> None:
        from lockstep.worker.device import DeviceWorker  # only processes that run an engine import it

        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._limits = options.link
        self._commands: SimpleQueue[Command] = SimpleQueue()
        system = self._system = options.system
        self._worker = DeviceWorker(
            lambda event: self._post(handler.received, event), system, options.trace, kv_events=options.kv_events
        )
        self._steps = system.start_thread(self._run, "lockstep-steps")
        system.start_thread(self._receive, "lockstep-receive")

    def send(self, command: Command) -> None:
        most = self._limits.max_commands
        if isinstance(command, Submit) and self._commands.qsize() >= most:
            raise QueueFullError(f"{most} commands already wait for the worker; try again later")
        self._commands.put(command)

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        self._commands.put(Stop())
        await self._system.run_in_thread(partial(self._steps.join, JOIN_LIMIT_S))

    def _receive(self) -> None:
        while True:
            command = self._commands.get()
            self._worker.handle(command)
            if isinstance(command, Stop):
                return

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:  # already logged, and every request has failed with it
            self._post(self._handler.lost, repr(error))
            self._commands.put(Stop())

    def _post(self, function: Callable[[Any], None], value: Event | str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no receiver any more
            self._loop.call_soon_threadsafe(function, value)


def _end(process: Process, sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "no answer"
    return signal_name(-code) if code < 0 else f"exit code {code}"
