"""Links to a device worker: the protocol, and a worker in a child process or in threads of this process.

A process costs no contention for the interpreter, and a native crash ends nothing but it; threads are for the Python
API, tests and stubs. Both carry the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from lockstep.errors import ExecutorError, InvalidParameterError, QueueFullError, UsageError
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
MAX_UNSENT_BYTES = 64 << 20
"""Commands that the process has not read; beyond it requests are refused."""
MAX_COMMANDS = 65_536
"""Commands that may wait for the receiving thread before requests are refused."""
STOP_LIMIT_S = 5.0
"""For an orderly end; then the stream is closed, at which the process ends at once unless it is stuck."""
EOF_LIMIT_S = 1.0
"""For that; then the process is killed."""
JOIN_LIMIT_S = 10.0
"""For the step under way in a thread; a thread cannot be ended, so one that takes longer is left to itself."""
_POLL_INTERVAL_S = 0.005


class Link(Protocol):
    """One running device worker. Used from one event loop."""

    @property
    def pid(self) -> int | None:
        """Id of the worker's process; None: it is a thread of this one."""
        ...

    @property
    def name(self) -> str:
        """The worker, in words for the log."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command; to a worker that is gone it goes nowhere.

        Raises:
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: the request holds a number that no message can.
        """
        ...

    def kill(self) -> None:
        """End a process that hangs, at once, so that it counts as lost; a thread cannot be ended, and goes on."""
        ...

    async def close(self) -> None:
        """End the worker, within a bounded time."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a device worker: thread or process, health, logs, recording."""

    kind: Literal["thread", "process", "network"] = "thread"
    """``process`` for servers: a native crash then ends requests, and not the server. ``network``: a worker that
    another one has started, at ``address``."""
    address: WorkerAddress | None = None
    listen: ListenOptions | None = None
    """Where a worker process listens for gateways on a network as well."""
    health: HealthLimits = field(default_factory=HealthLimits)
    trial: TrialOptions = field(default_factory=TrialOptions)
    """Only a worker process tries what it does not know: who chose threads has chosen to share their fate."""
    log_format: LogFormat = "text"
    log_level: str = "warning"
    """Of the worker process, which logs to standard error."""
    trace: TraceOptions | None = None
    """What is recorded; None: nothing."""
    kv_events: KVEventsOptions | None = None
    """Where KV events are published; None: nowhere."""
    stream_interval_s: float = 0.0
    """What streams get within less than this comes to their readers at once, except their first tokens and ends."""
    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that never goes back, by which the serving process measures waits and ages."""
    ahead: SpawnedWorker | None = None
    """The first worker's process, if it was started ahead of all else; its creator ends it if it is not taken.
    None: it is started when it is needed, as its successors are."""


async def open_link(options: WorkerOptions, handler: Handler) -> Link:
    """Start a device worker, with nothing loaded.

    Raises:
        UsageError: this system cannot hand a socket to a process, or a worker on a network does not believe us.
        ExecutorError: no process can be started.
        UnavailableError: no one listens at the address.
    """
    if options.kind == "thread":
        return ThreadLink(handler, options.trace, options.kv_events)
    if options.kind == "network":
        from lockstep.worker.network import NetworkLink

        assert options.address is not None, "a worker on a network has an address"
        return await NetworkLink.open(handler, options.address)
    spawned = options.ahead
    if spawned is None or not spawned.is_free:
        logs = options.log_format, options.log_level
        spawned = SpawnedWorker(*logs, options.trace, options.listen, options.kv_events)
    return await ProcessLink.open(handler, spawned)


class SpawnedWorker:
    """A worker process without commands so far: it imports what it needs, and touches nothing until the first.

    To be started on a thread that lives as long as the worker shall: on Linux the child ends with it.
    """

    def __init__(
        self,
        log_format: LogFormat,
        log_level: str,
        trace: TraceOptions | None = None,
        listen: ListenOptions | None = None,
        kv_events: KVEventsOptions | None = None,
    ) -> None:
        """Start the process.

        Raises:
            UsageError: this system cannot hand a socket to a process.
            ExecutorError: no process can be started.
        """
        if sys.platform == "win32":
            raise UsageError("worker processes need a Unix system; choose the worker thread here")
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ExecutorError(f"no worker process can be started: {error}") from error
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-P", "-m", MODULE, str(fd), str(os.getpid()), log_format, log_level]
            command += [
                "" if each is None else msgspec.json.encode(each).decode() for each in (trace, listen, kv_events)
            ]
            try:  # what it prints is no answer of ours: standard output goes where errors go
                self._process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=2)
            except OSError as error:
                ours.close()
                raise ExecutorError(f"no worker process can be started: {error}") from error
        ours.setblocking(False)
        self._sock = ours
        self.is_free = True
        """Whether no one has taken it, or ended it."""

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and our end of its socket, for who speaks to it from now on; once."""
        assert self.is_free, "a process is taken once"
        self.is_free = False
        return self._process, self._sock

    def discard(self) -> None:
        """End it, if no one has taken it."""
        if self.is_free:
            _end(*self.take())


class ProcessLink(asyncio.Protocol):
    """`Link` to a child process, over a socket pair. Made by `open`."""

    def __init__(self, handler: Handler, process: subprocess.Popen[bytes]) -> None:
        self.name = f"process {process.pid}"
        self._handler = handler
        self._process = process
        self._reader = FrameReader()
        self._decoder = event_decoder()
        self._encoder = command_encoder()
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._obituary: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, handler: Handler, spawned: SpawnedWorker) -> ProcessLink:
        """Speak to a worker process; it accepts commands at once and obeys when its imports are done."""
        process, sock = spawned.take()
        try:
            _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(handler, process), sock=sock)
        except BaseException:  # whoever opens it was cancelled: nobody would ever end it
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
        if isinstance(command, Submit) and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise QueueFullError(f"{MAX_UNSENT_BYTES} bytes of requests already wait for the worker; try again later")
        try:
            body = self._encoder.encode(command)
        except OverflowError as error:
            raise InvalidParameterError(f"a number of the request does not fit 64 bits ({error})") from None
        transport.write(framed(body))

    def kill(self) -> None:
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()  # also where it is in the hands of a device, and cannot even be killed

    async def close(self) -> None:
        self.send(Stop())
        self._is_closing = True
        if not await self._has_ended(STOP_LIMIT_S):
            log.warning("the worker process %d does not stop; closing its stream", self._process.pid)
        if self._transport is not None:
            self._transport.abort()
        if not await self._has_ended(EOF_LIMIT_S):
            log.warning("the worker process %d is stuck and is killed", self._process.pid)
            self._process.kill()
            await self._has_ended(EOF_LIMIT_S)
        if self._obituary is not None:
            await self._obituary

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
            self._obituary = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        """Find out how the process ended; one that closed its stream and lives on is killed."""
        if not await self._has_ended(EOF_LIMIT_S):
            self._process.kill()
            await self._has_ended(EOF_LIMIT_S)
        if not self._is_closing:
            self._handler.lost(_how(self._process.returncode))

    async def _has_ended(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        while self._process.poll() is None:
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(_POLL_INTERVAL_S)
        return True


class ThreadLink:
    """`Link` to a device worker in threads of this process. Make it inside a running event loop."""

    pid = None
    name = "a thread"

    def __init__(
        self, handler: Handler, trace: TraceOptions | None = None, kv_events: KVEventsOptions | None = None
    ) -> None:
        from lockstep.worker.device import DeviceWorker  # engines are imported by whoever runs one

        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._worker = DeviceWorker(lambda event: self._tell(handler.received, event), trace=trace, kv_events=kv_events)
        self._steps = threading.Thread(target=self._run, name="lockstep-steps", daemon=True)
        self._steps.start()
        threading.Thread(target=self._receive, name="lockstep-receive", daemon=True).start()

    def send(self, command: Command) -> None:
        if isinstance(command, Submit) and self._commands.qsize() >= MAX_COMMANDS:
            raise QueueFullError(f"{MAX_COMMANDS} commands already wait for the worker; try again later")
        self._commands.put(command)

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        self._commands.put(Stop())
        await asyncio.to_thread(self._steps.join, JOIN_LIMIT_S)

    def _receive(self) -> None:
        while True:
            command = self._commands.get()
            self._worker.handle(command)
            if isinstance(command, Stop):
                return

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:  # it has been logged, and every request was told
            self._tell(self._handler.lost, repr(error))
            self._commands.put(Stop())

    def _tell(self, function: Callable[[Any], None], value: Event | str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no one listens any more
            self._loop.call_soon_threadsafe(function, value)


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()


def _how(code: int | None) -> str:
    if code is None:
        return "no answer"
    return signal_name(-code) if code < 0 else f"exit code {code}"
