"""Ollama's API of a real server, as its own client sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import ollama
import openai
import pytest

from lockstep.cluster.base import Accepted
from lockstep.server.adapters.ollama import OllamaEncoder
from lockstep.server.answer_response import Answer
from lockstep.server.choices import Choice
from lockstep.server.options import ServerOptions
from tests.server.adapters.clients import ollama_client
from tests.server.living import living
from tests.server.making import TOKENIZER, context, outputs_of
from tests.server.process import ServerProcess, serve
from tests.server.support import NAME, client_of
from tests.server.tools.models import tool_use_of
from tests.waiting import ENDLESS_MS, Gate, until

HELLO = "I was charged twice"
USER: dict[str, Any] = {"role": "user", "content": HELLO}
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 24}
NUMBERS = (
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
)
TWO = """\
cluster: two
models:
  specialists:
    - {id: a, source: "stub://a"}
    - {id: b, source: "stub://b", tier: standby}
"""
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up an invoice.",
        "parameters": {"type": "object", "required": ["number"], "properties": {"number": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def asked(served: ServerProcess) -> Iterator[ollama.Client]:
    """The official client of `served`."""
    with ollama_client(served.base_url) as made:
        yield made


def lines_of(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream, as they went over the wire."""
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    lines = [json.loads(line) for line in answer.text[:-1].split("\n")]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        assert line["model"] == "pocket"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", line["created_at"])
    return lines


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"temperature": 0.9, "seed": 7}])
def test_chat_and_generate_give_the_text_and_usage_of_a_chat_completion(
    asked: ollama.Client, client: openai.OpenAI, drawn: dict[str, Any]
) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    chat = client.chat.completions.create(model="pocket", messages=messages, max_tokens=24, **drawn)
    said = chat.choices[0].message.content
    answer = asked.chat("pocket", messages, options={**drawn, "num_predict": 24})
    assert answer.message.content == said != ""
    generated = asked.generate("pocket:latest", HELLO, system="Be brief.", options={**drawn, "num_predict": 24})
    assert generated.response == said
    assert chat.usage is not None
    assert (answer.prompt_eval_count, answer.eval_count) == (chat.usage.prompt_tokens, 24)
    assert answer.done_reason == chat.choices[0].finish_reason == "length"


def test_a_raw_prompt_is_gone_on_with_as_completions_do(asked: ollama.Client, client: openai.OpenAI) -> None:
    text = client.completions.create(model="pocket", prompt="Once", max_tokens=12, temperature=0).choices[0].text
    assert asked.generate("pocket", "Once", raw=True, options={**OPTIONS, "num_predict": 12}).response == text


def test_a_streamed_answer_equals_the_whole_one(served: ServerProcess, asked: ollama.Client) -> None:
    whole = asked.chat("pocket", [USER], options=OPTIONS)
    pieces = list(asked.chat("pocket", [USER], options=OPTIONS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    lines = lines_of(served, "/api/chat", {"model": "pocket", "messages": [USER], "options": OPTIONS})
    assert "".join(line["message"]["content"] for line in lines) == whole.message.content
    assert all(isinstance(lines[-1][name], int) and lines[-1][name] >= 0 for name in NUMBERS)
    assert not any(name in lines[0] for name in NUMBERS)
    lines = lines_of(served, "/api/generate", {"model": "pocket", "prompt": HELLO, "options": OPTIONS})
    assert "".join(line["response"] for line in lines) == whole.message.content


def test_a_stop_string_ends_an_answer_and_is_left_out(asked: ollama.Client) -> None:
    whole = asked.chat("pocket", [USER], options=OPTIONS).message.content
    assert whole
    answer = asked.chat("pocket", [USER], options={**OPTIONS, "stop": [whole[4:7]]})
    assert (answer.message.content, answer.done_reason) == (whole[: whole.index(whole[4:7])], "stop")


def test_a_format_is_obeyed(asked: ollama.Client) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}
    schema["additionalProperties"] = False
    options = {**OPTIONS, "num_predict": 64}
    answer = asked.chat("pocket", [USER], format=schema, options=options)
    jsonschema.validate(json.loads(answer.message.content or ""), schema)
    answer = asked.chat("pocket", [USER], format=schema, options=options, stream=False, think=False)
    jsonschema.validate(json.loads(answer.message.content or ""), schema)


def called(thoughts: str = "") -> tuple[list[ollama.ChatResponse], ollama.ChatResponse]:
    """A stream and a whole answer of a model that calls a function, as the official client reads them."""
    text = 'So. <tool_call>\n{"name": "look", "arguments": {"number": 7}}\n</tool_call>'
    use = tool_use_of(TOKENIZER, [LOOK], "auto", True)
    answers = []
    for _ in range(2):
        choice = Choice(0, parser=use.parser(lambda: "call_1"))
        encoder = OllamaEncoder("m", context(), is_chat=True)
        answer = Answer([Accepted("m", (1, 2, 3))], [choice], encoder, context())
        answer.feed(0, outputs_of([[text]], thoughts))
        answers.append(answer)
    lines = (answers[0].take() + answers[0].end()).decode().splitlines()
    return [ollama.ChatResponse(**json.loads(line)) for line in lines], ollama.ChatResponse(
        **json.loads(answers[1].whole())
    )


def test_tool_calls_and_results_round_trip(asked: ollama.Client, client: openai.OpenAI) -> None:
    """Arguments are an object, a call is told whole, and its result finds it without an id."""
    pieces, whole = called("hm")
    [call] = whole.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("look", {"number": 7})
    assert [piece.message.tool_calls for piece in pieces if piece.message.tool_calls] == [[call]]
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content == "So."
    assert "".join(piece.message.thinking or "" for piece in pieces) == whole.message.thinking == "hm"
    assert whole.done_reason == pieces[-1].done_reason == "stop"
    history: list[Any] = [USER, whole.message, {"role": "tool", "tool_name": "look", "content": "Paid."}]
    ours = asked.chat("pocket", history, tools=[LOOK], options=OPTIONS)
    named: Any = {"type": "function", "function": {"name": "look", "arguments": '{"number": 7}'}}
    theirs: list[Any] = [
        USER,
        {"role": "assistant", "content": "So.", "tool_calls": [{"id": "c", **named}], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "Paid."},
    ]
    tools: list[Any] = [LOOK]
    chat = client.chat.completions.create(model="pocket", messages=theirs, tools=tools, temperature=0, max_tokens=24)
    assert ours.message.content == chat.choices[0].message.content


def test_models_are_listed_and_shown(asked: ollama.Client) -> None:
    [model] = asked.list().models
    assert model.model == "pocket:latest"
    assert model.size
    [running] = asked.ps().models
    assert (running.model, running.context_length) == ("pocket:latest", 2_048)
    shown = asked.show("pocket:latest")
    assert shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo["lockstep.context_length"] == 2_048
    assert shown.capabilities == ["completion", "tools"]
    assert asked.pull("pocket").status == "success", "as clients do that make sure of a model"


def test_embeddings_equal_those_of_the_openai_api(asked: ollama.Client, client: openai.OpenAI) -> None:
    embedded = asked.embed("pocket", ["a cat", "a dog"])
    theirs = client.embeddings.create(model="pocket", input=["a cat", "a dog"], encoding_format="float")
    assert np.allclose(embedded.embeddings, [each.embedding for each in theirs.data], atol=1e-7)
    assert embedded.prompt_eval_count == theirs.usage.prompt_tokens
    [one] = asked.embed("pocket", "a cat").embeddings
    old = np.array(asked.embeddings("pocket", "a cat").embedding)
    assert np.allclose(old / np.linalg.norm(old), one, atol=1e-6)


def test_an_empty_prompt_loads_the_model_and_no_time_to_keep_it_unloads_it(tmp_path: Any) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO)
    with serve("--manifest", str(path)) as server, ollama_client(server.base_url) as client:
        assert "b:latest" not in [model.model for model in client.ps().models]
        assert client.generate("b").done_reason == "load"
        assert "b:latest" in [model.model for model in client.ps().models]
        with server.client() as page:
            body, origin = {"model": "b", "keep_alive": 0}, {"Origin": "http://localhost:3000"}
            assert page.post("/api/generate", json=body, headers=origin).status_code == 403, "a page ends nothing"
        assert client.chat("b", keep_alive=0).done_reason == "unload"
        assert "b:latest" not in [model.model for model in client.ps().models]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", {"model": "nobody", "messages": [USER]}, 404, "`nobody` does not exist"),
        ("chat", {"model": "pocket", "messages": [{**USER, "images": ["aGk="]}]}, 400, "only text"),
        ("chat", {"model": "pocket", "messages": [USER], "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("chat", {"model": "pocket", "messages": [USER], "temperatur": 1}, 400, "temperatur"),
        ("chat", {"model": "pocket", "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0]"),
        ("chat", {"model": "pocket", "messages": [USER], "format": {"type": 5}}, 400, "type must be"),
        ("generate", {"model": "pocket", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"model": "pocket", "prompt": "x", "template": "y"}, 400, "template"),
        ("generate", {"model": "pocket", "prompt": "x", "context": [-1]}, 400, "context[0]"),
        ("generate", {"model": "pocket", "keep_alive": 0}, 400, "stop the server"),
        ("generate", {"prompt": "x"}, 400, "model is missing"),
        ("embed", {"model": "pocket", "input": "x", "dimensions": 3_000}, 400, "dimensions"),
        ("pull", {"model": "llama3"}, 400, "lockstep pull"),
        ("push", {"model": "llama3"}, 400, "cannot be uploaded"),
        ("create", {"model": "mario", "from": "llama3"}, 400, "lockstep serve"),
        ("copy", {"source": "a", "destination": "b"}, 400, "--served-model-name"),
        ("nothing", {}, 404, "/api/nothing"),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(
    served: ServerProcess, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    with served.client() as client:
        answer = client.post(f"/api/{path}", json=body)
    assert set(answer.json()) == {"error"}
    assert says in answer.json()["error"]
    assert answer.status_code == status


def test_errors_reach_the_official_client(asked: ollama.Client) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="`nobody` does not exist") as refused:
            list(asked.chat("nobody", [USER], stream=stream))
        assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="lockstep rm"):
        asked.delete("pocket")
    with living("stub://alpha", ServerOptions(api_keys=("key",))) as server:
        with ollama_client(server.url, "wrong") as client, pytest.raises(ollama.ResponseError) as denied:
            client.list()
        assert denied.value.status_code == 401
        with ollama_client(server.url, "key") as client:
            assert client.list().models
            assert server.get("/api/version").json()["version"], "which clients probe without a key"


def test_a_failure_in_a_stream_is_its_last_line() -> None:
    with (
        living("stub://alpha?fail_every=20") as server,
        ollama_client(server.url) as client,
        pytest.raises(ollama.ResponseError),
    ):
        list(client.chat("m", [USER], stream=True))


def test_leaving_a_stream_aborts_its_request_within_a_step(gate: Gate) -> None:
    with living(f"stub://alpha?step_ms={ENDLESS_MS}") as server, ollama_client(server.url) as client:
        gate.let_one()
        stream = client.chat("m", [USER], options={"num_predict": 500}, stream=True)
        next(iter(stream))
        stream.close()
        held = gate.num_held
        until(lambda: server.cluster.num_open == 0, "its call is closed while a step is held")
        assert gate.num_held <= held + 1
        gate.open()
        until(lambda: bool(server.records), "it is recorded")
        assert server.records[0].status == 499


def test_a_silent_stream_sends_lines_with_empty_content(gate: Gate) -> None:
    """An empty line would break Ollama's own client."""
    options = ServerOptions(ping_interval_s=0.05)
    with living(f"stub://alpha?step_ms={ENDLESS_MS}", options) as server, ollama_client(server.url) as client:
        gate.let_one()
        stream = iter(client.chat("m", [USER], options={"num_predict": 9}, stream=True))
        assert next(stream).message.content, "what the first step said"
        assert next(stream).message.content == "", "and nothing while the second one lasts"
        gate.open()
        assert list(stream)[-1].done


def test_parameters_without_effect_give_a_warning(served: ServerProcess) -> None:
    body = {"model": "pocket", "messages": [USER], "stream": False, "keep_alive": "5m", "think": True}
    with served.client() as client:
        options = {"num_predict": 1, "num_ctx": 8_192, "num_gpu": 99, "repeat_last_n": 64}
        answer = client.post("/api/chat", json={**body, "options": options})
    told = answer.headers["x-lockstep-warning"]
    assert [each.partition(":")[0] for each in told.split("; ")] == [
        "keep_alive", "options.num_ctx", "options.repeat_last_n", "think",
    ]  # fmt: skip


async def test_form_content_type_is_accepted_from_curl_but_not_from_a_page() -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": NAME, "messages": [USER], "stream": False})
    async with client_of() as client:
        assert (await client.post("/api/chat", content=body, headers=form)).status_code == 200
        assert (await client.post("/api/chat", content=body)).status_code == 200
        for origin, status in (("http://localhost:3000", 415), ("http://elsewhere.example", 403)):
            page = {**form, "Origin": origin}
            assert (await client.post("/api/chat", content=body, headers=page)).status_code == status
        assert (await client.post("/v1/chat/completions", content=body, headers=form)).status_code == 415
        for path in ("/", "/api/tags", "/api/version"):
            assert (await client.head(path)).status_code == 200
