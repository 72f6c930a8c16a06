"""Files and batches: OpenAI's shapes, and the state transitions of a batch."""

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
"""Allowed next states, by state."""
ENDED: tuple[Status, ...] = tuple(status for status, following in NEXT.items() if not following)
MIN_EXPIRY_S = 3_600
"""Limits of the expiry time of files in seconds, as in OpenAI's API."""
MAX_EXPIRY_S = 2_592_000
MAX_FILE_LIST = 10_000
MAX_BATCH_LIST = 100
DEFAULT_BATCH_LIST = 20
MAX_FILE_ID_CHARS = 64


class StoredFile(msgspec.Struct, frozen=True):
    """Metadata of a stored file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def shown(self) -> FileObject:
        """The file in the API's form."""
        return {"object": "file", "status": "processed", "status_details": None, **msgspec.structs.asdict(self)}  # type: ignore[typeddict-item]  # same fields as the shape


class Batch(msgspec.Struct, frozen=True):
    """A batch: its parameters and its progress."""

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
    """Times at which states were reached, by name: ``in_progress_at`` and so on."""
    faults: tuple[Fault, ...] = ()
    model: str | None = None
    """Model name, if all requests use the same."""
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def in_state(self, status: Status, now_s: float, **changes: Any) -> Batch:
        """Copy of the batch in its next state."""
        assert status in NEXT[self.status], f"a batch in state {self.status} cannot change to {status}"
        times = {**self.times, f"{status}_at": int(now_s)}
        return msgspec.structs.replace(self, status=status, times=times, **changes)

    def shown(self) -> BatchObject:
        """The batch in the API's form."""
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
    """Derive an id from other values, so that work repeated after a crash produces the same id."""
    digest = blake2b("\n".join(map(str, parts)).encode(), digest_size=16)
    return f"{prefix}{digest.hexdigest()}"


class FileObject(Shape):
    """A stored file."""

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
    """Confirmation that a file was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(Shape):
    """A problem of an input file."""

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
    """A batch with its progress. Times are in Unix seconds."""

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
    """Expiry of a batch's result files."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class BatchBody(Body):
    """The input file of a batch, the endpoint of its requests, and its completion window."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=MAX_FILE_ID_CHARS)]
    """Id of a file that was uploaded with the purpose `batch`."""
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses", "/v1/score"
    ]
    completion_window: Annotated[str, Field(min_length=2, max_length=8)]
    """`24h`, or another number of s, m, h or d, up to 30d."""
    metadata: Labels | None = None
    output_expires_after: OutputExpiry | None = None
