"""HTTP protocol for uvicorn: adds limits on the size, number and arrival time of headers, and on connections.

httptools collects headers of any size and waits for them indefinitely. This is the only module that depends on
uvicorn's internals.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lockstep.server.errors import HttpError

MAX_HEADERS = 128
"""Maximum number of headers per request."""
HEADER_TIMEOUT_S = 15.0
"""Time limit, in seconds, from connecting or from the first byte of a request until its headers are complete."""
MAX_CONNECTIONS = 8_192
"""Maximum number of open connections, including idle ones. Further connections are closed immediately."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits. A rejected request never reaches the application; the connection is closed after the
    error."""

    def __init__(self, *args: Any, max_header_bytes: int, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_header_bytes = max_header_bytes
        self._header_timeout_s = header_timeout_s
        self._is_reading_headers = True
        self._num_header_bytes = 0
        self._refusal: HttpError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data to the parser. Until the headers are complete, the data is limited to the allowed header size."""
        while data and self.parser is not None and not self.transport.is_closing():
            if not self._is_reading_headers:
                super().data_received(data)
                return
            room = self._max_header_bytes - self._num_header_bytes
            if room <= 0:
                self._refusal = self._too_large()
                self.send_400_response("")
                return
            piece, data = data[:room], data[room:]
            self._num_header_bytes += len(piece)
            super().data_received(piece)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_reading_headers = True
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = self._too_large()
            raise ValueError("too many headers")  # stops the parser; uvicorn then calls send_400_response

    def on_headers_complete(self) -> None:
        self._is_reading_headers = False
        self._num_header_bytes = 0
        self._stop_timer()
        if fault := name_fault(self.url, self.headers, self.parser.get_http_version()):
            self._refusal = HttpError(400, fault, code="invalid_host")
        elif fault := framing_fault(self.headers):
            self._refusal = HttpError(501, fault, code="unsupported_transfer_encoding")
        if fault:
            raise ValueError(fault)  # handled like too many headers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_reading_headers = True

    def send_400_response(self, msg: str) -> None:
        """Reject an invalid or oversized request, and close the connection."""
        error = self._refusal or HttpError(400, f"{msg or 'Not HTTP.'}", code="invalid_http")
        body = json.dumps(error.body()).encode()
        status = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._stop_timer()
        if not self._is_answering() or self._is_reading_body():  # an error cannot be written into a started response
            self.transport.write(status + head + body)
        if self.cycle is not None:  # unblock the application; its output is discarded
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore upgrade offers: clients that offer HTTP/2 are answered in HTTP/1.1 without a warning."""

    def _too_large(self) -> HttpError:
        return HttpError(
            431,
            f"The headers are larger than {self._max_header_bytes} bytes or more than {MAX_HEADERS}.",
            code="headers_too_large",
        )

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_reading_body(self) -> bool:
        """True if the last request's body is still arriving and no other request is being answered before it."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not (cycle.response_started or self.pipeline)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._is_answering():  # a pipelined request waits until this answer is complete
            self._start_timer()
            return
        self._refusal = HttpError(
            408,
            f"The headers did not arrive within {self._header_timeout_s:g} s.",
            code="header_timeout",
        )
        self.send_400_response("")


def name_fault(target: bytes, headers: Iterable[tuple[bytes, bytes]], version: str) -> str:
    """Return the error of a request that does not name exactly one host (RFC 9112, 3.2); empty if there is none.

    A proxy may use one of the names and this server the other, so neither can be trusted.

    Args:
        target: target of the request line. In absolute form, its host must equal ``Host``.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return f"The request has {len(hosts)} Host headers; send one."
    if not hosts and version == "1.1":
        return "The request has no Host header; send one."
    scheme, sign, rest = target.partition(b"://")
    if hosts and sign and b"/" not in scheme:
        authority = rest.partition(b"/")[0].partition(b"?")[0].rpartition(b"@")[2]
        if authority.lower().removesuffix(b":80") != hosts[0].strip().lower().removesuffix(b":80"):
            return "The request line and the Host header name different hosts; use the same host."
    return ""


def framing_fault(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the error of a body with an unsupported transfer coding (RFC 9112, 6.1); empty if there is none."""
    codings = [value.strip() for name, value in headers if name == b"transfer-encoding"]
    if all(coding.lower() == b"chunked" for coding in codings):
        return ""
    return f"Transfer-Encoding is {b', '.join(codings)[:64].decode('latin-1')}; send chunked, or a Content-Length."


def bounded_protocol(max_header_bytes: int, header_timeout_s: float = HEADER_TIMEOUT_S) -> type[BoundedHttpProtocol]:
    """Create the protocol class for ``uvicorn.Config(http=...)``, which creates an instance per connection."""

    class Bounded(BoundedHttpProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, max_header_bytes=max_header_bytes, header_timeout_s=header_timeout_s, **kwargs)

    return Bounded
