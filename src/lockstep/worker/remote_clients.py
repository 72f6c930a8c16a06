"""Remote clients of a device worker: gateways that connect to it over a network, beside the process that started it.

That process loads, frees and stops; remote clients query and send requests. An id names its client
(`messages.GUEST_IDS`), so events are routed by ids; what concerns a whole replica goes to all. One thread has every
connection. What a client does wrong, or leaves unread, ends its own connection and the requests that came over it, and
nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lockstep.errors import LinkRefusedError, UsageError
from lockstep.version import __version__
from lockstep.worker.handshake import LIMIT_S, NONCE_BYTES, WorkerHandshake, check_secret
from lockstep.worker.messages import (
    GUEST_IDS,
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

MAX_GUESTS = 64
MAX_STRANGERS = 64
"""Connections that have not proved yet who they are; more are closed at once."""
MAX_UNREAD_BYTES = 64 << 20
"""Events that a client has not read; one that leaves more is disconnected."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ListenOptions(msgspec.Struct, frozen=True):
    """Listening end of a worker: its address, and whom it believes."""

    host: str
    port: int
    """0: any that is free."""
    secret_file: str
    tls_cert: str = ""
    """Empty: no TLS."""
    tls_key: str = ""
    allows_plain: bool = False
    """Whether prompts may travel in clear beyond this machine."""


def read_secret(path: str) -> bytes:
    """The secret that gateways and workers share.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return check_secret(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise UsageError(
            f"{path}: the secret cannot be read: {error.strerror}; it is a file with the same random text on each host,"
            " e.g. of `openssl rand -hex 32`"
        ) from None
    except LinkRefusedError as error:
        raise UsageError(f"{path}: {error}") from None


def check_plain(host: str, has_tls: bool, allows_plain: bool) -> None:
    """UsageError if prompts would travel in clear beyond this machine without `allow_plain`."""
    if host not in LOOPBACK and not has_tls and not allows_plain:
        raise UsageError(
            f"{host} is beyond this machine, and prompts would travel in clear; give a certificate and a key,"
            " or say that the network may be trusted"
        )


class RemoteClients:
    """The listening end: connections in one thread, which `start` starts.

    Args:
        obey: takes the commands of clients, on that thread.
    """

    def __init__(self, options: ListenOptions, obey: Callable[[Command], None]) -> None:
        """Read what it takes to listen.

        Raises:
            UsageError: a secret or certificate that cannot be used, or prompts that would travel in clear.
        """
        check_plain(options.host, bool(options.tls_cert), options.allows_plain)
        self._options = options
        self._tls = _tls_of(options)
        self.secret = read_secret(options.secret_file)
        self.obey = obey
        self.connections: dict[int, RemoteClient] = {}
        """By number, from 1: the ids of the starting process are those below the first client's."""
        self.num_strangers = 0
        self._numbers = itertools.count(1)
        self.loaded: dict[str, Loaded] = {}
        self.contents: dict[str, dict[bytes, bool]] = {}
        """What each replica's cache holds, for those who come later."""
        self._loop = asyncio.new_event_loop()
        self._encoder = event_encoder()

    def start(self) -> tuple[str, int]:
        """Listen; returns where.

        Raises:
            UsageError: the address cannot be had.
        """
        options = self._options
        listening = self._loop.create_server(lambda: RemoteClient(self), options.host, options.port, ssl=self._tls)
        try:
            server = self._loop.run_until_complete(listening)
        except OSError as error:
            raise UsageError(f"{options.host}:{options.port} cannot be listened at: {error.strerror}") from None
        threading.Thread(target=self._loop.run_forever, name="lockstep-clients", daemon=True).start()
        host, port = server.sockets[0].getsockname()[:2]
        return host, port

    def tell(self, event: Event) -> None:
        """Send an event to those whom it concerns; on any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._tell, event)

    # -- the guests' thread ---------------------------------------------------------------------------------------

    def enter(self, guest: RemoteClient) -> int:
        """A number for a client that has proved its secret."""
        number = next(self._numbers)
        self.connections[number] = guest
        guest.send(framed(self._encoder.encode(Welcome(number * GUEST_IDS))))
        for event in self.loaded.values():
            guest.send(framed(self._encoder.encode(event)))
        for replica, held in self.contents.items():
            guest.send(framed(self._encoder.encode(ContentsChanged(replica, list(held.items())))))
        return number

    def _tell(self, event: Event) -> None:
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
        for number, each in addressed(event, self.connections):
            guest = self.connections.get(number)
            if guest is not None:
                guest.post(framed(self._encoder.encode(each)), each)


def addressed(event: Event, guests: Iterable[int]) -> Iterator[tuple[int, Event]]:
    """Those whom an event concerns, by numbers, and what of it; 0 is the owner."""
    match event:
        case Refused(request_id):
            yield request_id // GUEST_IDS, event
        case Answered(ask_id):
            yield ask_id // GUEST_IDS, event
        case Outputs():
            yield from _shares(event)
        case ContentsChanged():
            for number in tuple(guests):
                yield number, event
        case _:
            yield 0, event
            for number in tuple(guests):
                yield number, event


def _shares(event: Outputs) -> Iterator[tuple[int, Outputs]]:
    """Shares that each gets of a step's outputs; the step's figures are the owner's."""
    numbers = dict.fromkeys([request_id // GUEST_IDS for request_id in event.accepted])
    for several in (event.outputs, event.started, event.waits):
        numbers |= dict.fromkeys([each.request_id // GUEST_IDS for each in several])
    if list(numbers) in ([0], []):
        yield 0, event
        return
    if event.step is not None:
        numbers.setdefault(0)
    for number in numbers:
        yield (
            number,
            Outputs(
                [each for each in event.accepted if each // GUEST_IDS == number],
                [each for each in event.outputs if each.request_id // GUEST_IDS == number],
                None if number else event.step,
                [each for each in event.started if each.request_id // GUEST_IDS == number],
                [each for each in event.waits if each.request_id // GUEST_IDS == number],
            ),
        )


class RemoteClient(asyncio.Protocol):
    """One connection: unknown until the handshake is done, then a client."""

    def __init__(self, guests: RemoteClients) -> None:
        self._guests = guests
        self._handshake: WorkerHandshake | None = WorkerHandshake(
            guests.secret, __version__, secrets.token_bytes(NONCE_BYTES)
        )
        """None: it is done."""
        self._number = 0
        self._reader = FrameReader()
        self._decoder = command_decoder()
        self._transport: asyncio.Transport | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._open: dict[int, str] = {}
        """Requests under way, and their replicas."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if TYPE_CHECKING:
            assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._guests.num_strangers += 1
        if self._guests.num_strangers > MAX_STRANGERS:
            transport.abort()
            return
        self._limit = asyncio.get_running_loop().call_later(LIMIT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None and len(self._guests.connections) >= MAX_GUESTS:
                raise LinkRefusedError(f"{MAX_GUESTS} gateways are connected already")
            if self._handshake is not None:
                data = self._shake(self._handshake, data)
            for body in self._reader.feed(data):
                self._obey(body)
        except (LinkRefusedError, msgspec.MsgspecError, ValueError) as error:
            log.warning("the link to %s ends: %s", self._who, error)
            self._hang_up(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        if self._handshake is not None:
            self._guests.num_strangers -= 1
            return
        self._guests.connections.pop(self._number, None)
        by_replica: dict[str, list[int]] = {}
        for request_id, replica in self._open.items():
            by_replica.setdefault(replica, []).append(request_id)
        for replica, request_ids in by_replica.items():
            self._guests.obey(Abort(replica, tuple(request_ids)))

    def post(self, data: bytes, event: Event) -> None:
        """Send an event, unless too much is unread already."""
        self._note_ends(event)
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.warning("the link to %s ends: %d bytes of events are unread", self._who, MAX_UNREAD_BYTES)
            transport.abort()
            return
        self.send(data)

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def _who(self) -> str:
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return "a client" if not peer else f"{peer[0]}:{peer[1]}"

    def _shake(self, handshake: WorkerHandshake, data: bytes) -> bytes:
        self.send(handshake.feed(data))
        if not handshake.is_done:
            return b""
        assert self._limit is not None, "it was set when the connection was made"
        self._limit.cancel()
        self._guests.num_strangers -= 1
        self._handshake = None
        self._number = self._guests.enter(self)
        return handshake.rest

    def _obey(self, body: bytes) -> None:
        """Execute a command that clients may send; LinkRefusedError for any other."""
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
                raise LinkRefusedError(f"a remote client may not send {type(command).__name__} with such ids")
        self._guests.obey(command)

    def _is_own(self, number: int) -> bool:
        return number // GUEST_IDS == self._number

    def _note_ends(self, event: Event) -> None:
        match event:
            case Outputs(outputs=outputs):
                for output in outputs:
                    if output.request is not None or output.error is not None:
                        self._open.pop(output.request_id, None)
            case Refused(request_id):
                self._open.pop(request_id, None)

    def _hang_up(self, error: Exception) -> None:
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
