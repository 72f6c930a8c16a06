"""Chat completions over HTTP: what the official client gets, and what is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionTokenLogprob,
    ChatCompletionToolParam,
)
from pydantic import BaseModel, ConfigDict, Field

from tests.server.living import Living
from tests.server.process import ServerProcess
from tests.waiting import until

ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "I was charged twice"}]


def test_an_answer_has_openais_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="pocket", messages=ASK, max_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_stream_concatenated_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="pocket", messages=ASK, max_tokens=32, seed=5, n=3)
    texts = ["", "", ""]
    finishes: dict[int, str] = {}
    ids = set()
    roles: list[int] = []
    usage = None
    for chunk in client.chat.completions.create(
        model="pocket",
        messages=ASK,
        max_tokens=32,
        seed=5,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    ):
        ids.add((chunk.id, chunk.created))
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append(choice.index)
            if choice.finish_reason:
                assert not choice.delta.content
                finishes[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert [finishes[index] for index in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert sorted(roles) == [0, 1, 2]
    assert len(ids) == 1
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_the_asynchronous_client_gets_the_same(client: openai.OpenAI, served: ServerProcess) -> None:
    whole = client.chat.completions.create(model="pocket", messages=ASK, max_tokens=16, seed=3)
    async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as other:
        text = ""
        stream = await other.chat.completions.create(model="pocket", messages=ASK, max_tokens=16, seed=3, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content


def test_the_same_seed_is_the_same_answer_and_another_is_another(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(model="pocket", messages=ASK, max_tokens=24, seed=seed, temperature=1.5)
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_tokens_of_logprobs_are_the_text(client: openai.OpenAI, is_stream: bool) -> None:
    content: list[ChatCompletionTokenLogprob] = []
    if is_stream:
        text = ""
        for chunk in client.chat.completions.create(
            model="pocket", messages=ASK, max_tokens=20, seed=1, logprobs=True, top_logprobs=3, stream=True
        ):
            [choice] = chunk.choices
            text += choice.delta.content or ""
            if choice.logprobs is not None:
                content += choice.logprobs.content or []
    else:
        [whole] = client.chat.completions.create(
            model="pocket", messages=ASK, max_tokens=20, seed=1, logprobs=True, top_logprobs=3
        ).choices
        assert whole.logprobs is not None
        text, content = whole.message.content or "", whole.logprobs.content or []
    assert "".join(entry.token for entry in content) == text
    assert bytes(byte for entry in content for byte in entry.bytes or ()).decode() == text
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )


def test_examples_of_the_openapi_document_are_answered(stub: Living) -> None:
    document = stub.get("/openapi.json").json()
    for path, name in (("/v1/chat/completions", "ChatBody"), ("/v1/completions", "CompletionBody")):
        examples = document["components"]["schemas"][name]["examples"]
        assert examples
        for example in examples:
            answer = stub.post(path, example)
            assert answer.status_code == 200, answer.text


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="pocket", messages=ASK, max_tokens=60, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[10:14]
    [choice] = client.chat.completions.create(
        model="pocket", messages=ASK, max_tokens=60, temperature=0, stop=[stop], logprobs=True
    ).choices
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == stop
    assert choice.logprobs is not None
    told = "".join(entry.token for entry in choice.logprobs.content or ())
    assert told.startswith(choice.message.content)


class Ticket(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: Literal["billing", "technical", "legal"]
    urgent: bool
    summary: Annotated[str, Field(max_length=20)]


@pytest.mark.parametrize("seed", range(4))
def test_a_strict_schema_always_validates(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(
        model="pocket", messages=ASK, response_format=Ticket, seed=seed, temperature=1.5, max_tokens=200
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Ticket)


TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "open_ticket",
        "description": "Open a ticket.",
        "parameters": {
            "type": "object",
            "properties": {"queue": {"type": "string", "enum": ["billing", "legal"]}},
            "required": ["queue"],
            "additionalProperties": False,
        },
    },
}


def test_required_call_is_equal_with_and_without_stream(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model="pocket", messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=2
    ).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "open_ticket"
    assert json.loads(call.function.arguments)["queue"] in ("billing", "legal")
    assert choice.message.content is None
    names, arguments, finishes, ids = "", "", [], set()
    for chunk in client.chat.completions.create(
        model="pocket",
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        stream=True,
    ):
        [part] = chunk.choices
        assert not part.delta.content
        for delta in part.delta.tool_calls or ():
            assert delta.function is not None
            names += delta.function.name or ""
            arguments += delta.function.arguments or ""
            if delta.id:
                ids.add(delta.id)
        finishes += [part.finish_reason] if part.finish_reason else []
    assert (names, arguments, finishes) == ("open_ticket", call.function.arguments, ["tool_calls"])
    assert len(ids) == 1


def test_a_named_call_and_its_result_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(
        model="pocket",
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "open_ticket"}},
    ).choices
    [call] = choice.message.tool_calls or []
    told: Any = choice.message.model_dump()
    answer = client.chat.completions.create(
        model="pocket",
        messages=[*ASK, told, {"role": "tool", "tool_call_id": call.id, "content": "done"}],
        tools=[TOOL],
        tool_choice="none",
        max_tokens=5,
    )
    assert not answer.choices[0].message.tool_calls


def test_the_request_record_has_labels_and_usage(pocket: Living) -> None:
    body = {"messages": ASK, "max_tokens": 3, "user": "u7", "metadata": {"run": "9"}}
    answer = pocket.post("/v1/chat/completions", body, headers={"x-request-id": "named-by-us"})
    assert answer.json()["lockstep"]["request_id"] == "named-by-us"
    until(lambda: any(record.request_id == "named-by-us" for record in pocket.records), "it is remembered")
    [record] = [record for record in pocket.records if record.request_id == "named-by-us"]
    assert record.model == "pocket"
    assert record.labels == {"run": "9", "user": "u7"}
    assert record.totals.num_output_tokens == 3
    assert record.finish_reasons == ["length"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [123]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "emperor", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call.name"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"stream_options": {"every_usage": True}}, "stream_options.every_usage"),
        ({"priority": 3}, "priority"),
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"session_id": "s" * 513}, "session_id"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "guided_regex": "a"}, "guided_regex"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(pocket: Living, body: dict[str, object], param: str) -> None:
    answer = pocket.post("/v1/chat/completions", {"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
