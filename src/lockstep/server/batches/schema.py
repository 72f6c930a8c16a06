"""Files and batches in OpenAI's shapes, and the states that a batch goes through."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from lockstep.server.batches.input_file import Fault
from lockstep.server.fields import Body, Shape
from lockstep.server.generation import Labels

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
NEXT: Mapping[Status, tuple[Status, ...]] = {
    "validating": ("failed", "in_progress", "cancelling", "expired"),
    "in_progress": ("finalizing", "cancelling", "expired", "failed"),
    "finalizing": ("completed", "failed"),
    "cancelling": ("cancelled", "failed"),
    "failed": (),
    "completed": (),
    "expired": (),
    "cancelled": (),
}
"""By state, the states that may follow."""
ENDED: tuple[Status, ...] = tuple(status for status, following in NEXT.items() if not following)
MIN_EXPIRY_S = 3_600
"""Bounds of the seconds after which files may expire: OpenAI's."""
MAX_EXPIRY_S = 2_592_000
MAX_FILE_LIST = 10_000
MAX_BATCH_LIST = 100
DEFAULT_BATCH_LIST = 20
MAX_FILE_ID_CHARS = 64


class StoredFile(msgspec.Struct, frozen=True):
    """Facts on a file that is kept."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> FileObject:
        """The file as clients see it."""
        return {"object": "file", "status": "processed", "status_details": None, **msgspec.structs.asdict(self)}  # type: ignore[typeddict-item]  # its fields are the shape's


class Batch(msgspec.Struct, frozen=True):
    """One batch: what was requested, and how far it has come."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expiry_s: int | None = None
    status: Status = "validating"
    times: dict[str, int] = {}
    """By state that was reached, when: ``in_progress_at`` and the like."""
    faults: tuple[Fault, ...] = ()
    model: str | None = None
    """Where all requests name the same."""
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def moved(self, status: Status, now_s: float, **changes: Any) -> Batch:
        """The batch in its next state."""
        assert status in NEXT[self.status], f"a batch that is {self.status} does not become {status}"
        times = {**self.times, f"{status}_at": int(now_s)}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def shown(self) -> BatchObject:
        """The batch as clients see it."""
        faults = [msgspec.structs.asdict(fault) for fault in self.faults]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": faults} if faults else None,  # type: ignore[typeddict-item]  # as above
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": self.times.get("in_progress_at"),
            "expires_at": self.expires_at,
            "finalizing_at": self.times.get("finalizing_at"),
            "completed_at": self.times.get("completed_at"),
            "failed_at": self.times.get("failed_at"),
            "expired_at": self.times.get("expired_at"),
            "cancelling_at": self.times.get("cancelling_at"),
            "cancelled_at": self.times.get("cancelled_at"),
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


def derived_id(prefix: str, *parts: object) -> str:
    """An id that follows from others, so that work that is done again after a crash gives the same."""
    digest = blake2b("\n".join(map(str, parts)).encode(), digest_size=16)
    return f"{prefix}{digest.hexdigest()}"


class FileObject(Shape):
    """A file that is kept."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None
    expires_at: int | None


class FileList(Shape):
    """One page of files."""

    object: Literal["list"]
    data: Annotated[list[FileObject], Field(max_length=MAX_FILE_LIST)]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shape):
    """The remains of a file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(Shape):
    """A fault of an input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(Shape):
    object: Literal["list"]
    data: list[BatchFault]


class RequestCounts(Shape):
    total: int
    completed: int
    failed: int


class BatchObject(Shape):
    """A batch, and how far it has come; times are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Shape):
    """One page of batches."""

    object: Literal["list"]
    data: Annotated[list[BatchObject], Field(max_length=MAX_BATCH_LIST)]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OutputExpiry(Body):
    """Expiry of the files that a batch makes."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchBody(Body):
    """The file of requests, the endpoint that they are for, and the time that they may take."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=MAX_FILE_ID_CHARS)]
    """Of a file that was uploaded with the purpose `batch`."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[str, Field(min_length=2, max_length=8)]
    """`24h`, or another number of s, m, h or d, up to 30d."""
    metadata: Labels | None = None
    output_expires_after: OutputExpiry | None = None
