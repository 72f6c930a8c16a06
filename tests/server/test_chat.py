"""Chat completions over HTTP: what the official client gets, and what is refused."""

from __future__ import annotations

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.server.living import Living

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
        ({"store": True}, "store"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"priority": 3}, "priority"),
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_what_is_wrong_is_refused_by_name(pocket: Living, body: dict[str, object], param: str) -> None:
    answer = httpx2.post(f"{pocket.url}/v1/chat/completions", json={"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
