"""Batch jobs: execute each request of an input file once, and keep the results so far."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path
from typing import IO, Any

import msgspec

from lockstep.errors import ConfigError
from lockstep.server.batches.input_file import BatchRequest, read_request
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.schema import derived_id


class Reply(msgspec.Struct, frozen=True):
    """An endpoint's response to one request."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    """Seconds after which the request can be retried; None: a retry would not help."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class BatchJob:
    """The requests and results of one batch. One thread at a time accesses the files; `take` runs on the event loop.

    Args:
        name: name of the batch. The ids of result lines are derived from it.
        offsets: offsets of the requests in the input file.
    """

    def __init__(self, name: str, tenant: str, input_path: Path, offsets: array[int], journal: Journal) -> None:
        self.name = name
        self.tenant = tenant
        self.journal = journal
        self._offsets = offsets
        self._input = input_path.open("rb")
        self._requeued: deque[int] = deque()
        self._rest = journal.unanswered()

    def take(self) -> int | None:
        """Return the next request to execute; None if there is none."""
        return self._requeued.popleft() if self._requeued else next(self._rest, None)

    def requeue(self, index: int) -> None:
        """Queue a request that was taken again, before all others."""
        self._requeued.append(index)

    def request(self, index: int) -> BatchRequest:
        """Read a request from its line.

        Raises:
            ConfigError: the input file has changed since it was checked.
        """
        self._input.seek(self._offsets[index])
        found = read_request(self._input.readline().strip(), None)
        if not isinstance(found, BatchRequest):
            raise ConfigError(f"request {index + 1} of {self.name} has changed since it was checked: {found.message}")
        return found

    def answer(self, index: int, request: BatchRequest, reply: Reply) -> None:
        """Write a result durably, unless a call that was cancelled meanwhile has already written it."""
        if self.journal.has(index):
            return
        response = {
            "status_code": reply.status,
            "request_id": reply.request_id,
            "body": msgspec.Raw(reply.body),
        }
        self.journal.append(index, self._line(index, request, response, None), is_success=reply.is_success)

    def _line(self, index: int, request: BatchRequest, response: Any, error: Any) -> bytes:
        line_id = derived_id("batch_req_", self.name, index)
        line = {"id": line_id, "custom_id": request.custom_id, "response": response, "error": error}
        return msgspec.json.encode(line)

    def write_results(self, output: IO[bytes], errors: IO[bytes], unanswered: tuple[str, str] | None = None) -> None:
        """Write the result lines in the order of the input to two files, which may be the same.

        Args:
            output: receives the results of requests that succeeded.
            errors: receives the results of all other requests.
            unanswered: code and message of the error for requests without a result; None: they have no line.
        """
        for index, answered in enumerate(self.journal.lines()):
            if answered is not None:
                is_success, line = answered
                (output if is_success else errors).write(line)
            elif unanswered is not None:
                error = {"code": unanswered[0], "message": unanswered[1]}
                errors.write(self._line(index, self.request(index), None, error) + b"\n")

    def close(self) -> None:
        self._input.close()
        self.journal.close()


def request_id_of(name: str, index: int) -> str:
    """The ``x-request-id`` of a request, which appears in logs and recordings."""
    return f"{name}-{index + 1}"
