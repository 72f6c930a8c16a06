"""Remote clients of a device worker: serves gateways that connect over a network, besides the process that started it.

Only the parent process loads, unloads and stops; remote clients send requests and queries. An id identifies its client
(`messages.IDS_PER_CLIENT`), so events are routed by their ids. Events of a whole replica go to all clients. One thread
handles every connection. A client that violates the protocol, or does not read its events, loses only its own
connection and the requests sent over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import ssl
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lockstep.errors import LinkRefusedError, UsageError
from lockstep.system import SYSTEM, System
from lockstep.version import __version__
from lockstep.worker.handshake import LIMIT_S, NONCE_BYTES, WorkerHandshake, check_secret
from lockstep.worker.messages import (
    IDS_PER_CLIENT,
    Abort,
    Answered,
    Ask,
    Command,
    ContentsChanged,
    Event,
    Loaded,
    Outputs,
    Refused,
    Submit,
    Unloaded,
    Welcome,
)
from lockstep.worker.wire import FrameReader, command_decoder, event_encoder, framed, refusal_of

log = logging.getLogger(__name__)

MAX_CLIENTS = 64
MAX_UNAUTHENTICATED = 64
"""Maximum number of connections that are not authenticated yet. Further ones are closed at once."""
MAX_UNREAD_BYTES = 64 << 20
"""Maximum size of events that a client has not read. A client that exceeds it is disconnected."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ListenOptions(msgspec.Struct, frozen=True):
    """Options of a worker's listening socket: its address and its authentication."""

    host: str
    port: int
    """Port to listen on; 0: any free port."""
    secret_file: str
    tls_cert: str = ""
    """Path of a PEM file with the certificate; empty: no TLS."""
    tls_key: str = ""
    allows_plain: bool = False
    """Whether prompts may be sent unencrypted to other machines."""


def read_secret(path: str) -> bytes:
    """Read the secret that gateways and workers share.

    Raises:
        UsageError: it cannot be read, or is not valid.
    """
    try:
        return check_secret(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise UsageError(
            f"{path}: the secret cannot be read: {error.strerror}; create a file with the same random text on each host"
            " (openssl rand -hex 32)"
        ) from None
    except LinkRefusedError as error:
        raise UsageError(f"{path}: {error}") from None


def check_plain(host: str, has_tls: bool, allows_plain: bool) -> None:
    """Check that prompts do not leave this machine unencrypted, unless `allows_plain` is set.

    Raises:
        UsageError: they would.
    """
    if host not in LOOPBACK and not has_tls and not allows_plain:
        raise UsageError(
            f"{host} is another machine, and prompts would be sent to it unencrypted; set a certificate and a key,"
            " or allow plain text on a trusted network"
        )


class RemoteClients:
    """Listening socket and connections, in one thread that `start` starts.

    Args:
        execute: receives the clients' commands, on that thread.
    """

    def __init__(self, options: ListenOptions, execute: Callable[[Command], None], system: System = SYSTEM) -> None:
        """Load the secret and the certificate.

        Raises:
            UsageError: a secret or certificate is not usable, or prompts would be sent unencrypted.
        """
        check_plain(options.host, bool(options.tls_cert), options.allows_plain)
        self._options, self._system = options, system
        self._tls = _tls_of(options)
        self.secret = read_secret(options.secret_file)
        self.execute = execute
        self.connections: dict[int, RemoteClient] = {}
        """Connections by client number, from 1. The parent process has the ids below those of client 1."""
        self.num_unauthenticated = 0
        self._numbers = itertools.count(1)
        self.loaded: dict[str, Loaded] = {}
        self.contents: dict[str, dict[bytes, bool]] = {}
        """Contents of each replica's cache, for clients that connect later."""
        self._loop = asyncio.new_event_loop()
        self._encoder = event_encoder()

    def start(self) -> tuple[str, int]:
        """Start to listen and return the address.

        Raises:
            UsageError: the address is not available.
        """
        options = self._options
        listening = self._loop.create_server(lambda: RemoteClient(self), options.host, options.port, ssl=self._tls)
        try:
            server = self._loop.run_until_complete(listening)
        except OSError as error:
            raise UsageError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
        self._system.start_thread(self._loop.run_forever, "lockstep-clients")
        host, port = server.sockets[0].getsockname()[:2]
        return host, port

    def publish(self, event: Event) -> None:
        """Send an event to the clients that it concerns. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._publish, event)

    # -- the clients' thread ---------------------------------------------------------------------------------------

    def register(self, client: RemoteClient) -> int:
        """Register an authenticated client and return its number."""
        number = next(self._numbers)
        self.connections[number] = client
        client.send(framed(self._encoder.encode(Welcome(number * IDS_PER_CLIENT))))
        for event in self.loaded.values():
            client.send(framed(self._encoder.encode(event)))
        for replica, held in self.contents.items():
            client.send(framed(self._encoder.encode(ContentsChanged(replica, list(held.items())))))
        return number

    def _publish(self, event: Event) -> None:
        match event:
            case Loaded(replica):
                self.loaded[replica] = event
            case Unloaded(replica):
                self.loaded.pop(replica, None)
                self.contents.pop(replica, None)
            case ContentsChanged(replica, news):
                held = self.contents.setdefault(replica, {})
                for content, is_held in news:
                    if is_held:
                        held[content] = True
                    else:
                        held.pop(content, None)
        for number, each in routed(event, self.connections):
            client = self.connections.get(number)
            if client is not None:
                client.post(framed(self._encoder.encode(each)), each)


def routed(event: Event, clients: Iterable[int]) -> Iterator[tuple[int, Event]]:
    """Split an event by recipient and yield each client's number and part; 0 is the parent process."""
    match event:
        case Refused(request_id):
            yield request_id // IDS_PER_CLIENT, event
        case Answered(ask_id):
            yield ask_id // IDS_PER_CLIENT, event
        case Outputs():
            yield from _split_by_client(event)
        case ContentsChanged():
            for number in tuple(clients):
                yield number, event
        case _:
            yield 0, event
            for number in tuple(clients):
                yield number, event


def _split_by_client(event: Outputs) -> Iterator[tuple[int, Outputs]]:
    """Split a step's outputs by client. The step's statistics go to the parent process."""
    numbers = dict.fromkeys([request_id // IDS_PER_CLIENT for request_id in event.accepted])
    for several in (event.outputs, event.started, event.waits):
        numbers |= dict.fromkeys([each.request_id // IDS_PER_CLIENT for each in several])
    if list(numbers) in ([0], []):
        yield 0, event
        return
    if event.step is not None:
        numbers.setdefault(0)
    for number in numbers:
        yield (
            number,
            Outputs(
                [each for each in event.accepted if each // IDS_PER_CLIENT == number],
                [each for each in event.outputs if each.request_id // IDS_PER_CLIENT == number],
                None if number else event.step,
                [each for each in event.started if each.request_id // IDS_PER_CLIENT == number],
                [each for each in event.waits if each.request_id // IDS_PER_CLIENT == number],
            ),
        )


class RemoteClient(asyncio.Protocol):
    """One connection: unauthenticated until the handshake is done, then a client."""

    def __init__(self, clients: RemoteClients) -> None:
        self._clients = clients
        self._handshake: WorkerHandshake | None = WorkerHandshake(
            clients.secret, __version__, secrets.token_bytes(NONCE_BYTES)
        )
        """Handshake of the connection; None: it is complete."""
        self._number = 0
        self._reader = FrameReader()
        self._decoder = command_decoder()
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._open: dict[int, str] = {}
        """Open requests and their replicas."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if TYPE_CHECKING:
            assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._clients.num_unauthenticated += 1
        if self._clients.num_unauthenticated > MAX_UNAUTHENTICATED:
            transport.abort()
            return
        self._limit = asyncio.get_running_loop().call_later(LIMIT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None and len(self._clients.connections) >= MAX_CLIENTS:
                raise LinkRefusedError(f"the limit of {MAX_CLIENTS} connected gateways is reached")
            if self._handshake is not None:
                data = self._feed_handshake(self._handshake, data)
            for body in self._reader.feed(data):
                self._execute(body)
        except (LinkRefusedError, msgspec.MsgspecError, ValueError) as error:
            log.warning("closing the link to %s: %s", self._peer, error)
            self._disconnect(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._handshake is not None:
            self._clients.num_unauthenticated -= 1
            return
        self._clients.connections.pop(self._number, None)
        by_replica: dict[str, list[int]] = {}
        for request_id, replica in self._open.items():
            by_replica.setdefault(replica, []).append(request_id)
        for replica, request_ids in by_replica.items():
            self._clients.execute(Abort(replica, tuple(request_ids)))

    def post(self, data: bytes, event: Event) -> None:
        """Send an event, or disconnect the client if too much is unread."""
        self._drop_ended(event)
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("closing the link to %s: more than %d bytes of events are unread", self._peer, MAX_UNREAD_BYTES)
            transport.abort()
            return
        self.send(data)

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def _peer(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return "a client" if not peer else f"{peer[0]}:{peer[1]}"

    def _feed_handshake(self, handshake: WorkerHandshake, data: bytes) -> bytes:
        self.send(handshake.feed(data))
        if not handshake.is_done:
            return b""
        assert self._limit is not None, "connection_made sets the limit"
        self._limit.cancel()
        self._clients.num_unauthenticated -= 1
        self._handshake = None
        self._number = self._clients.register(self)
        return handshake.rest

    def _execute(self, body: bytes) -> None:
        """Execute a command.

        Raises:
            LinkRefusedError: remote clients may not send this command.
        """
        try:
            command = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            self.send(framed(event_encoder().encode(refusal_of(body, error))))
            return
        match command:
            case Submit(request_id, replica) if self._is_own(request_id):
                self._open[request_id] = replica
            case Abort(_, request_ids) if all(map(self._is_own, request_ids)):
                pass
            case Ask(ask_id) if self._is_own(ask_id):
                pass
            case _:
                raise LinkRefusedError(f"a remote client may not send {type(command).__name__} with these ids")
        self._clients.execute(command)

    def _is_own(self, number: int) -> bool:
        return number // IDS_PER_CLIENT == self._number

    def _drop_ended(self, event: Event) -> None:
        match event:
            case Outputs(outputs=outputs):
                for output in outputs:
                    if output.request is not None or output.error is not None:
                        self._open.pop(output.request_id, None)
            case Refused(request_id):
                self._open.pop(request_id, None)

    def _disconnect(self, error: Exception) -> None:
        if self._handshake is not None and isinstance(error, LinkRefusedError):
            self.send(self._handshake.refusal(error))
        if self._transport is not None:
            self._transport.close()


def _tls_of(options: ListenOptions) -> ssl.SSLContext | None:
    if not options.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        key = str(Path(options.tls_key).expanduser()) if options.tls_key else None
        context.load_cert_chain(Path(options.tls_cert).expanduser(), key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{options.tls_cert}: the certificate cannot be used: {error}") from None
    return context
