"""A hub on 127.0.0.1: what the real one answers to a program that looks up a model and fetches its files.

Two servers, as in reality: the hub itself, and a store on another origin to which large files are redirected.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

LARGE_BYTES = 10_000
"""From here on a file is redirected to the store, and known by its SHA-256."""


@dataclass
class Repo:
    """One repository. Files may be replaced while a test runs: that makes a new commit."""

    files: dict[str, bytes]
    token: str | None = None
    """Who may read; None: everybody."""
    gated: bool = False
    claimed_bytes: int | None = None
    """Size of each large file in the listing; None: its own."""
    others: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of further revisions."""

    def revision(self, name: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or commit."""
        for branch, files in {"main": self.files, **self.others}.items():
            commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
            if name in (branch, commit):
                return commit, files
        return None


@dataclass
class StandIn:
    """State of the servers, and what was asked of them."""

    repos: dict[str, Repo] = field(default_factory=dict)
    status: int | None = None
    """Answer everything with it."""
    break_after_bytes: int | None = None
    """Close the next transfer of a large file after so many bytes; once."""
    breaks_always: bool = False
    """Close every transfer of a large file at once."""
    bytes_per_s: int | None = None
    ignores_ranges: bool = False
    damaged: set[str] = field(default_factory=set)
    """Digests of files that are sent with a wrong last byte."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Authorization) of all requests to the hub."""
    store_requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """(digest, Range, Authorization) of all requests to the store."""
    sent_bytes: int = 0
    """From the store."""
    url: str = ""
    store_url: str = ""

    def __enter__(self) -> StandIn:
        self._servers = [_serve(_Hub, self), _serve(_Store, self)]
        self.url, self.store_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add_directory(self, repo: str, directory: Path, **more: Any) -> Repo:
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*.*")}
        self.repos[repo] = Repo(files, **more)
        return self.repos[repo]

    def environment(self, home: Path) -> dict[str, str]:
        """For a process: this hub, a cache of its own, and no way to any other host."""
        return {**NOWHERE, "HF_ENDPOINT": self.url, "HF_HOME": str(home)}

    def content(self, digest: str) -> bytes | None:
        for repo in self.repos.values():
            for files in (repo.files, *repo.others.values()):
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return data[:-1] + b"!" if digest in self.damaged else data
        return None


NOWHERE: Mapping[str, str] = {
    name: value
    for lower, value in (
        ("http_proxy", "http://127.0.0.1:9"),
        ("https_proxy", "http://127.0.0.1:9"),
        ("all_proxy", ""),
        ("no_proxy", "127.0.0.1"),
    )
    for name in (lower, lower.upper())
}
"""Environment in which every host but this one is behind a closed door."""


@contextmanager
def hub_environment(**variables: str) -> Iterator[None]:
    """The hub's library in this process under these environment variables, which it reads when it is imported."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        importlib.reload(constants)
        yield
    importlib.reload(constants)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *args: Any) -> None:
        """Print no traceback of a client that left: its lines are parsed, and two threads that parse at once fail."""


def _serve(handler: type[_Handler], state: StandIn) -> ThreadingHTTPServer:
    server = _Server(("127.0.0.1", 0), type("Bound", (handler,), {"state": state}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    state: StandIn
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Silent."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


HARNESSES = "/api/agent-harnesses"
"""Asked for by the hub's own client, once in a process, whatever it is used for; no request of ours."""


class _Hub(_Handler):
    def do_GET(self) -> None:
        path = urlparse(self.path).path
        authorization = self.headers["Authorization"]
        if path == HARNESSES:
            return self.answer(404)
        self.state.requests.append((path, authorization))
        if self.state.status is not None:
            return self.answer(self.state.status)
        parts = [unquote(part) for part in path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        repo = self.state.repos.get(name)
        if repo is None:
            return self.answer(401 if authorization is None else 404, X_Error_Code="RepoNotFound")
        if repo.token is not None and authorization != f"Bearer {repo.token}":
            if authorization == "Bearer expired":
                return self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
            if repo.gated:
                return self.answer(401 if authorization is None else 403, X_Error_Code="GatedRepo")
            return self.answer(401, X_Error_Code="RepoNotFound")
        revision = repo.revision(parts[5] if is_api and len(parts) > 5 else "main" if is_api else parts[3])
        if revision is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        commit, files = revision
        if is_api:
            siblings = [_sibling(path, data, repo.claimed_bytes) for path, data in files.items()]
            body = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
            return self.answer(200, body, Content_Type="application/json")
        data = files.get("/".join(parts[4:]))
        if data is None:
            return self.answer(404, X_Error_Code="EntryNotFound")
        if len(data) < LARGE_BYTES:
            return self.answer(200, data, ETag=f'"{_git_digest(data)}"', X_Repo_Commit=commit)
        return self.answer(302, Location=f"{self.state.store_url}/{hashlib.sha256(data).hexdigest()}")


class _Store(_Handler):
    def do_GET(self) -> None:
        state = self.state
        digest, span = self.path.strip("/"), self.headers["Range"]
        state.store_requests.append((digest, span, self.headers["Authorization"]))
        data = state.content(digest)
        assert data is not None, "only what the hub redirects is asked for"
        start = 0 if span is None or state.ignores_ranges else int(span.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        limit = 0 if state.breaks_always else state.break_after_bytes
        if limit is not None and len(data) - start <= limit:
            limit = None
        if limit is not None:
            state.break_after_bytes = None
        self._send(data[start:], limit)
        if limit is not None:
            self.close_connection = True

    def _send(self, data: bytes, limit: int | None) -> None:
        step = 1 << 16
        for begin in range(0, len(data) if limit is None else min(limit, len(data)), step):
            piece = data[begin : min(begin + step, limit or len(data))]
            self.state.sent_bytes += len(piece)  # before the client can see them
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:
                return
            if self.state.bytes_per_s is not None:
                time.sleep(len(piece) / self.state.bytes_per_s)


def _sibling(path: str, data: bytes, claimed_bytes: int | None) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": _git_digest(data)}
    if len(data) >= LARGE_BYTES:
        size = len(data) if claimed_bytes is None else claimed_bytes
        sibling["lfs"] = {"size": size, "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
    return sibling


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
