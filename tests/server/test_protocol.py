"""Framing of requests on a real socket: what is malformed has a status before the connection is closed."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.server.process import ServerProcess
from tests.server.support import exchange

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", 400, "invalid_http"),
        (CHUNKED + b"2\r\n{}\r\nzz\r\n\r\n", 400, "invalid_http"),
        (CHUNKED + b"2\r\n{}xx\r\n0\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"Content-Length: a\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400, "invalid_http"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "unsupported_transfer_encoding"),
        (HEAD + b"Transfer-Encoding: identity\r\n\r\n{}", 501, "unsupported_transfer_encoding"),
    ],
    ids=[
        *("size of the first chunk", "size of a later chunk", "chunk longer than its size", "length and chunks"),
        *("negative length", "length in letters", "two lengths", "compressed chunks", "identity"),
    ],
)
def test_malformed_framing_has_a_status_before_the_connection_closes(
    server: ServerProcess, request_bytes: bytes, status: int, code: str
) -> None:
    answer = exchange(server.base_url, request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == code


def test_chunked_body_is_read(server: ServerProcess) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    request = HEAD + b"Transfer-Encoding: Chunked\r\nConnection: close\r\n\r\n" + chunks
    assert exchange(server.base_url, request).startswith(b"HTTP/1.1 200 ")


def test_malformed_request_behind_a_whole_one_does_not_take_its_answer(server: ServerProcess) -> None:
    whole = HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    assert b"HTTP/1.1 400 " not in exchange(server.base_url, whole + b"no HTTP\r\n\r\n")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("zstd", 415), ("identity", 200), ("Identity", 200)])
def test_encoded_body_is_refused_unless_it_is_as_it_is(server: ServerProcess, encoding: str, status: int) -> None:
    body = gzip.compress(BODY) if encoding == "gzip" else BODY
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    with server.client() as client:
        answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["code"] == "unsupported_content_encoding"
        assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/models//"])
def test_slash_at_the_end_of_a_path_changes_nothing(server: ServerProcess, path: str) -> None:
    with server.client() as client:
        assert client.get(path).json() == client.get(path.rstrip("/")).json()
