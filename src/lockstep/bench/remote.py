"""Client of an OpenAI-compatible server, for requests that are not measured. Failures are errors with messages."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import httpx2

from lockstep.bench.protocol import EventLineReader, Target, reason_of
from lockstep.cluster.completion_chunks import CompletionChunk, error_message
from lockstep.errors import RemoteError

CONNECT_LIMIT_S = 10.0
READ_LIMIT_S = 600.0
"""Maximum seconds without data. A model may take long until its first token."""
_HINTS: Mapping[int, str] = {
    401: "; set the server's key with --api-key or OPENAI_API_KEY",
    403: "; set another key with --api-key or OPENAI_API_KEY",
}


class RemoteServer:
    """Client of one server. Use it as a context manager."""

    def __init__(self, target: Target, read_limit_s: float = READ_LIMIT_S) -> None:
        self.target = target
        self._read_limit_s = read_limit_s
        self._client = _client_of(target, read_limit_s)

    def models(self) -> list[str]:
        """Names of the server's models, in its order."""
        return list(self._cards())

    def context_of(self, model: str) -> int | None:
        """Context length of a model in tokens; None: the server does not report it."""
        length = self._cards().get(model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def _cards(self) -> dict[str, dict[str, Any]]:
        """Entries of the server's list of models, by name."""
        answer = self.get("/v1/models")
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list):
            raise RemoteError(f"{self.target.url}/v1/models is not a list of models; is it OpenAI-compatible?")
        return {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}

    def model_or_first(self, name: str | None) -> str:
        """The given name, or the name of the server's first model that is not declared to be for anything but text.

        Raises:
            RemoteError: the server lists no such model.
        """
        if name is not None:
            return name
        cards = self._cards()
        names = [model for model, card in cards.items() if card.get("task", "generate") in (None, "generate")]
        if not names:
            kind = "no model that generates text" if cards else "no models"
            raise RemoteError(f"{self.target.url} lists {kind}; name one with --model")
        return names[0]

    def get(self, path: str) -> Any:
        """JSON answer of a GET request; RemoteError, with the reason, if there is none."""
        with self._translated():
            return _checked(self._client.get(path))

    def get_text(self, path: str) -> tuple[int, str]:
        """Any status and text of a GET request; RemoteError, with the reason, if the server does not answer."""
        with self._translated():
            response = self._client.get(path)
            return response.status_code, response.text

    def follow(self, path: str) -> Generator[str]:
        """Lines of an answer without an end, such as server-sent events; RemoteError, with the reason, at a failure."""
        with self._translated(), self._client.stream("GET", path) as response:
            if response.status_code != httpx2.codes.OK:
                response.read()
                _checked(response)
            yield from response.iter_lines()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON answer of a POST request; RemoteError, with the reason, if there is none."""
        with self._translated():
            return _checked(self._client.post(path, json=body))

    def delete(self, path: str) -> Any:
        """JSON answer of a DELETE request; RemoteError, with the reason, if there is none."""
        with self._translated():
            return _checked(self._client.delete(path))

    def try_post(self, path: str, body: Mapping[str, Any]) -> Any | None:
        """JSON answer of a POST request; None if the server rejects the request."""
        with self._translated():
            response = self._client.post(path, json=body)
        try:
            return response.json() if response.status_code == httpx2.codes.OK else None
        except ValueError:
            return None

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[CompletionChunk]:
        """Chunks of a streamed answer. Closing the generator closes the connection, which ends the generation.

        Raises:
            RemoteError: the server rejects the request, ends the stream early, or reports an error within it.
        """
        try:
            yield from self._stream(path, body)
        except KeyboardInterrupt:  # it may have left the client in an inconsistent state: replace the client
            interrupted, self._client = self._client, _client_of(self.target, self._read_limit_s)
            with suppress(Exception):
                interrupted.close()
            raise

    def _stream(self, path: str, body: Mapping[str, Any]) -> Generator[CompletionChunk]:
        reader = EventLineReader()
        with self._translated(), self._client.stream("POST", path, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                response.read()
                _checked(response)
            for line in response.iter_lines():
                chunk = _read(reader, line)
                if chunk is not None and chunk.error is not None:
                    raise RemoteError(f"{self.target.url} ended the answer: {error_message(chunk.error)}")
                if chunk is not None:
                    yield chunk
        if not reader.is_done:
            raise RemoteError(f"{self.target.url} ended the stream before the answer was complete")

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate errors of the transport to RemoteError."""
        url = self.target.url
        try:
            yield
        except httpx2.ConnectError as error:
            raise RemoteError(
                f"cannot connect to {url} ({error}); is the server running? `lockstep serve` starts one"
            ) from None
        except httpx2.TimeoutException as error:
            raise RemoteError(f"{url} did not answer in time ({type(error).__name__})") from None
        except httpx2.HTTPError as error:
            raise RemoteError(f"the connection to {url} failed: {error or type(error).__name__}") from None


def _client_of(target: Target, read_limit_s: float) -> httpx2.Client:
    limits = httpx2.Timeout(read_limit_s, connect=CONNECT_LIMIT_S)
    # The same as in the measuring client: no proxies from the environment, and the system's certificates.
    verify = ssl.create_default_context() if target.tls else False
    return httpx2.Client(base_url=target.url, headers=target.headers, timeout=limits, trust_env=False, verify=verify)


def _read(reader: EventLineReader, line: str) -> CompletionChunk | None:
    try:
        return reader.read(line.encode())
    except ValueError as error:
        raise RemoteError(f"an event of the stream is not a completion chunk ({error})") from None


def _checked(response: httpx2.Response) -> Any:
    """JSON of an answer; RemoteError if the server rejects the request or answers in another format."""
    code = response.status_code
    if code != httpx2.codes.OK:
        raise RemoteError(f"{response.url} answered {code}: {reason_of(response.content)}{_HINTS.get(code, '')}")
    try:
        return response.json()
    except ValueError:
        raise RemoteError(f"{response.url} did not answer with JSON; is this an OpenAI-compatible server?") from None
