"""Items in pages, as OpenAI lists them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import InvalidParameterError
from lockstep.server.responses.conversation import JsonObject

MAX_ITEMS = 100
"""Of one page, as with OpenAI; so is the default."""
DEFAULT_ITEMS = 20


def item_list(items: Sequence[JsonObject], *, after: str | None, limit: int, is_descending: bool) -> dict[str, Any]:
    """One page of a conversation.

    Args:
        items: of the conversation, oldest first.
        after: id of the last item of the page before; None: the first page.

    Raises:
        InvalidParameterError: there is no item ``after``.
    """
    ordered = list(reversed(items)) if is_descending else list(items)
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidParameterError(f"after is {after!r}, which is none of the items", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
