"""Parameters of OpenAI's and vLLM's that clients send: each does what it says, or the answer says that it does not."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.chat import ChatBody, chat_call
from lockstep.server.completions import CompletionBody
from lockstep.server.embeddings import EmbeddingBody
from lockstep.server.generation import Caller
from lockstep.server.options import ServerOptions
from lockstep.server.responses.schema import ResponseBody
from tests.engine import text_models
from tests.engine.chat_templates import QWEN3
from tests.server.living import Living

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "hello"}
SAID: dict[str, Any] = {"role": "assistant", "content": "Dear customer,"}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "g"}}


def asked(server: Living, path: str = CHAT, **body: Any) -> httpx2.Response:
    said = {"messages": [USER]} if path == CHAT else {"prompt": "hello"} if path == TEXT else {"input": "hello"}
    answer = server.post(path, {**said, **body})
    assert answer.status_code == 200, answer.text
    return answer


def chunks(server: Living, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    frames = asked(server, path, stream=True, **body).text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include", [None, True, False])
def test_every_chunk_has_the_usage_so_far(stub: Living, path: str, include: bool | None) -> None:
    options = {"continuous_usage_stats": True, **({} if include is None else {"include_usage": include})}
    told = chunks(stub, path, stream_options=options, n=2, max_tokens=8, ignore_eos=True, echo=path == TEXT)
    whole = asked(stub, path, n=2, max_tokens=8, ignore_eos=True).json()["usage"]
    if include is not False:
        assert told[-1]["choices"] == []
        assert told.pop()["usage"]["completion_tokens"] == whole["completion_tokens"] == 16
    for index in range(2):
        own = [chunk for chunk in told if chunk["choices"][0]["index"] == index]
        counts = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert counts[0] == 0, "ahead of all tokens"
        assert counts == sorted(counts)
        assert counts[-1] == 8
        for chunk in own:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == whole["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"parallel_tool_calls": True}),
        (CHAT, {"parallel_tool_calls": False}),
        (CHAT, {"service_tier": "priority", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "auto"}}),
        (CHAT, {"verbosity": "medium", "store": False, "cache_control": {"type": "ephemeral"}}),
        (CHAT, {"best_of": 2, "n": 2, "add_generation_prompt": False, "echo": True}),
        (TEXT, {"best_of": 1, "service_tier": "flex", "echo": True}),
        (RESPONSES, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"truncation": "auto", "service_tier": "scale", "include": ["file_search_call.results"]}),
    ],
)
def test_neutral_values_are_accepted_without_a_warning(stub: Living, path: str, body: dict[str, Any]) -> None:
    answer = asked(stub, path, **body)
    assert "x-lockstep-warning" not in answer.headers
    assert "warnings" not in answer.json()["lockstep"]
    if "service_tier" in body:
        assert answer.json()["service_tier"] == "default"
        if path != RESPONSES:
            assert {chunk["service_tier"] for chunk in chunks(stub, path, **body)} == {"default"}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"store": True}, ["store"]),
        (TEXT, {"store": True}, ["store"]),
        (CHAT, {"reasoning_effort": "high"}, ["reasoning_effort"]),
        (CHAT, {"reasoning_effort": "none", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs.enable_thinking"]),
        (
            RESPONSES,
            {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}},
            ["reasoning.effort", "text.verbosity"],
        ),
    ],
)
def test_parameters_without_effect_give_a_warning(
    stub: Living, path: str, body: dict[str, Any], names: list[str]
) -> None:
    answer = asked(stub, path, **body)
    warnings = answer.json()["lockstep"]["warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == names
    assert answer.headers["x-lockstep-warning"] == "; ".join(warnings)
    assert "x-lockstep-warning" in asked(stub, path, **body, stream=True).headers


def test_a_warning_holds_no_line_of_a_header(stub: Living) -> None:
    names = {f"größe_{n}" + "x" * 200: 1 for n in range(40)}
    answer = asked(stub, chat_template_kwargs=names)
    assert len(answer.json()["lockstep"]["warnings"]) == 16
    assert answer.headers["x-lockstep-warning"].isascii()


def test_a_reasoning_effort_that_the_template_supports_gives_no_warning() -> None:
    tokenizer = Tokenizer(text_models.parts(text_models.byte_level(), QWEN3))
    for body, warned in (
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "high"}, 1),
        ({"chat_template_kwargs": {"enable_thinking": False, "color": 1}}, 1),
    ):
        chat = ChatBody.model_validate({"messages": [USER], **body})
        _, reply = chat_call(chat, Caller("", ServerOptions()), tokenizer)
        assert len(reply.warnings(tokenizer)) == warned


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_is_gone_on_with_and_echoed(stub: Living, is_stream: bool) -> None:
    """The stub counts the characters of its prompt, borders apart."""
    body: dict[str, Any] = {"messages": [USER, SAID], "continue_final_message": True, "echo": True, "max_tokens": 99}
    if is_stream:
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks(stub, **body))
    else:
        answer = asked(stub, **body).json()
        text = answer["choices"][0]["message"]["content"]
        closed = asked(stub, **{**body, "continue_final_message": False}).json()["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens"] == closed - 2, "no end of the message, no beginning of another"
    assert text == "Dear customer,[stub:alpha] ok len=19 max=99"


def test_nothing_is_echoed_of_a_user(stub: Living) -> None:
    told = asked(stub, echo=True, max_tokens=99).json()["choices"][0]["message"]["content"]
    assert told == "[stub:alpha] ok len=5 max=99"


def test_a_prompt_without_a_generation_prompt_is_shorter(stub: Living) -> None:
    lengths = [asked(stub, add_generation_prompt=add).json()["usage"]["prompt_tokens"] for add in (True, False)]
    assert lengths[0] == lengths[1] + 1


def test_included_stop_text_has_its_log_probability(stub: Living) -> None:
    for body in ({"stop": "ok"}, {"stop_token_ids": [ord("k")]}):
        [choice] = asked(
            stub, include_stop_str_in_output=True, logprobs=True, max_tokens=99, temperature=0, **body
        ).json()["choices"]
        assert choice["message"]["content"] == "[stub:alpha] ok"
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "[stub:alpha] ok"


def test_special_tokens_are_shown_with_their_log_probabilities(stub: Living) -> None:
    [choice] = asked(
        stub, skip_special_tokens=False, logprobs=True, guided_grammar="start: <|user|> <|system|>"
    ).json()["choices"]
    assert choice["message"]["content"] == "<|user|><|system|>"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<|user|>", "<|system|>"]


def test_bad_words_do_not_come(stub: Living) -> None:
    text = asked(stub, TEXT, bad_words=["ok"], temperature=0, max_tokens=99).json()["choices"][0]["text"]
    assert "ok" not in text
    failed = stub.post(TEXT, {"prompt": "x", "bad_words": ["a"], "guided_choice": ["a"]})
    assert "bad_words" in failed.json()["error"]["message"]


def test_the_deprecated_form_of_a_call_is_answered_in_it(client: openai.OpenAI) -> None:
    made: dict[str, Any] = {"model": "pocket", "messages": [USER], "functions": [FUNCTION], "seed": 3}
    forced = {**made, "function_call": {"name": "f"}}
    [choice] = client.chat.completions.create(**forced).choices
    called = choice.message.function_call
    assert called is not None
    assert choice.message.tool_calls is None
    assert called.name == "f"
    assert choice.finish_reason == "stop", "as OpenAI: the model chose nothing"
    names, arguments = "", ""
    for chunk in client.chat.completions.create(**forced, stream=True):
        delta = chunk.choices[0].delta.function_call
        if delta is not None:
            names += delta.name or ""
            arguments += delta.arguments or ""
    assert (names, arguments) == ("f", called.arguments)
    silent = client.chat.completions.create(**made, function_call="none", max_tokens=2)
    assert silent.choices[0].message.function_call is None


@pytest.mark.parametrize("is_item", [False, True])
def test_only_allowed_tools_are_called(client: Any, is_item: bool) -> None:
    named = {"type": "function", "function": {"name": "g"}}
    if is_item:
        response = client.responses.create(
            model="pocket",
            input="hello",
            tools=[{"type": "function", **tool["function"]} for tool in (TOOL, OTHER)],
            tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]},
        )
        names = [item.name for item in response.output if item.type == "function_call"]
    else:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        answer = client.chat.completions.create(
            model="pocket", messages=[{"role": "user", "content": "hello"}], tools=[TOOL, OTHER], tool_choice=choice
        )
        names = [call.function.name for call in answer.choices[0].message.tool_calls]
    assert set(names) == {"g"}


def test_a_response_format_and_tools_can_be_combined(client: Any) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    strict = {**FUNCTION, "strict": True}
    formatted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="pocket",
            messages=[{"role": "user", "content": "hello"}],
            tools=[{"type": "function", "function": strict}],
            response_format=formatted,
            seed=seed,
        )
        message = answer.choices[0].message
        assert message.tool_calls or set(json.loads(message.content or "")) == {"b"}


UNKNOWN = {"moderation", "access_programs", "background_options", "context_management", "image"}
"""Refused by name."""


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatBody),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody),
        (response_create_params.ResponseCreateParamsBase, ResponseBody),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
    ],
)
def test_every_parameter_of_the_official_client_is_known(params: Any, body: Any) -> None:
    assert set(params.__annotations__) - set(body.model_fields) <= UNKNOWN
