"""Events on their way out of a worker process: sent at once where the socket takes them, kept in order where not.

The engine's thread sends what a step brought by itself, which costs a system call and no change of threads. Only what a
slow reader leaves over goes to a thread that may block.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque

from lockstep.worker.messages import Event
from lockstep.worker.wire import event_encoder, framed

log = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 256 << 20
"""A server that leaves so much unread is stuck for good; the worker ends, and with it what nobody would read."""
EXIT_UNREAD = 75
"""Exit code of a worker whose events nobody reads."""


class Outbox:
    """Posts events to a socket, from any thread, without ever waiting."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._encoder = event_encoder()
        self._backlog: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._send_backlog, name="lockstep-outbox", daemon=True).start()

    def post(self, event: Event) -> None:
        """Send, or keep for the thread that waits for the reader."""
        with self._changed:
            data = framed(self._encoder.encode(event))
            sent = 0
            if not self._backlog:
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:  # nobody is there any more, which the receiving thread finds out as well
                    return
            if sent < len(data):
                self._keep(data[sent:])

    def flush(self, limit_s: float) -> None:
        """Wait until everything is sent, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog, limit_s)

    def _keep(self, data: bytes) -> None:
        self._backlog.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BACKLOG_BYTES:
            log.critical("%d bytes of events are unread; the worker ends", self._num_bytes)
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
