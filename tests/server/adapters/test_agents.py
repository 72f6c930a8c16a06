"""Coding agents: requests in the shapes that Claude Code 2.1 and Codex CLI 0.169 send, answered by a scripted stub.

The texts are ours and short; which members there are, and in which order, is theirs. `python -m tools.clients` runs the
programs themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.adapters.clients import check_events, events_of
from tests.server.living import Living, living
from tests.server.responses.shapes import check_events as check_response_events

ASK, LINE = "Which line does note.txt have?", "the-line-of-the-note"
MAX_TOKENS = 32_000
"""Of Claude Code, whatever the context."""
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"description": "Its path", "type": "string"},
            "offset": {"type": "integer", "minimum": 0, "maximum": 9_007_199_254_740_991},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9_007_199_254_740_991},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
NOTE = {
    "name": "TaskCreate",
    "description": "Notes a task.",
    "input_schema": {
        "type": "object",
        "properties": {
            "subject": {"type": "string", "maxLength": 9},
            "metadata": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {},
                "maxProperties": 0,
            },
        },
        "required": ["subject", "metadata"],
        "additionalProperties": False,
    },
}
CLAUDE: dict[str, Any] = {
    "model": "agent",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe day is a Monday.\n</system-reminder>\n"},
                {"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Agents that there are: one."},
    ],
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "\nUse the tools.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [READ, NOTE],
    "metadata": {"user_id": '{"device_id":"00","account_uuid":"","session_id":"00"}'},
    "max_tokens": MAX_TOKENS,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
}
CODEX: dict[str, Any] = {
    "model": "agent",
    "stream": True,
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You are an agent."}],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": ASK}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "tty": {"type": "boolean"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "agents_v1",
            "description": "Other agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "close_agent",
                    "description": "Closes an agent.",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {"target": {"type": "string"}}},
                }
            ],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "00",
    "client_metadata": {"session_id": "00", "x-codex-turn-metadata": "{}"},
}


def told_events(stream: str) -> list[dict[str, Any]]:
    """The events of a response, which OpenAI's types have judged."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    check_response_events(events)
    return events


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """A stub that calls a tool once; its context has room for the prompt and not for the output that is allowed."""
    lines = [
        {"when": "x" * 1_000, "answer": "y" * 1_000},
        {"when": LINE, "answer": f"It has {LINE}."},
        {"when": "patch it", "answer": call("apply_patch", input="*** Begin\n")},
        {"when": "close it", "answer": call("agents_v1__close_agent", target="a")},
        {"when": "Runs a command.", "answer": f"I look.\n{call('exec_command', cmd='cat note.txt')}"},
        {"when": "Reads a file.", "answer": f"I look.\n{call('Read', file_path='note.txt')}"},
    ]
    answers: Path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"stub://agent?max_model_len=16000&answers={answers}"
    with living(source, name="agent") as server:
        yield server


def test_claude_code_gets_its_tool_called_and_the_second_prompt_is_cached(agent: Living) -> None:
    first = agent.post("/v1/messages?beta=true", CLAUDE, CLAUDE_HEADERS)
    assert first.status_code == 200, first.text
    message = check_events(events_of(first.content))
    assert message["stop_reason"] == "tool_use"
    [text, use] = message["content"]
    assert (text["text"], use["name"], use["input"]) == ("I look.", "Read", {"file_path": "note.txt"})
    result = {
        "tool_use_id": use["id"],
        "type": "tool_result",
        "content": f"1\t{LINE}\n",
        "cache_control": {"type": "ephemeral"},
    }
    turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    second = agent.post("/v1/messages?beta=true", {**CLAUDE, "messages": CLAUDE["messages"] + turns}, CLAUDE_HEADERS)
    message = check_events(events_of(second.content))
    assert [block["text"] for block in message["content"]] == [f"It has {LINE}."]
    assert message["stop_reason"] == "end_turn"
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]


def test_answer_that_fills_the_context_ends_with_it(agent: Living) -> None:
    body = {"model": "agent", "max_tokens": MAX_TOKENS, "messages": [{"role": "user", "content": "x" * 15_960}]}
    message = agent.post("/v1/messages", body).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    chat = {"model": "agent", "stream": False, "messages": body["messages"], "options": {"num_predict": MAX_TOKENS}}
    answer = agent.post("/api/chat", chat).json()
    assert answer["done_reason"] == "length"
    assert answer["eval_count"] == message["usage"]["output_tokens"]


def test_codex_gets_its_tool_called_and_the_second_prompt_is_cached(agent: Living) -> None:
    first = agent.post("/v1/responses", CODEX)
    assert first.status_code == 200, first.text
    warning = first.headers["x-lockstep-warning"]
    assert "tools[3]: web_search" in warning
    assert "tools[4]: local_shell" in warning
    response = told_events(first.text)[-1]["response"]
    [message, made] = response["output"]
    assert (message["type"], made["type"], made["name"]) == ("message", "function_call", "exec_command")
    assert json.loads(made["arguments"]) == {"cmd": "cat note.txt"}
    output = {
        "type": "function_call_output",
        "id": "fco_1",
        "call_id": made["call_id"],
        "output": f"Process exited with code 0\nOutput:\n{LINE}\n",
    }
    second = agent.post("/v1/responses", {**CODEX, "input": [*CODEX["input"], message, made, output]})
    response = told_events(second.text)[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == f"It has {LINE}."
    usage = response["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] / 2


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ("patch it", {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n"}),
        (
            "close it",
            {
                "type": "function_call",
                "name": "close_agent",
                "namespace": "agents_v1",
                "arguments": '{"target": "a"}',
            },
        ),
    ],
)
def test_calls_of_other_tools_come_as_items_of_their_kind(agent: Living, ask: str, expected: dict[str, Any]) -> None:
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ask}]}
    events = told_events(agent.post("/v1/responses", {**CODEX, "input": [question]}).text)
    [made] = events[-1]["response"]["output"]
    assert {name: made[name] for name in expected} == expected
    assert made.get("status", "completed") == "completed"
    [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == made
    output = {"type": f"{expected['type']}_output", "call_id": made["call_id"], "output": LINE}
    whole = agent.post("/v1/responses", {**CODEX, "stream": False, "input": [question, made, output]})
    assert whole.json()["output"][0]["content"][0]["text"] == f"It has {LINE}."


def test_forced_call_of_an_agents_tool_on_a_real_model(pocket: Living) -> None:
    """`propertyNames` of one tool is not enforced, and the call obeys the rest."""
    forced = {**CLAUDE, "model": "pocket", "max_tokens": 200, "tool_choice": {"type": "tool", "name": "TaskCreate"}}
    answer = pocket.post("/v1/messages", forced, CLAUDE_HEADERS)
    message = check_events(events_of(answer.content))
    [use] = message["content"]
    assert use["name"] == "TaskCreate"
    assert set(use["input"]) == {"subject", "metadata"}
    expected = "tools[1].input_schema: not enforced in calls of TaskCreate: properties.metadata.propertyNames"
    assert expected in answer.headers["x-lockstep-warning"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_forced_call_that_is_cut_has_a_part_of_its_arguments(pocket: Living, path: str) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 200}}, "required": ["text"]}
    user = [{"role": "user", "content": "I was charged twice"}]
    function = {"name": "look", "parameters": schema}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": user,
            "max_tokens": 40,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        },
        "/v1/messages": {
            "messages": user,
            "max_tokens": 40,
            "tools": [{"name": "look", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
        "/v1/responses": {
            "input": user,
            "max_output_tokens": 40,
            "tools": [{"type": "function", **function}],
            "tool_choice": "required",
        },
    }
    answer = pocket.post(path, {"model": "pocket", **bodies[path]}).json()
    match path:
        case "/v1/chat/completions":
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["message"]["content"] is None
            [made] = choice["message"]["tool_calls"]
            assert made["function"]["arguments"].startswith('{"text": "')
        case "/v1/messages":
            [use] = answer["content"]
            assert (answer["stop_reason"], use["type"], set(use["input"])) == ("max_tokens", "tool_use", {"text"})
        case "/v1/responses":
            [item] = answer["output"]
            assert (answer["status"], item["type"], item["status"]) == ("incomplete", "function_call", "incomplete")
