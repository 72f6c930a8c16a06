"""Link over a network to a device worker of another process; the other end is `lockstep.worker.remote_clients`.

The worker is shared: closing the link ends what came over it, and not the worker. Killing it for hanging only
closes the connection, and what it sends later is dropped.
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
"""Commands that the worker has not read; beyond it requests are refused."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Address of a worker that listens, and how it is spoken to."""

    host: str
    port: int
    secret_file: str
    tls_ca: str = ""
    """Whose certificates are believed; empty: no TLS."""
    allows_plain: bool = False
    """Whether prompts may travel in clear beyond this machine."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class NetworkLink(asyncio.Protocol):
    """`Link` over TCP, with TLS or without. Made by `open`."""

    pid = None

    def __init__(self, handler: Handler, name: str, secret: bytes) -> None:
        self.name = name
        self._handler = handler
        self._handshake: GatewayHandshake | None = GatewayHandshake(
            secret, __version__, secrets.token_bytes(NONCE_BYTES)
        )
        """None: it is done."""
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = FrameReader()
        self._decoder = event_decoder()
        self._encoder = command_encoder()
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._fault = ""
        """Why this end hung up."""

    @classmethod
    async def open(cls, handler: Handler, address: WorkerAddress) -> NetworkLink:
        """Connect, and wait until each end has proved to the other who it is.

        Raises:
            UsageError: the secret or the certificates cannot be used, or prompts would travel in clear.
            LinkRefusedError: the worker has another secret or version.
            UnavailableError: nobody answers there.
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

    def send(self, command: Command) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or isinstance(command, Stop):
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
        assert self._handshake is not None, "no message has come yet"
        self._transport = transport
        transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                data = self._shake(self._handshake, data)
            for body in self._reader.feed(data):
                self._hear(body)
        except (LinkRefusedError, msgspec.MsgspecError, ValueError) as error:
            self._fault = str(error)
            if not self._welcome.done():
                self._welcome.set_exception(error if isinstance(error, LinkRefusedError) else UsageError(str(error)))
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionResetError("it hung up"))
        elif not self._is_closing and self._welcome.exception() is None:
            self._handler.lost(self._fault or f"a link that was cut ({error or 'the other end hung up'})")

    def _shake(self, handshake: GatewayHandshake, data: bytes) -> bytes:
        assert self._transport is not None, "bytes come over it"
        self._transport.write(handshake.feed(data))
        if not handshake.is_done:
            return b""
        self._handshake = None
        return handshake.rest

    def _hear(self, body: bytes) -> None:
        event = self._decoder.decode(body)
        self._handler.received(event)
        if isinstance(event, Welcome) and not self._welcome.done():
            self._welcome.set_result(None)


def _reason(error: OSError) -> str:
    """A failed connection in words; `TimeoutError` is an `OSError`."""
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
