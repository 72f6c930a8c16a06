"""Responses API routes: create, continue, retrieve and delete responses under `/v1/responses`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lockstep.cluster.base import Accepted
from lockstep.errors import InvalidParameterError
from lockstep.server.answer import documented
from lockstep.server.answer_response import Answer
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat import ChatBody
from lockstep.server.chat_adapter import answer_as_chat
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import Shape
from lockstep.server.request_context import context_of
from lockstep.server.responses.answer import ResponseEncoder, ResponseObject, ResponseWriter
from lockstep.server.responses.schema import MAX_ID_CHARS, ResponseBody, response_base
from lockstep.server.responses.store import ResponseStore, StoredResponse
from lockstep.server.responses.tools import shown_tools, tool_warnings
from lockstep.server.responses.translation import TABLE, JsonObject, chat_body, items_of, messages_of
from lockstep.server.serving import card_of

MAX_ITEMS = 100
"""Maximum page size, as in OpenAI's API. So is the default page size below."""
DEFAULT_ITEMS = 20

router = APIRouter(route_class=LongBodyRoute, responses=ERROR_RESPONSES)


def store_of(request: Request) -> ResponseStore:
    """Response store of the server. Set on the application by `create_app`."""
    store: ResponseStore = request.app.state.response_store
    return store


class DeletedResponse(Shape):
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Shape):
    """One page of the items of a conversation."""

    object: Literal["list"]
    data: Annotated[Sequence[Mapping[str, Any]], Field(max_length=MAX_ITEMS)]
    first_id: str
    last_id: str
    has_more: bool


@router.post(
    "/v1/responses", responses=documented(ResponseObject, "event: response.created\ndata: {...}\n\n", "The response.")
)
async def create_response(body: ResponseBody, request: Request) -> Response:
    """Create a response and store it, so that it can be continued."""
    context, store, tools = context_of(request), store_of(request), body.tools or ()
    card_of(request, body.model)
    previous_id, param = body.previous_response_id, "previous_response_id"
    earlier = () if previous_id is None else await store.chain(previous_id, context.tenant, param)
    response_id, shown = _new_id("resp"), shown_tools(tools)
    items: list[JsonObject] = []
    encoders: list[ResponseEncoder] = []

    def make_body() -> ChatBody:
        items.extend(items_of(body.input, _new_id))
        return chat_body(body, messages_of(body.instructions, [*_items_of_chain(earlier), *items]))

    def make_encoder(accepted: Accepted) -> ResponseEncoder:
        base = response_base(body, response_id, accepted.model, int(time.time()))
        encoders.append(ResponseEncoder(ResponseWriter(base, _new_id), shown))
        return encoders[0]

    async def keep(answer: Answer) -> None:
        if body.store is not False:
            await store.put(StoredResponse(response_id, context.tenant, encoders[0].final(answer), tuple(items)))

    return await answer_as_chat(
        request,
        body.model,
        make_body,
        TABLE.with_tools([each.place for each in shown]),
        make_encoder,
        is_stream=bool(body.stream),
        new_call_id=lambda: _new_id("call"),
        warnings=tool_warnings(tools),
        cuts_to_context=False,
        before_end=keep,
    )


@router.get("/v1/responses/{response_id}", response_model=ResponseObject)
async def retrieve_response(
    response_id: str, request: Request, stream: Annotated[Literal["false"] | None, Query()] = None
) -> Response:
    """A stored response. It is complete, so it cannot be streamed."""
    _only(request, "stream")
    return JSONResponse((await _stored(request, response_id)).response)


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a stored response. Responses that continued it can no longer be continued."""
    await _stored(request, response_id)
    await store_of(request).delete(response_id, context_of(request).tenant)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel_response(response_id: str, request: Request) -> Response:
    """Not supported: every stored response is complete."""
    await _stored(request, response_id)
    raise InvalidParameterError(
        f"Only background responses can be cancelled, and {response_id} is not one; close the connection to abort",
        param="response_id",
    )


@router.get("/v1/responses/{response_id}/input_items", response_model=ItemList)
async def list_input_items(
    response_id: str,
    request: Request,
    after: Annotated[str | None, Query(max_length=MAX_ID_CHARS)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = DEFAULT_ITEMS,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """Input items of a stored response: the preceding conversation and the response's own input."""
    _only(request, "after", "limit", "order")
    chain = await store_of(request).chain(response_id, context_of(request).tenant)
    items = [*_items_of_chain(chain[:-1]), *chain[-1].input_items]
    return JSONResponse(item_list(items, after=after, limit=limit, is_descending=order == "desc"))


def _items_of_chain(chain: Sequence[StoredResponse]) -> list[JsonObject]:
    """Items of a conversation, in order."""
    return [item for stored in chain for item in (*stored.input_items, *stored.response["output"])]


async def _stored(request: Request, response_id: str) -> StoredResponse:
    return await store_of(request).get(response_id, context_of(request).tenant)


def _only(request: Request, *known: str) -> None:
    """Reject query parameters that would be ignored."""
    for name in request.query_params:
        if name not in known:
            raise InvalidParameterError(f"{name} is not a supported parameter", param=name)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def item_list(items: Sequence[JsonObject], *, after: str | None, limit: int, is_descending: bool) -> ItemList:
    """Return one page of a conversation.

    Args:
        items: items of the conversation, oldest first.
        after: id of the last item of the previous page; None: return the first page.

    Raises:
        InvalidParameterError: no item has the id ``after``.
    """
    ordered = list(reversed(items)) if is_descending else list(items)
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidParameterError(f"after is {after!r}, which is not the id of an item", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
