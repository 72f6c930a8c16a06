"""A remote model behind the HTTP server: usage, calls of functions, errors and refusals as clients see them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from lockstep.cluster.base import EventStream, ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.remote import RemoteModel
from lockstep.engine.request import GenerationRequest
from lockstep.server.app import create_app
from lockstep.worker.progress import CallProgress
from tests.cluster.remotes import HEAD, Reply, chunk, crooked, event, refuses, remote, says, whole

MANIFEST = "cluster: c\nmodels:\n  far: {remote: {base_url: 'http://127.0.0.1:1'}}\n"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
ARGUMENTS = '{"id": 7}'
CALLING = b"".join(
    (
        HEAD,
        chunk({"role": "assistant", "content": "Let me see."}),
        chunk({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "look_up", "arguments": ""}}]}),
        *(chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}) for part in ARGUMENTS),
        chunk({}, "tool_calls"),
        event(b"[DONE]"),
    )
)


class OnlyRemote(Cluster):
    """The smallest cluster: one remote model, which is given."""

    def __init__(self, model: RemoteModel) -> None:
        super().__init__(parse(MANIFEST))
        self._model = model

    def card(self, name: str | None) -> ModelCard:
        return ModelCard("far", (), "hf://a/b", 0, "remote", None, True, text=self._model.tokenizer)

    def stream(self, call: GenerationRequest, progress: CallProgress | None = None) -> EventStream:
        return self._model.stream(call)


@contextlib.asynccontextmanager
async def client_of(*replies: Reply) -> AsyncIterator[tuple[httpx2.AsyncClient, list[tuple[str, dict[str, Any]]]]]:
    """A client of a server whose only model is remote, and what that one is asked."""
    async with crooked(*replies) as server, remote(server.url) as model:
        transport = httpx2.ASGITransport(app=create_app(OnlyRemote(model)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, server.requests


def body(**more: Any) -> dict[str, Any]:
    return {"model": "far", "messages": [{"role": "user", "content": "Hello"}], **more}


async def test_usage_is_the_other_servers() -> None:
    async with client_of(says(whole("Once", " upon"))) as (client, _):
        answer = (await client.post("/v1/chat/completions", json=body())).json()
    assert answer["choices"][0]["message"]["content"] == "Once upon"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer["lockstep"]["tokens_per_second"] > 0


async def test_calls_of_functions_pass_through_whole_and_streamed() -> None:
    async with client_of(says(CALLING)) as (client, asked):
        answer = (await client.post("/v1/chat/completions", json=body(tools=[TOOL]))).json()
        streamed = (await client.post("/v1/chat/completions", json=body(tools=[TOOL], stream=True))).text
    assert asked[0][1]["tools"][0]["function"]["name"] == "look_up"
    choice = answer["choices"][0]
    expected = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
    assert choice["message"]["tool_calls"] == [expected]
    assert choice["message"]["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    frames = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    calls = [call for one in frames for call in one["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["id"] == "call_1"
    assert calls[0]["function"]["name"] == "look_up"
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert frames[-1]["choices"][0]["finish_reason"] == "tool_calls"


CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Which order?"}]},
    {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "seven"},
    {"role": "tool", "tool_call_id": "call_2", "content": "eight"},
    {"role": "assistant", "content": "Two of them."},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize("more", [{"tools": [TOOL]}, {}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_past_calls_and_results_are_sent_as_the_client_sent_them(more: dict[str, Any]) -> None:
    async with client_of(says(whole("Once"))) as (client, asked):
        answer = await client.post("/v1/chat/completions", json={"model": "far", "messages": CALLED, **more})
    assert answer.status_code == 200, answer.text
    assert asked[0][1]["messages"] == CALLED


async def test_past_calls_of_other_apis_are_sent_in_the_form_of_openai() -> None:
    said = [
        {"role": "user", "content": "Which order?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look_up", "input": {"id": 7}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "seven"}]},
    ]
    async with client_of(says(whole("Once"))) as (client, asked):
        answer = await client.post("/v1/messages", json={"model": "far", "max_tokens": 4, "messages": said})
    assert answer.status_code == 200, answer.text
    _, called, result = asked[0][1]["messages"]
    [call] = called["tool_calls"]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("call_1", {"id": 7})
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_1", "seven")


async def test_variables_of_the_template_pass_through() -> None:
    more = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    async with client_of(says(whole("Once"))) as (client, asked):
        (await client.post("/v1/chat/completions", json=body(**more))).raise_for_status()
    assert asked[0][1]["reasoning_effort"] == "low"
    assert asked[0][1]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)
async def test_parameters_that_need_token_ids_are_rejected_by_name(more: dict[str, Any], param: str) -> None:
    async with client_of(says(whole("Once"))) as (client, _):
        answer = await client.post("/v1/chat/completions", json=body(**more))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_tokenize_and_detokenize_are_rejected_for_a_remote_model() -> None:
    async with client_of(says(whole("Once"))) as (client, _):
        answer = await client.post("/tokenize", json={"model": "far", "prompt": "Hello"})
        back = await client.post("/detokenize", json={"model": "far", "tokens": []})
    assert answer.status_code == back.status_code == 400


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (refuses(500), 502),
        (refuses(401), 502),
        (says(b"220 mail.example.com ESMTP\r\n"), 502),
        (says(), 502),
        (refuses(503, None, "Retry-After: 9"), 503),
        (refuses(504), 504),
    ],
)
async def test_failures_before_the_first_byte_have_their_status(reply: Reply, status: int) -> None:
    async with client_of(reply) as (client, _):
        answer = await client.post("/v1/chat/completions", json=body(stream=True))
    assert answer.status_code == status
    assert "'far'" in answer.json()["error"]["message"]
    assert answer.headers.get("retry-after") == ("9" if status == 503 else None)


async def test_a_stream_that_is_cut_ends_with_an_error_frame() -> None:
    async with client_of(says(HEAD + chunk({"content": "Once"}))) as (client, _):
        answer = await client.post("/v1/chat/completions", json=body(stream=True))
    *_, failure, done = answer.text.strip().split("\n\n")
    assert "closed the connection" in json.loads(failure.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
