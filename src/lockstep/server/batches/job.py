"""Jobs: the requests of one input file, each to be answered once, and their answers so far."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from lockstep.errors import ConfigError
from lockstep.server.batches.input_file import BatchRequest, read_request
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.schema import derived_id


class Reply(msgspec.Struct, frozen=True):
    """An endpoint's answer to one request."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None
    """Seconds after which the same request may be sent again; None: that would not help."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Job:
    """Work on one batch. Files are read and written by one thread at a time; what is next is the event loop's.

    Args:
        name: of the batch; ids of its lines follow from it.
        offsets: where the requests of the input begin.
    """

    def __init__(self, name: str, tenant: str, input_path: Path, offsets: array[int], journal: Journal) -> None:
        self.name = name
        self.tenant = tenant
        self.journal = journal
        self._offsets = offsets
        self._input = input_path.open("rb")
        self._set_back: deque[int] = deque()
        self._rest = journal.unanswered()

    def take(self) -> int | None:
        """The next request to be answered; None: there is none."""
        return self._set_back.popleft() if self._set_back else next(self._rest, None)

    def set_back(self, index: int) -> None:
        """Let a request that was taken wait again, before all that were not."""
        self._set_back.append(index)

    def request(self, index: int) -> BatchRequest:
        """A request, read from its line.

        Raises:
            ConfigError: the input is not what it was when it was checked.
        """
        self._input.seek(self._offsets[index])
        found = read_request(self._input.readline().strip(), None)
        if not isinstance(found, BatchRequest):
            raise ConfigError(f"request {index + 1} of {self.name} was changed since it was checked: {found.message}")
        return found

    def answer(self, index: int, request: BatchRequest, reply: Reply) -> None:
        """Keep an answer, durably."""
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

    def results(self, unanswered_error: tuple[str, str] | None = None) -> Iterator[tuple[bool, bytes]]:
        """Lines of the results in the order of the input, each with True if its request was answered well.

        Args:
            unanswered_error: code and message of an error for those that were not answered; None: they have no line.
        """
        answered = self.journal.lines()
        following = next(answered, None)
        for index in range(self.journal.num_requests):
            if following is not None and following[0] == index:
                yield following[1:]
                following = next(answered, None)
            elif unanswered_error is not None:
                error = {"code": unanswered_error[0], "message": unanswered_error[1]}
                yield False, self._line(index, self.request(index), None, error) + b"\n"

    def close(self) -> None:
        self._input.close()
        self.journal.close()


def write_results(
    job: Job, output: IO[bytes], errors: IO[bytes], unanswered_error: tuple[str, str] | None = None
) -> None:
    """Write the results into two files, which may be one; see `Job.results`."""
    for is_success, line in job.results(unanswered_error):
        (output if is_success else errors).write(line)


def request_id_of(name: str, index: int) -> str:
    """The ``x-request-id`` of a request, by which logs and recordings have it."""
    return f"{name}-{index + 1}"
