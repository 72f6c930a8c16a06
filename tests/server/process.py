"""A real `lockstep serve` process for tests: started on a free port, waited for, talked to, ended by its pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import httpx2

from tests.processes import Program
from tests.waiting import HANG_S

IN_THREAD = ("--worker", "thread")
"""For tests that do not care where the model runs: a second process would only take longer to start."""
_LISTENING = re.compile(r"listening on (http://\S+), ")
_READY = re.compile(r"ready on (http://\S+), ")


def plain_client(
    base_url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = HANG_S
) -> httpx2.Client:
    """A client that reads no certificates, which are for others than 127.0.0.1 and take it 70 ms."""
    return httpx2.Client(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False, verify=False)


def plain_async_client(base_url: str, *, timeout_s: float = HANG_S) -> httpx2.AsyncClient:
    """As `plain_client`, for any number of requests at once."""
    limits = httpx2.Limits(max_connections=None)
    return httpx2.AsyncClient(base_url=base_url, timeout=timeout_s, limits=limits, trust_env=False, verify=False)


class ServerProcess:
    """One running server; a context manager that ends it.

    Args:
        arguments: what follows `lockstep serve`; ``--port 0`` is added where no address is given.
        verb: in its place, where another verb serves.
        environment: variables on top of this process's.
        folder: where it is started; this process's own folder if nothing is said.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        verb: Sequence[str] = ("serve",),
    ) -> None:
        where = () if {"--port", "--addr", "--config"} & set(arguments) else ("--port", "0")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing:
            streams = (nothing.fileno(), out_end, err_end)
            words, variables = [*verb, *arguments, *where], {**clean, **(environment or {})}
            self._program = Program(words, streams, variables, folder=folder)
        os.close(out_end)
        os.close(err_end)
        self._stdout = _Lines(os.fdopen(out))
        self._stderr = _Lines(os.fdopen(err))
        self.base_url = ""
        """Without ``/v1``; known once it listens."""

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def stdout(self) -> str:
        return self._stdout.text()

    @property
    def stderr(self) -> str:
        """The log so far."""
        return self._stderr.text()

    def wait_listening(self, timeout_s: float = HANG_S) -> None:
        """Until the port is open; the model may still be loading."""
        self.base_url = self._wait_for(_LISTENING, timeout_s)

    def wait_ready(self, timeout_s: float = HANG_S) -> None:
        """Until the model answers."""
        self.base_url = self._wait_for(_READY, timeout_s)

    def signal(self, number: signal.Signals) -> None:
        self._program.send_signal(number)

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The exit code of a process that ends by itself, its output read to the end."""
        code = self._program.wait(timeout_s)
        self._stdout.join()
        self._stderr.join()
        return code

    def stop(self, timeout_s: float = HANG_S) -> int:
        """End it by SIGTERM, by SIGKILL if that does not help; returns the exit code."""
        self._program.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._program.send_signal(signal.SIGKILL)
            return self.wait(timeout_s)

    def client(self, *, api_key: str | None = None, timeout_s: float = HANG_S) -> httpx2.Client:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        return plain_client(self.base_url, headers=headers, timeout_s=timeout_s)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> str:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            found = pattern.search(self.stdout)
            if found:
                return found[1]
            if self._program.returncode is not None:
                raise AssertionError(
                    f"the server ended with {self.wait()} before it said {pattern.pattern!r}: {self.stderr}"
                )
            time.sleep(0.02)
        raise AssertionError(f"the server did not say {pattern.pattern!r} within {timeout_s} s: {self.stderr}")


class _Lines:
    """Reads a pipe to its end in a thread, so that it never fills."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._parts: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        return "".join(self._parts)

    def join(self) -> None:
        self._thread.join(HANG_S)

    def _read(self) -> None:
        with self._pipe:
            self._parts.extend(self._pipe)


@contextlib.contextmanager
def serve(
    *arguments: str, environment: Mapping[str, str] | None = None, verb: Sequence[str] = ("serve",)
) -> Iterator[ServerProcess]:
    """A server that is ready, e.g. ``serve("stub://alpha", "--max-num-seqs", "8")``; ended with the block."""
    with ServerProcess(*arguments, environment=environment, verb=verb) as server:
        server.wait_ready()
        yield server
