"""Batch API routes: upload files of requests, run them as batches in idle time, and return the result files."""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Message

from lockstep.errors import InvalidParameterError, UnavailableError
from lockstep.server.batches.input_file import MAX_WINDOW_S, window_s
from lockstep.server.batches.runner import BatchRunner
from lockstep.server.batches.schema import (
    DEFAULT_BATCH_LIST,
    MAX_BATCH_LIST,
    MAX_EXPIRY_S,
    MAX_FILE_ID_CHARS,
    MAX_FILE_LIST,
    MIN_EXPIRY_S,
    Batch,
    BatchBody,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
    StoredFile,
)
from lockstep.server.body import UPLOAD_TYPE, kind_of
from lockstep.server.database import refusal_of
from lockstep.server.errors import ERROR_RESPONSES, HttpError, RefusedBodyError
from lockstep.server.request_context import CLIENT_LEFT_STATUS, context_of

UPLOAD_TIMEOUT_S = 600.0
"""Time limit, in seconds, for a client to upload a file."""
MAX_FORM_BYTES = 64 << 10
"""Maximum number of bytes of an upload in addition to the file."""
MAX_FORM_FIELDS = 8
PURPOSE = "batch"
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            UPLOAD_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
                    },
                }
            }
        },
    }
}
FileId = Annotated[str, Query(max_length=MAX_FILE_ID_CHARS)]

router = APIRouter(prefix="/v1", tags=["batches"], responses=ERROR_RESPONSES)


def runner_of(request: Request) -> BatchRunner:
    """Batch runner of the server."""
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        raise UnavailableError("this application does not run batches; use `lockstep serve`")
    return runner


@router.post("/files", response_model=FileObject, openapi_extra=_FORM)
async def upload_file(request: Request) -> Response:
    """Upload a file of requests, one JSON object per line."""
    store = runner_of(request).store
    if kind_of(request.headers.get("content-type", "")) != UPLOAD_TYPE:
        raise InvalidParameterError(
            f"the body is not {UPLOAD_TYPE}; send the file as a form, as `client.files.create` does"
        )
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            form = await _bounded(request, store.limits.max_file_bytes).form(
                max_files=1, max_fields=MAX_FORM_FIELDS, max_part_size=MAX_FORM_BYTES
            )
    except TimeoutError:
        raise RefusedBodyError(
            HttpError(408, f"The file did not arrive within {UPLOAD_TIMEOUT_S:g} s.", code="body_timeout")
        ) from None
    except OSError as error:  # large uploads use a temporary file
        refusal = refusal_of(error, Path(tempfile.gettempdir()), "uploads")
        if refusal is None:
            raise
        raise refusal from error
    except ClientDisconnect:
        context_of(request).status = CLIENT_LEFT_STATUS
        return Response(status_code=CLIENT_LEFT_STATUS)
    except (MultiPartException, HTTPException) as error:
        if isinstance(error, RefusedBodyError):
            raise
        text = error.message if isinstance(error, MultiPartException) else error.detail
        raise InvalidParameterError(f"the form cannot be read: {text}") from None
    try:
        now_s = int(runner_of(request).unix_time_s())
        file, content = _described(form, now_s)
        if file.bytes > store.limits.max_file_bytes:
            raise _too_large(store.limits.max_file_bytes)
        await store.put_file(context_of(request).tenant, file, content)
    finally:
        await form.close()
    return JSONResponse(file.shown())


def _bounded(request: Request, max_file_bytes: int) -> Request:
    """Wrap a request so that a body longer than the limits of file and form is rejected."""
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_file_bytes + MAX_FORM_BYTES:
            raise _too_large(max_file_bytes)
        return message

    return Request(request.scope, receive)


def _too_large(max_file_bytes: int) -> RefusedBodyError:
    message = f"The file is larger than the limit of {max_file_bytes} bytes."
    return RefusedBodyError(HttpError(413, message, "file", "body_too_large", {"Connection": "close"}))


def _described(form: FormData, now_s: int) -> tuple[StoredFile, IO[bytes]]:
    """Return the file record and content of an upload form. Raises InvalidParameterError with the invalid field."""
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in form:
        if name not in known:
            raise InvalidParameterError(f"{name[:64]} is not a supported parameter", param=name[:64])
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise InvalidParameterError("file is missing; send it as a part with a file name", param="file")
    if purpose != PURPOSE:
        shown = "missing" if purpose is None else repr(str(purpose)[:64])
        raise InvalidParameterError(
            f"purpose is {shown}; only files for batches are supported, so it must be 'batch'", param="purpose"
        )
    name = upload.filename or ""
    if not _NAME.fullmatch(name):
        raise InvalidParameterError(
            "the file's name is empty, too long or has a slash or a control character", param="file"
        )
    file_id = f"file-{secrets.token_hex(16)}"
    return StoredFile(file_id, upload.size or 0, now_s, name, PURPOSE, _expiry(form, now_s)), upload.file


def _expiry(form: FormData, now_s: int) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    text = str(seconds)
    is_count = text.isascii() and text.isdigit() and len(text) < 9
    if anchor != "created_at" or not is_count or not MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S:
        raise InvalidParameterError(
            f"expires_after must have the anchor 'created_at' and {MIN_EXPIRY_S} to {MAX_EXPIRY_S} seconds",
            param="expires_after",
        )
    return now_s + int(text)


@router.get("/files", response_model=FileList)
async def list_files(
    request: Request,
    after: FileId | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILE_LIST)] = MAX_FILE_LIST,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=MAX_FILE_ID_CHARS)] = None,
) -> Response:
    """Stored files: uploaded files and results of batches."""
    runner, tenant = runner_of(request), context_of(request).tenant
    now_s, is_descending = runner.unix_time_s(), order == "desc"
    found = await runner.store.files(
        tenant, now_s, after=after, limit=limit + 1, is_descending=is_descending, purpose=purpose
    )
    return JSONResponse(_page([file.shown() for file in found], limit))


@router.get("/files/{file_id}", response_model=FileObject)
async def retrieve_file(file_id: str, request: Request) -> Response:
    """Metadata of a file."""
    return JSONResponse((await _file(request, file_id)).shown())


@router.get(
    "/files/{file_id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def retrieve_content(file_id: str, request: Request) -> Response:
    """Content of a file."""
    file = await _file(request, file_id)
    path = runner_of(request).store.path_of(file.id)
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


@router.delete("/files/{file_id}", response_model=DeletedFile)
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file that no batch is using."""
    runner = runner_of(request)
    await runner.store.delete_file(file_id, context_of(request).tenant, runner.unix_time_s())
    runner.check_now()
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@router.post("/batches", response_model=BatchObject)
async def create_batch(body: BatchBody, request: Request) -> Response:
    """Create a batch that executes all requests of a file in idle time."""
    runner, tenant = runner_of(request), context_of(request).tenant
    now_s = int(runner.unix_time_s())
    window = window_s(body.completion_window)
    if window is None:
        raise InvalidParameterError(
            f"completion_window is {body.completion_window!r}; it must be 24h, or another number of s, m, h or d up to "
            f"{MAX_WINDOW_S // 86_400}d",
            param="completion_window",
        )
    file = await runner.store.file(body.input_file_id, tenant, now_s, param="input_file_id")
    if file.purpose != PURPOSE:
        raise InvalidParameterError(
            f"{file.id} has the purpose {file.purpose}; it must be 'batch'", param="input_file_id"
        )
    batch = Batch(
        f"batch_{secrets.token_hex(16)}",
        body.endpoint,
        file.id,
        body.completion_window,
        now_s,
        now_s + window,
        body.metadata,
        None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    await runner.store.put_batch(tenant, batch)
    runner.add(tenant, batch)
    return JSONResponse(batch.shown())


@router.get("/batches", response_model=BatchList)
async def list_batches(
    request: Request,
    after: FileId | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_BATCH_LIST)] = DEFAULT_BATCH_LIST,
) -> Response:
    """Stored batches, latest first."""
    runner = runner_of(request)
    found = await runner.store.batches(context_of(request).tenant, after=after, limit=limit + 1)
    return JSONResponse(_page([runner.current(batch).shown() for batch in found], limit))


@router.get("/batches/{batch_id}", response_model=BatchObject)
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """A batch with its progress."""
    runner = runner_of(request)
    return JSONResponse(runner.current(await runner.store.batch(batch_id, context_of(request).tenant)).shown())


@router.post("/batches/{batch_id}/cancel", response_model=BatchObject)
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Cancel a batch. Results so far are written to its files. A batch that has ended is unchanged."""
    runner = runner_of(request)
    batch = await runner.store.batch(batch_id, context_of(request).tenant)
    return JSONResponse((await runner.cancel(batch)).shown())


async def _file(request: Request, file_id: str) -> StoredFile:
    runner = runner_of(request)
    return await runner.store.file(file_id, context_of(request).tenant, runner.unix_time_s())


def _page(found: Sequence[Any], limit: int) -> dict[str, Any]:
    """Return one page of a list that was queried with one extra item."""
    data = list(found[:limit])
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}
