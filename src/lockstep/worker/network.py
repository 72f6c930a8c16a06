"""Network link: connects to a device worker of another process; the other end is `lockstep.worker.remote_clients`.

The worker is shared. Closing the link ends its requests, but not the worker. Killing a worker that hangs only closes
the connection, and its later events are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lockstep.errors import InvalidParameterError, LinkRefusedError, QueueFullError, UnavailableError, UsageError
from lockstep.version import __version__
from lockstep.worker.handshake import LIMIT_S, NONCE_BYTES, GatewayHandshake
from lockstep.worker.messages import Command, Handler, Stop, Submit, Welcome
from lockstep.worker.remote_clients import check_plain, read_secret
from lockstep.worker.wire import FrameReader, command_encoder, event_decoder, framed

MAX_UNSENT_BYTES = 64 << 20
"""Maximum size of commands that the worker has not read. Beyond it, requests are rejected."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Address of a worker, with the credentials for the connection."""

    host: str
    port: int
    secret_file: str
    tls_ca: str = ""
    """File of trusted CA certificates; empty: no TLS."""
    allows_plain: bool = False
    """Whether prompts may be sent unencrypted to other machines."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class NetworkLink(asyncio.Protocol):
    """`Link` over TCP, with or without TLS. Created by `open`."""

    pid = None

    def __init__(self, handler: Handler, name: str, secret: bytes) -> None:
        self.name = name
        self._handler = handler
        self._handshake: GatewayHandshake | None = GatewayHandshake(
            secret, __version__, secrets.token_bytes(NONCE_BYTES)
        )
        """Handshake of the connection; None: it is complete."""
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = FrameReader()
        self._decoder = event_decoder()
        self._encoder = command_encoder()
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._fault = ""
        """The reason why this end closed the connection."""

    @classmethod
    async def open(cls, handler: Handler, address: WorkerAddress) -> NetworkLink:
        """Connect, and wait until both ends have authenticated.

        Raises:
            UsageError: the secret or the certificates cannot be used, or prompts would be sent unencrypted.
            LinkRefusedError: the worker has another secret or version.
            UnavailableError: no worker answers at the address.
        """
        check_plain(address.host, bool(address.tls_ca), address.allows_plain)
        secret = read_secret(address.secret_file)
        tls = _tls_of(address)
        loop = asyncio.get_running_loop()
        link: NetworkLink | None = None
        try:
            async with asyncio.timeout(LIMIT_S):
                connecting = loop.create_connection(
                    lambda: cls(handler, str(address), secret), address.host, address.port, ssl=tls
                )
                _, link = await connecting
                await link._welcome
        except (OSError, TimeoutError) as error:  # an SSLError is an OSError
            if link is not None:
                link.kill()
            reason = _reason(error)
            raise UnavailableError(f"the worker at {address} cannot be reached: {reason}") from None
        except BaseException:
            if link is not None:
                link.kill()
            raise
        return link

    @property
    def is_open(self) -> bool:
        """True while commands reach the worker."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, command: Command) -> None:
        transport = self._transport
        if transport is None or not self.is_open or isinstance(command, Stop):
            return
        if isinstance(command, Submit) and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise QueueFullError(f"{MAX_UNSENT_BYTES} bytes of requests already wait for the worker; try again later")
        try:
            body = self._encoder.encode(command)
        except OverflowError as error:
            raise InvalidParameterError(f"a number of the request does not fit 64 bits ({error})") from None
        transport.write(framed(body))

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self._closed)
            self._transport.abort()

    # -- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if TYPE_CHECKING:
            assert isinstance(transport, asyncio.Transport)
        assert self._handshake is not None, "the handshake comes before any message"
        self._transport = transport
        transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                data = self._feed_handshake(self._handshake, data)
            for body in self._reader.feed(data):
                self._handle(body)
        except (LinkRefusedError, msgspec.MsgspecError, ValueError) as error:
            self._fault = str(error)
            if not self._welcome.done():
                self._welcome.set_exception(error if isinstance(error, LinkRefusedError) else UsageError(str(error)))
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionResetError("the connection was closed"))
        elif not self._is_closing and self._welcome.exception() is None:
            self._handler.lost(self._fault or f"a lost connection ({error or 'closed by the other end'})")

    def _feed_handshake(self, handshake: GatewayHandshake, data: bytes) -> bytes:
        assert self._transport is not None, "the transport delivers the bytes"
        self._transport.write(handshake.feed(data))
        if not handshake.is_done:
            return b""
        self._handshake = None
        return handshake.rest

    def _handle(self, body: bytes) -> None:
        event = self._decoder.decode(body)
        self._handler.received(event)
        if isinstance(event, Welcome) and not self._welcome.done():
            self._welcome.set_result(None)


def _reason(error: OSError) -> str:
    """Description of a failed connection. `TimeoutError` is an `OSError`."""
    if isinstance(error, ssl.SSLError) or error.errno is None or error.errno < 0:
        return str(error) or f"no answer within {LIMIT_S:g} s"
    return os.strerror(error.errno)


def _tls_of(address: WorkerAddress) -> ssl.SSLContext | None:
    if not address.tls_ca:
        return None
    try:
        return ssl.create_default_context(cafile=Path(address.tls_ca).expanduser())
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{address.tls_ca}: its certificates cannot be used: {error}") from None
