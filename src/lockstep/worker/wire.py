"""Wire format of messages: encodes messages as msgpack frames, including errors, vectors and paths.

Format of a frame: uint32 little-endian length, then one msgpack array whose first element names the message.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections import deque
from pathlib import Path
from typing import Any, get_origin

import msgspec
import numpy as np

from lockstep import errors
from lockstep.engine.request import GenerationRequest
from lockstep.errors import InvalidParameterError, LockstepError
from lockstep.system import SYSTEM, System
from lockstep.worker.messages import Command, Event, Refused, Submit

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a message in bytes. The largest ones are vocabularies (megabytes) and long prompts."""
_PLAIN = (str, int, float, bool, type(None))
_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, LockstepError)
}
"""Error classes that a message may name."""


def command_encoder() -> msgspec.msgpack.Encoder:
    """Create an encoder. Encoders and decoders must not be shared by threads."""
    return msgspec.msgpack.Encoder(enc_hook=_encode)


event_encoder = command_encoder
request_encoder = command_encoder


def command_decoder() -> msgspec.msgpack.Decoder[Command]:
    return msgspec.msgpack.Decoder(Command, dec_hook=_decode)


def event_decoder() -> msgspec.msgpack.Decoder[Event]:
    return msgspec.msgpack.Decoder(Event, dec_hook=_decode)


def request_decoder() -> msgspec.msgpack.Decoder[GenerationRequest]:
    """Create a decoder for stored requests."""
    return msgspec.msgpack.Decoder(GenerationRequest, dec_hook=_decode)


def framed(body: bytes) -> bytes:
    """Add the frame header to an encoded message."""
    return HEADER.pack(len(body)) + body


def refusal_of(body: bytes, error: msgspec.ValidationError) -> Refused:
    """The answer to a request that does not fit its types, which is an error of the request, not of the worker.

    Raises:
        msgspec.ValidationError: the message was not a request, so the peer does not use this format.
    """
    match msgspec.msgpack.decode(body):
        case [Submit.__name__, int(request_id), *_]:
            return Refused(request_id, InvalidParameterError(f"the request has a value of a wrong type: {error}"))
    raise error


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """Bytes of an incomplete frame."""
        self._wanted_bytes = HEADER.size
        """Number of bytes that complete the frame, as far as it is known."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the bodies of the complete frames, in order.

        Raises:
            ValueError: a frame has an impossible length, so the peer does not use this format.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted_bytes:
                return []
            data = bytes(self._rest)
        bodies: list[bytes] = []
        self._wanted_bytes = HEADER.size
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            (length,) = HEADER.unpack_from(data, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame has {length} bytes; the limit is {MAX_FRAME_BYTES}")
            if end - at - HEADER.size < length:
                self._wanted_bytes += length
                break
            at += HEADER.size
            bodies.append(data[at : at + length])
            at += length
        self._rest = bytearray(data[at:])
        return bodies


def _encode(value: object) -> object:
    if isinstance(value, LockstepError):
        known = next(kind for kind in type(value).__mro__ if _ERRORS.get(kind.__name__) is kind)
        attributes = {key: held if isinstance(held, _PLAIN) else str(held) for key, held in vars(value).items()}
        return known.__name__, str(value), attributes
    if isinstance(value, np.ndarray):
        return value.astype("<f4").tobytes()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a message cannot contain {type(value).__name__}")


def _decode(kind: type, value: Any) -> object:
    if kind is LockstepError:
        name, message, attributes = msgspec.convert(value, tuple[str, str, dict[str, str | int | float | bool | None]])
        known = _ERRORS.get(name, LockstepError)
        error = known.__new__(known, message)
        vars(error).update(attributes)
        return error
    if kind is Path:
        return Path(value)
    if get_origin(kind) is np.ndarray or kind is np.ndarray:
        return np.frombuffer(value, "<f4")
    raise TypeError(f"a message cannot contain {kind.__name__}")


log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 256 << 20
"""Maximum size of unsent events. A server that leaves more unread is stuck, so the worker exits and the events are
lost."""
EXIT_UNREAD = 75
"""Exit code of a worker whose events are not read."""


class Outbox:
    """Sends events to a socket, from any thread and without blocking: at once if the socket accepts them, else queued
    in order.

    The engine's thread itself sends the outputs of a step, which costs a system call but no thread switch. Only what a
    slow reader does not accept is sent by a thread that may block.
    """

    def __init__(self, sock: socket.socket, system: System = SYSTEM) -> None:
        self._socket = sock
        self._encoder = event_encoder()
        self._backlog: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        system.start_thread(self._send_backlog, "lockstep-outbox")

    def post(self, event: Event) -> None:
        """Send an event, or queue it for the sending thread."""
        with self._changed:
            data = framed(self._encoder.encode(event))
            sent = 0
            if not self._backlog:
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:  # the peer is gone, which the receiving thread detects as well
                    return
            if sent < len(data):
                self._keep(data[sent:])

    def flush(self, limit_s: float) -> None:
        """Wait until everything is sent, within a time limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog, limit_s)

    def _keep(self, data: bytes) -> None:
        self._backlog.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BACKLOG_BYTES:
            log.critical("%d bytes of events are unread; the worker exits", self._num_bytes)
            os._exit(EXIT_UNREAD)
        self._changed.notify_all()

    def _send_backlog(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog)
                data = self._backlog[0]
            try:
                self._socket.sendall(data)
            except OSError:  # as above
                return
            with self._changed:
                self._backlog.popleft()
                self._num_bytes -= len(data)
                self._changed.notify_all()
