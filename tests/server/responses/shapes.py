"""OpenAI's own types as the judge of what we say: strict, and nothing that they do not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_output_item import ResponseOutputItem
from pydantic import BaseModel

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
OUR_OWN = {"lockstep", "store"}
"""Members of the response object that OpenAI's client does not know: ours, and one that it has not typed."""


def _by_type(union: Any) -> Mapping[str, type[BaseModel]]:
    members = get_args(get_args(union)[0])
    return {get_args(member.model_fields["type"].annotation)[0]: member for member in members}


EVENTS = _by_type(ResponseStreamEvent)
ITEMS = _by_type(ResponseOutputItem)


def check_response(response: Mapping[str, Any]) -> Response:
    """The object as OpenAI's client sees it."""
    _check_fields(Response, response, OUR_OWN)
    for item in response["output"]:
        _check_fields(ITEMS[item["type"]], item)
    return Response.model_validate(response, strict=True)


def check_event(event: Mapping[str, Any]) -> None:
    kind = EVENTS[event["type"]]
    _check_fields(kind, event)
    kind.model_validate(event, strict=True)
    if "response" in event:
        check_response(event["response"])


def check_events(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A whole stream: well-formed, in order, with one end; returns the final response."""
    for event in events:
        check_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    final: Mapping[str, Any] = events[-1]["response"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    if final["status"] != "failed":
        _check_items(events, final["output"])
    return final


def _check_items(events: Sequence[Mapping[str, Any]], output: Sequence[Mapping[str, Any]]) -> None:
    """Items are written one after the other; their pieces make what they say at their end."""
    of_items = [event for event in events if "output_index" in event]
    indices = [event["output_index"] for event in of_items]
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(indices))
    for index, item in enumerate(output):
        mine = [event for event in of_items if event["output_index"] == index]
        assert (mine[0]["type"], mine[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in mine} == {item["id"]}
        written = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        text = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        said = item["content"][0]["text"] if text is None else item[text]
        assert written == said
    assert len(output) == indices[-1] + 1


def _check_fields(model: type[BaseModel], value: Mapping[str, Any], more: set[str] = frozenset()) -> None:  # type: ignore[assignment]  # an empty set is a set
    known = {field.alias or name for name, field in model.model_fields.items()}
    assert set(value) <= known | more, f"{model.__name__}: unknown {sorted(set(value) - known - more)}"
