"""A base URL, and requests as bytes."""

from __future__ import annotations

import json

import pytest

from lockstep.bench.protocol import Target
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("http://127.0.0.1:9000/v1/", "http://127.0.0.1:9000"),
        ("localhost:8000", "http://localhost:8000"),
        ("https://example.org/llm/v1", "https://example.org:443/llm"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_a_url_is_taken_with_or_without_v1(text: str, url: str) -> None:
    assert Target.parse(text).url == url


@pytest.mark.parametrize("text", ["ftp://host", "http://", "http://host:99999", "http://host:x", ""])
def test_invalid_url_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"--base-url is .* it must look like http://127\.0\.0\.1:9000"):
        Target.parse(text)


def test_a_key_cannot_smuggle_a_header() -> None:
    with pytest.raises(UsageError, match="--api-key"):
        Target.parse("http://h", "a\r\nX-Other: 1")


def test_a_request_is_whole_http() -> None:
    request = Target.parse("http://h:1/base/v1", "key").post("/v1/x", {"text": "ü"})
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: h:1\r\n")
    assert b"\r\nAuthorization: Bearer key" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"text": "ü"}
