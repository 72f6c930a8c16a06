"""Adapter endpoints: `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, in vLLM's format.

An adapter is served as a model under its name. As in vLLM, a success is a line of text, a wrong or missing value a 400,
and an adapter that does not exist a 404.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from lockstep.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    ConfigError,
    InvalidParameterError,
    ModelNotFoundError,
    UsageError,
)
from lockstep.server.admission import permissions_of
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import Body
from lockstep.server.request_context import context_of
from lockstep.server.serving import serving_of

MAX_PATH_CHARS = 4_096
router = APIRouter(prefix="/v1", tags=["models"], responses=ERROR_RESPONSES)
_AS_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
Text = Annotated[str, Field(max_length=MAX_PATH_CHARS)]
NonEmptyText = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]


class LoadLoraBody(Body):
    """An adapter to serve as a model."""

    lora_name: NonEmptyText
    """Name of the new model."""
    lora_path: NonEmptyText
    """PEFT directory or GGUF file on the server's machine, `hf://org/name` or `pocket://NAME`."""
    base_model_name: Text | None = None
    """Name of a model to whose weights the adapter belongs. Default: the only one that accepts adapters."""
    load_inplace: bool | None = None
    """Whether an adapter of this name is replaced. Open requests of the replaced one end normally."""


class UnloadLoraBody(Body):
    """An adapter to remove."""

    lora_name: NonEmptyText
    """Name of the adapter's model."""
    lora_int_id: int | None = None
    """Has no effect."""


@router.post("/load_lora_adapter", operation_id="load_lora_adapter", response_class=Response, responses=_AS_TEXT)
async def load_lora_adapter(body: LoadLoraBody, request: Request) -> PlainTextResponse:
    """Load a LoRA adapter. Returns when requests can name it as their model; the base model is not affected."""
    serving = serving_of(request)
    permissions = permissions_of(context_of(request).tenant, serving.options)
    with _as_request_errors():
        await serving.cluster.adapters.load(
            body.lora_name, body.lora_path, permissions, body.base_model_name, replaces=bool(body.load_inplace)
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/unload_lora_adapter", operation_id="unload_lora_adapter", response_class=Response, responses=_AS_TEXT)
async def unload_lora_adapter(body: UnloadLoraBody, request: Request) -> PlainTextResponse:
    """Unload a LoRA adapter. Its open requests end normally; further ones get a 404."""
    with _as_request_errors():
        await serving_of(request).cluster.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@contextmanager
def _as_request_errors() -> Iterator[None]:
    """Convert the errors of an adapter to those of a request."""
    try:
        yield
    except ArtifactNotFoundError as error:
        raise ModelNotFoundError(str(error), param="lora_path") from error
    except (ArtifactError, ConfigError, UsageError) as error:
        raise InvalidParameterError(str(error), param="lora_path") from error
