"""Anthropic's Messages API of a real server, as its own client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import jsonschema
import openai
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock

from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from tests.cluster.clusters import SUPPORT
from tests.cluster.support import one_model
from tests.server.adapters.clients import anthropic_client, check_events, events_of, given
from tests.server.living import Living, living
from tests.server.process import ServerProcess, serve
from tests.server.support import client_of
from tests.waiting import ENDLESS_MS, Gate, until

HELLO = "I was charged twice"
USER: Any = {"role": "user", "content": HELLO}
GREEDY: dict[str, Any] = {"model": "pocket", "temperature": 0.0, "max_tokens": 24, "messages": [USER]}
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks up an invoice.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}, "year": {"enum": [2025, 2026]}},
        "required": ["number", "year"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {**GREEDY, "max_tokens": 200, "tools": [LOOK], "tool_choice": {"type": "tool", "name": "look"}}


@pytest.fixture(scope="module")
def asked(served: ServerProcess) -> Iterator[anthropic.Anthropic]:
    """The official client of `served`."""
    with anthropic_client(served.base_url) as made:
        yield made


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def stream_of(server: ServerProcess | Living, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a stream tells, its events checked as they went over the wire."""
    with server.client() as client:
        answer = client.post("/v1/messages", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return check_events(events_of(answer.content))


@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}])
def test_a_message_has_the_text_and_usage_of_a_chat_completion(
    asked: anthropic.Anthropic, client: openai.OpenAI, drawn: dict[str, Any]
) -> None:
    chat = client.chat.completions.create(
        model="pocket",
        messages=[{"role": "system", "content": "Be brief."}, USER],
        max_tokens=24,
        **drawn,
    )
    message = asked.messages.create(**given({**GREEDY, **drawn, "system": "Be brief."}))
    assert text_of(message) == chat.choices[0].message.content != ""
    assert message.stop_reason == "max_tokens"
    assert (message.role, message.type, message.model) == ("assistant", "message", "pocket")
    assert chat.usage is not None
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens == 24


def test_a_streamed_message_equals_the_whole_one(served: ServerProcess, asked: anthropic.Anthropic) -> None:
    whole = asked.messages.create(**given(GREEDY))
    with asked.messages.stream(**given(GREEDY)) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(whole) == text_of(final)
    assert final.stop_reason == whole.stop_reason
    told = stream_of(served, GREEDY)
    assert told["content"] == [{"type": "text", "text": text_of(whole)}]


def test_counted_tokens_equal_the_usage(asked: anthropic.Anthropic) -> None:
    body = {name: FORCED[name] for name in ("model", "messages", "tools", "tool_choice")}
    counted = asked.messages.count_tokens(**body, system=[{"type": "text", "text": "Be brief."}])
    usage = asked.messages.create(**given({**FORCED, "system": "Be brief."})).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    long: Any = [{"role": "user", "content": "long " * 4_000}]
    assert asked.messages.count_tokens(model="pocket", messages=long).input_tokens > 4_000, "more than the context"


def test_a_stop_sequence_is_reported_and_left_out(asked: anthropic.Anthropic) -> None:
    whole = text_of(asked.messages.create(**given(GREEDY)))
    stop = whole[4:7]
    message = asked.messages.create(**given({**GREEDY, "stop_sequences": ["\x00never", stop]}))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]


def test_an_answer_goes_on_with_the_assistants_last_words(asked: anthropic.Anthropic, client: openai.OpenAI) -> None:
    begun: Any = {"role": "assistant", "content": "Thanks for"}
    message = asked.messages.create(**given({**GREEDY, "messages": [USER, begun]}))
    chat = client.chat.completions.create(
        model="pocket", messages=[USER, begun], max_tokens=24, temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    assert text_of(message) == chat.choices[0].message.content


def test_tool_calls_and_results_round_trip(
    served: ServerProcess, asked: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    first = asked.messages.create(**given(FORCED))
    [use] = first.content
    assert isinstance(use, ToolUseBlock)
    assert first.stop_reason == "tool_use"
    assert use.id.startswith("toolu_")
    jsonschema.validate(use.input, LOOK["input_schema"])
    told = stream_of(served, FORCED)
    assert [(block["type"], block["name"], block["input"]) for block in told["content"]] == [
        ("tool_use", "look", use.input)
    ]
    with asked.messages.stream(**given(FORCED)) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if isinstance(block, ToolUseBlock)] == [use.input]
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Paid."}]}
    messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = asked.messages.create(**given({**GREEDY, "tools": [LOOK], "messages": messages}))
    call: Any = {"id": use.id, "type": "function", "function": {"name": "look", "arguments": json.dumps(use.input)}}
    chat = client.chat.completions.create(
        model="pocket",
        messages=[
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": use.id, "content": "Paid."},
        ],
        tools=[{"type": "function", "function": {
            "name": "look", "description": LOOK["description"], "parameters": LOOK["input_schema"],
        }}],
        max_tokens=24,
        temperature=0,
    )  # fmt: skip
    assert text_of(second) == chat.choices[0].message.content


def test_the_clients_tool_runner_goes_on_without_a_conversation_that_is_kept(asked: anthropic.Anthropic) -> None:
    """It asks for one first, and again with all messages where a server says that it keeps none."""

    @anthropic.beta_tool
    def look(number: int) -> str:
        """Looks up an invoice."""
        return f"{number} is paid."

    runner = asked.beta.messages.tool_runner(model="pocket", max_tokens=24, messages=[USER], tools=[look])
    assert runner.until_done().content


def test_a_schema_is_obeyed(asked: anthropic.Anthropic) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}
    schema["additionalProperties"] = False
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = asked.messages.create(**given({**GREEDY, "max_tokens": 64, "output_config": config}))
    jsonschema.validate(json.loads(text_of(message)), schema)


def test_models_are_listed_in_the_format_of_anthropics_client(
    asked: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    [model] = asked.models.list()
    assert (model.id, model.display_name, model.type) == ("pocket", "pocket", "model")
    assert asked.models.retrieve("pocket").max_input_tokens == model.max_input_tokens == 2_048
    assert [each.id for each in client.models.list()] == ["pocket"], "and as OpenAI's knows them"
    with pytest.raises(anthropic.NotFoundError):
        asked.models.retrieve("nobody")


def agents_body() -> dict[str, Any]:
    """A request as coding agents send it, in the middle of a session."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [{**LOOK, "name": f"tool_{number}"} for number in range(20)]
    tools[-1] = {**tools[-1], **cached, "eager_input_streaming": True, "type": "custom"}
    use = {"type": "tool_use", "id": "toolu_01", "name": "tool_3", "input": {"number": 1, "year": 2026}}
    thoughts = {"type": "thinking", "thinking": "I look.", "signature": "c2ln"}
    parts = [{"type": "text", "text": "12 files"}, {"type": "text", "text": "3 folders", **cached}]
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": parts, "is_error": False, **cached}
    return {
        "model": "pocket",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are a coding agent.", **cached},
            {"type": "text", "text": "Be careful with files. " * 8, **cached},
        ],
        "tools": tools,
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_" + "0" * 64 + "_account__session_" + "1" * 36},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>Mind.</system-reminder>"}]},
            {"role": "user", "content": [{"type": "text", "text": "Count my files.", **cached}]},
            {"role": "assistant", "content": [thoughts, {"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
            {"role": "system", "content": "The user has 3 tasks open."},
        ],
    }


def test_a_coding_agents_body_is_taken() -> None:
    """Also where its context is short of what it may be answered with: that is the server's affair."""
    with living("stub://alpha?max_model_len=20000", name="pocket") as server, server.client() as client:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-management-2025-06-27,effort-2025"}
        body = {**agents_body(), "max_tokens": 40}
        answer = client.post("/v1/messages?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told = check_events(events_of(answer.content))
        counted = client.post(
            "/v1/messages/count_tokens?beta=true",
            json={name: body[name] for name in ("model", "system", "tools", "messages", "thinking", "tool_choice")},
        ).json()
        until(lambda: len(server.records) == 2, "both are recorded")
        [record] = [each for each in server.records if each.is_stream]
    assert told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"] == counted["input_tokens"]
    assert record.labels["user"].startswith("user_000")
    assert record.endpoint == "/v1/messages"
    assert "context_management" not in answer.headers.get("x-lockstep-warning", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "no images"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "invented", "name": "web_search"}]}, "tools[0]: A tool's type"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice.name",
        ),
        ({"mcp_servers": [{"url": "https://example.com"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperatur": 1}, "temperatur is not a supported parameter"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [{**LOOK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"messages": [USER] * 2 + [{"role": "user", "content": "long " * 4_000}]}, "tokens"),
    ],
)  # fmt: skip
def test_unsupported_parameters_are_rejected_by_name(
    asked: anthropic.Anthropic, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says.replace("[", r"\[")) as refused:
        asked.messages.create(**given(GREEDY | change))
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id == refused.value.body["request_id"]


def test_errors_have_anthropics_types(asked: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="`nobody` does not exist") as unknown:
        asked.messages.create(**given({**GREEDY, "model": "nobody"}))
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    options = ServerOptions(api_keys=("key",), requests_per_minute=1, max_body_bytes=20_000)
    with living("stub://alpha", options) as server:
        with anthropic_client(server.url, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as denied:
            client.messages.create(**given({**GREEDY, "model": "m"}))
        assert isinstance(denied.value.body, dict)
        assert denied.value.body["error"]["type"] == "authentication_error"
        with anthropic_client(server.url, "key") as client:
            client.messages.create(**given({**GREEDY, "model": "m"}))
            with pytest.raises(anthropic.RateLimitError) as hurried:
                client.messages.create(**given({**GREEDY, "model": "m"}))
            assert int(hurried.value.response.headers["retry-after"]) > 0
    with living("stub://alpha", ServerOptions(max_body_bytes=1_000)) as server, anthropic_client(server.url) as client:
        with pytest.raises(anthropic.APIStatusError) as large:
            client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x" * 2_000}])
        assert isinstance(large.value.body, dict)
        assert (large.value.status_code, large.value.body["error"]["type"]) == (413, "request_too_large")


async def test_a_server_that_cannot_answer_now_is_overloaded() -> None:
    cluster = one_model("stub://alpha", ("m",))  # which was not started
    transport = httpx2.ASGITransport(app=create_app(cluster))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/messages", json={**GREEDY, "model": "m"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    with living("stub://alpha?fail_every=20") as server, server.client() as client:
        answer = client.post("/v1/messages", json={"max_tokens": 64, "messages": [USER], "stream": True})
        *_, last = events_of(answer.content)
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        with anthropic_client(server.url) as other, pytest.raises(anthropic.APIStatusError):
            list(other.messages.create(model="m", max_tokens=64, messages=[USER], stream=True))


def test_leaving_a_stream_aborts_its_request_within_a_step(gate: Gate) -> None:
    with living(f"stub://alpha?step_ms={ENDLESS_MS}") as server, anthropic_client(server.url) as client:
        gate.let_one()
        with client.messages.stream(model="m", max_tokens=500, messages=[USER]) as stream:
            next(iter(stream.text_stream))
            held = gate.num_held
        until(lambda: server.cluster.num_open == 0, "its call is closed while a step is held")
        assert gate.num_held <= held + 1
        gate.open()
        until(lambda: bool(server.records), "it is recorded")
        assert server.records[0].status == 499


def test_routed_message_has_its_route_in_an_extension(tmp_path: Any) -> None:
    path = tmp_path / "support.yaml"
    path.write_text(SUPPORT)
    with serve("--manifest", str(path), "--backend", "stub") as server, server.client() as client:
        body = {"max_tokens": 8, "messages": [USER]}
        message = client.post("/v1/messages", json=body).json()
        route = message["lockstep"]
        assert route["entry_model"] != route["final_model"] == message["model"]
        assert len(route["hops"]) == 2
        events = events_of(client.post("/v1/messages", json={**body, "stream": True}).content)
        check_events(events)
        assert events[-2]["lockstep"]["final_model"] == message["model"]
        line = client.post(
            "/api/chat", json={"model": route["entry_model"], "messages": [USER], "stream": False}
        ).json()
        assert line["lockstep"]["final_model"] == line["model"] == message["model"]
        assert all(block["type"] == "text" for block in message["content"]), "no call that a client would execute"


async def test_a_content_type_other_than_json_is_rejected() -> None:
    async with client_of() as client:
        answer = await client.post("/v1/messages", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")
