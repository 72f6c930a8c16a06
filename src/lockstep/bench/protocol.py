"""Client side of OpenAI's protocol: the base URL, requests as bytes, and events of streamed answers.

All functions are pure; `EventLineReader` has state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lockstep.cluster.completion_chunks import DONE, CompletionChunk, error_message
from lockstep.errors import UsageError
from lockstep.version import __version__

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """Address of a server, and the key for it."""

    host: str
    port: int
    tls: bool
    root: str
    """Path before ``/v1``, without a slash at its end."""
    api_key: str | None = None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None, flag: str = "--base-url") -> Target:
        """Parse a URL with or without ``/v1`` at its end; UsageError, with an example, if it is invalid.

        Args:
            flag: flag with the URL, for the message.
        """
        parts = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _PORTS or not parts.hostname or port == -1:
            raise UsageError(f"{flag} is {base_url!r}; it must look like http://127.0.0.1:9000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("--api-key has characters that are invalid in an HTTP header; it must be printable ASCII")
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https", root, api_key)

    @property
    def url(self) -> str:
        """Base URL, to which paths of endpoints are appended."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.root}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"User-Agent": f"lockstep/{__version__}", **key}

    def post(self, path: str, body: Mapping[str, Any], more_headers: Mapping[str, str] | None = None) -> bytes:
        """POST request with a JSON body, as bytes."""
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {
            "Host": self.authority,
            **self.headers,
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(more_headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.root}{path} HTTP/1.1\r\n{lines}\r\n".encode() + content


_DATA = b"data:"


class EventLineReader:
    """Reader of an event stream's lines. Each event is one line, which all known servers of this API follow."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(CompletionChunk)
        self.is_done = False

    def read(self, line: bytes) -> CompletionChunk | None:
        """Chunk of a line; None for a comment, an empty line or the end. ValueError for an event of another kind."""
        if self.is_done or not line.startswith(_DATA):
            return None
        content = line[len(_DATA) :].strip()
        if content == DONE.encode():
            self.is_done = True
            return None
        return self._decoder.decode(content)


def reason_of(body: bytes) -> str:
    """Reason of a rejected request, from a body in any format."""
    try:
        return error_message(msgspec.json.decode(body))
    except ValueError:
        return error_message(body.decode("utf-8", "replace")) or "no reason given"
