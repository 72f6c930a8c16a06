"""Routed answers: what a client is shown of the router's part, and what it costs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from lockstep.cluster.base import Accepted, EventStream, Hop
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from lockstep.worker.progress import CallProgress
from tests.server.frames import events_of, texts_of
from tests.server.support import client_of

ROUTER = Hop("router", "billing", "billing", "specialists.billing", 0.0125, 20, 16, 1)
UNKNOWN = Hop("router", "none", None, "fallback", 0.001, 20, 0, 1)
STANDS = Hop("router", "none", None, None, 0.001, 20, 0, 1)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "I was charged twice"}], "max_tokens": 6, "seed": 1}
CHAT = "/v1/chat/completions"


class Routing(Cluster):
    """One model, and a router before it that always says the same."""

    hop = ROUTER
    calls: list[GenerationRequest]

    async def stream(self, call: GenerationRequest, progress: CallProgress | None = None) -> EventStream:
        self.calls.append(call)
        async with contextlib.aclosing(super().stream(call, progress)) as stream:
            async for events in stream:
                yield [
                    msgspec.structs.replace(event, hops=(self.hop,)) if isinstance(event, Accepted) else event
                    for event in events
                ]


@contextlib.asynccontextmanager
async def routed(
    hop: Hop = ROUTER, options: ServerOptions | None = None
) -> AsyncIterator[tuple[httpx2.AsyncClient, Routing, list[RequestContext]]]:
    cluster = Routing(Manifest.of_model("stub://alpha", ("billing",)))
    cluster.hop, cluster.calls = hop, []
    records: list[RequestContext] = []
    await cluster.start()
    try:
        app = create_app(cluster, options, [lambda record, _: records.append(record)])
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
            yield client, cluster, records
    finally:
        await cluster.close()


def router_call(answer_id: str, intent: str | None, target: str) -> dict[str, Any]:
    arguments = json.dumps({"intent": intent, "target": target}, separators=(",", ":"))
    function = {"name": "dispatch_to_specialist", "arguments": arguments}
    return {"id": f"call_{answer_id}_router", "type": "function", "function": function}


async def test_a_whole_answer_has_the_content_and_the_routers_call() -> None:
    async with routed() as (client, _, _):
        answer = (await client.post(CHAT, json=ASK)).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"]
    assert choice["message"]["tool_calls"] == [router_call(answer["id"], "billing", "specialists.billing")]
    assert choice["finish_reason"] == "stop", "not tool_calls: nobody waits for a result"
    assert answer["model"] == "billing"


async def test_a_stream_begins_with_the_routers_call_and_then_is_the_whole_answer() -> None:
    async with routed() as (client, _, _):
        whole = (await client.post(CHAT, json=ASK)).json()
        events = events_of((await client.post(CHAT, json={**ASK, "stream": True})).content)
    [first, *rest] = events
    [call] = first["choices"][0]["delta"].pop("tool_calls")
    assert call == {"index": 0, **router_call(first["id"], "billing", "specialists.billing")}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any(choice["delta"].keys() & {"role", "tool_calls"} for event in rest for choice in event["choices"])
    assert texts_of(events) == {0: whole["choices"][0]["message"]["content"]}
    assert events[-1]["lockstep"]["hops"][0] == whole["lockstep"]["hops"][0]


async def test_every_choice_of_a_stream_is_opened_once() -> None:
    async with routed() as (client, _, _):
        events = events_of((await client.post(CHAT, json={**ASK, "stream": True, "n": 3})).content)
    opened = [c["index"] for event in events for c in event["choices"] if "role" in c["delta"]]
    called = [c["index"] for event in events for c in event["choices"] if "tool_calls" in c["delta"]]
    assert opened == called == [0, 1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"lockstep_hops": False},
        {"tools": [{"type": "function", "function": {"name": "refund", "parameters": {"type": "object"}}}]},
    ],
    ids=["opted-out", "own-tools"],
)
async def test_strict_clients_are_not_shown_the_call(more: dict[str, Any], is_stream: bool) -> None:
    """Their extension tells it all the same."""
    async with routed() as (client, _, _):
        response = await client.post(CHAT, json={**ASK, **more, "stream": is_stream})
    assert response.status_code == 200
    assert "dispatch_to_specialist" not in response.text
    extension = events_of(response.content)[-1]["lockstep"] if is_stream else response.json()["lockstep"]
    assert extension["final_model"] == "billing"


async def test_extension_has_every_hop_with_its_usage() -> None:
    async with routed() as (client, _, _):
        answer = (await client.post(CHAT, json=ASK)).json()
    told = answer["lockstep"]
    assert (told["entry_model"], told["final_model"], told["intent"]) == ("router", "billing", "billing")
    router, last = told["hops"]
    assert router == {
        "model": "router",
        "completion": "billing",
        "intent": "billing",
        "latency_ms": 12.5,
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 1,
            "total_tokens": 21,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert (last["model"], last["intent"]) == ("billing", None)
    assert last["completion"] == answer["choices"][0]["message"]["content"]
    assert last["usage"] == answer["usage"], "the answer's usage is the last hop's"
    assert told["latency_ms"] >= last["latency_ms"]


async def test_a_direct_request_has_no_routing_fields() -> None:
    async with client_of() as client:
        answer = (await client.post(CHAT, json=ASK)).json()
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert not answer["lockstep"].keys() & {"entry_model", "final_model", "intent", "latency_ms", "hops"}


async def test_the_fallback_is_a_target_without_an_intent() -> None:
    async with routed(UNKNOWN) as (client, _, _):
        answer = (await client.post(CHAT, json=ASK)).json()
    assert answer["choices"][0]["message"]["tool_calls"] == [router_call(answer["id"], None, "fallback")]
    assert answer["lockstep"]["intent"] is None


async def test_where_the_routers_own_answer_stands_there_is_no_call_and_one_hop() -> None:
    async with routed(STANDS) as (client, _, _):
        answer = (await client.post(CHAT, json=ASK)).json()
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert [hop["model"] for hop in answer["lockstep"]["hops"]] == ["router"]


async def test_an_answer_may_be_sent_back_as_it_came_and_no_model_sees_the_routers_call() -> None:
    async with routed() as (client, cluster, _):
        message = (await client.post(CHAT, json=ASK)).json()["choices"][0]["message"]
        again = {**ASK, "messages": [*ASK["messages"], message, {"role": "user", "content": "And now?"}]}
        assert (await client.post(CHAT, json=again)).status_code == 200
    prompt = cluster.calls[-1].prompt
    assert isinstance(prompt, Conversation)
    assert "tool_calls" not in prompt.messages[1]
    assert prompt.messages[1]["content"] == message["content"]


async def test_the_clients_own_calls_stay_in_the_conversation() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "refund", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    async with routed() as (client, cluster, _):
        assert (await client.post(CHAT, json={**ASK, "messages": messages})).status_code == 200
    prompt = cluster.calls[-1].prompt
    assert isinstance(prompt, Conversation)
    assert "refund" in str(prompt.messages)


async def test_completions_and_responses_have_the_hops() -> None:
    async with routed() as (client, _, _):
        text = (await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})).json()
        response = (await client.post("/v1/responses", json={"input": "a", "max_output_tokens": 16})).json()
    assert [hop["model"] for hop in text["lockstep"]["hops"]] == ["router", "billing", "router", "billing"]
    assert [hop["model"] for hop in response["lockstep"]["hops"]] == ["router", "billing"]


async def test_routing_is_charged_and_recorded() -> None:
    async with routed() as (client, _, records):
        answer = (await client.post(CHAT, json=ASK)).json()
    [record] = records
    assert record.hops == [ROUTER]
    assert record.num_tokens == answer["usage"]["total_tokens"] + 21
    assert record.totals.num_output_tokens == answer["usage"]["completion_tokens"]
