"""``/v1/models``: what is served, in OpenAI's shape and with what else is known of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from lockstep.cluster.base import ModelCard
from lockstep.server.serving import serving_of

router = APIRouter(prefix="/v1/models", tags=["models"])


class ModelBody(BaseModel):
    """One served name. What is null is not known before the model is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lockstep"
    root: str
    parent: str | None
    max_model_len: int | None
    tier: str
    deterministic: bool | None


class ModelListBody(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelBody]


@router.get("", operation_id="list_models")
async def list_models(request: Request) -> ModelListBody:
    """Every name that requests may use, aliases too."""
    cards = serving_of(request).cluster.cards()
    return ModelListBody(data=[body for card in cards for body in _bodies(card)])


@router.get("/{model_id:path}", operation_id="retrieve_model")
async def retrieve_model(model_id: str, request: Request) -> ModelBody:
    """One model; its id may hold slashes."""
    return _body(model_id, serving_of(request).cluster.card(model_id))


def _bodies(card: ModelCard) -> Iterator[ModelBody]:
    for name in (card.name, *card.aliases):
        yield _body(name, card)


def _body(name: str, card: ModelCard) -> ModelBody:
    return ModelBody(
        id=name,
        created=card.created_s,
        root=card.root,
        parent=card.parent,
        max_model_len=card.max_model_len,
        tier=card.tier,
        deterministic=card.deterministic,
    )
