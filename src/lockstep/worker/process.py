"""A device worker in a child process: no contention for the interpreter, and a native crash ends nothing but it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from lockstep.errors import ExecutorError, InvalidParameterError, QueueFullError, UsageError
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.link import Handler
from lockstep.worker.logs import LogFormat
from lockstep.worker.messages import Command, Stop, Submit
from lockstep.worker.trial import signal_name
from lockstep.worker.wire import FrameReader, command_encoder, event_decoder, framed

log = logging.getLogger(__name__)

MODULE = "lockstep.worker.child"
MAX_UNSENT_BYTES = 64 << 20
"""Commands that the worker has not read; beyond it requests are refused."""
STOP_LIMIT_S = 5.0
"""For an orderly end; then the stream is closed, at which the worker ends at once unless it is stuck."""
EOF_LIMIT_S = 1.0
"""For that; then the process is killed."""
_POLL_INTERVAL_S = 0.005


class SpawnedWorker:
    """A worker process to which nobody speaks yet: it imports what it needs, and touches nothing until it is told to.

    To be started on a thread that lives as long as the worker shall: on Linux the child ends with it.
    """

    def __init__(self, log_format: LogFormat, log_level: str, trace: TraceOptions | None = None) -> None:
        """Start it.

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
            command.append("" if trace is None else msgspec.json.encode(trace).decode())
            try:  # what it prints is no answer of ours: standard output goes where errors go
                self._process = subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=2)
            except OSError as error:
                ours.close()
                raise ExecutorError(f"no worker process can be started: {error}") from error
        ours.setblocking(False)
        self._sock = ours
        self.is_free = True
        """Whether nobody has taken it, or ended it."""

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and our end of its socket, for who speaks to it from now on; once."""
        assert self.is_free, "a process is taken once"
        self.is_free = False
        return self._process, self._sock

    def discard(self) -> None:
        """End it, if nobody has taken it."""
        if self.is_free:
            _end(*self.take())


def _end(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()


class ProcessLink(asyncio.Protocol):
    """Implements `lockstep.worker.link.Link`. Made by `open`."""

    def __init__(self, handler: Handler, process: subprocess.Popen[bytes]) -> None:
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


def _how(code: int | None) -> str:
    if code is None:
        return "no answer"
    return signal_name(-code) if code < 0 else f"exit code {code}"
