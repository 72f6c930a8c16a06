"""The client of other servers: what is no OpenAI-compatible server, or none any more, is said in a sentence."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.bench.protocol import Target
from lockstep.bench.remote import RemoteServer
from lockstep.errors import RemoteError
from tests.bench.standin import Behaviour, serving
from tests.waiting import HANG_S

BODY = {"model": "alpha", "prompt": "x", "max_tokens": 2}


def response(status: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def events(*frames: bytes) -> bytes:
    return response("200 OK", b"".join(b"data: " + frame + b"\n\n" for frame in frames), "text/event-stream")


@contextmanager
def answering(answer: bytes) -> Iterator[RemoteServer]:
    """A client of a server that answers one request with these bytes, and goes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(HANG_S)
                connection.recv(65_536)
                connection.sendall(answer)

        server = threading.Thread(target=answer_one, daemon=True)
        server.start()
        with RemoteServer(Target.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")) as remote:
            yield remote
        server.join(HANG_S)


def streamed(remote: RemoteServer) -> str:
    chunks = remote.stream("/v1/completions", {**BODY, "stream": True})
    return "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)


@pytest.mark.parametrize(
    ("answer", "call", "message"),
    [
        (
            response("200 OK", b"<html>", "text/html"),
            RemoteServer.models,
            "did not answer with JSON; is this an OpenAI-",
        ),
        (
            response("200 OK", b'["alpha"]'),
            RemoteServer.models,
            "/v1/models is not a list of models; is it OpenAI-",
        ),
        (response("200 OK", b'{"data": {}}'), RemoteServer.models, "/v1/models is not a list of models"),
        (response("200 OK", b'{"data": []}'), lambda remote: remote.model_or_first(None), "name one with --model"),
        (
            response("200 OK", b'{"data": [{"id": "vectors", "task": "embed"}]}'),
            lambda remote: remote.model_or_first(None),
            "lists no model that generates text; name one with --model",
        ),
        (response("500 Oh", b"boom", "text/plain"), RemoteServer.models, "/v1/models answered 500: boom"),
        (response("500 Oh", b"", "text/plain"), RemoteServer.models, "/v1/models answered 500: no reason given"),
        (response("401 No", b"{}"), RemoteServer.models, "--api-key or OPENAI_API_KEY"),
        (response("403 No", b"{}"), RemoteServer.models, "another key with --api-key or OPENAI_API_KEY"),
        (b"", RemoteServer.models, "the connection to http://127.0.0.1:"),
        (
            events(b'{"choices": [{"index": 0, "text": "a"}]}'),
            streamed,
            "ended the stream before the answer was complete",
        ),
        (events(b"{"), streamed, "an event of the stream is not a completion chunk"),
        (
            response("400 Bad", b'{"error": {"message": "too long"}}'),
            streamed,
            "/v1/completions answered 400: too long",
        ),
    ],
)
def test_invalid_answer_is_reported_in_a_sentence(
    answer: bytes, call: Callable[[RemoteServer], Any], message: str
) -> None:
    with answering(answer) as remote, pytest.raises(RemoteError) as raised:
        call(remote)
    assert message in str(raised.value)


def test_names_are_those_of_models_that_have_one() -> None:
    entries = [{"id": "b"}, {"object": "model"}, "c", {"id": 7}, {"id": "a"}]
    with answering(response("200 OK", json.dumps({"data": entries}).encode())) as remote:
        assert remote.models() == ["b", "a"]


def test_a_given_model_name_needs_no_request() -> None:
    with RemoteServer(Target.parse("http://127.0.0.1:9")) as remote:
        assert remote.model_or_first("beta") == "beta"


@pytest.mark.parametrize("answer", [response("404 Not Found", b"{}"), response("200 OK", b"<html>", "text/html")])
def test_rejected_optional_request_returns_none(answer: bytes) -> None:
    with answering(answer) as remote:
        assert remote.try_post("/tokenize", {"prompt": "x"}) is None


def test_an_answer_that_was_interrupted_leaves_a_client_that_answers() -> None:
    """And the connection is closed: the server stops generating."""
    behaviour = Behaviour(hang_after=0)
    with serving(behaviour) as url, RemoteServer(Target.parse(url)) as remote:
        stream = remote.stream("/v1/completions", {**BODY, "stream": True})
        assert next(stream).choices[0].text == "word0 "
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
        behaviour.hang_after = None
        assert streamed(remote) == "word0 word1 "
    assert behaviour.num_left == 1


def test_text_is_returned_with_any_status() -> None:
    with answering(response("503 Service Unavailable", b"loading", "text/plain")) as remote:
        assert remote.get_text("/health") == (503, "loading")


def test_follow_yields_lines_and_raises_when_the_server_refuses() -> None:
    with answering(response("200 OK", b": watching\n\nevent: hop\n", "text/event-stream")) as remote:
        assert list(remote.follow("/v1/events")) == [": watching", "", "event: hop"]
    with (
        answering(response("401 Unauthorized", b'{"error": {"message": "no"}}')) as remote,
        pytest.raises(RemoteError, match="answered 401: no; set the server's key"),
    ):
        list(remote.follow("/v1/events"))


def test_the_first_model_is_one_for_text() -> None:
    cards = [{"id": "vectors", "task": "embed"}, {"id": "far", "task": None}, {"id": "chat", "task": "generate"}]
    with answering(response("200 OK", json.dumps({"data": cards}).encode())) as remote:
        assert remote.model_or_first(None) == "far"
