"""The Responses API of a real server, as OpenAI's own client sees it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseInputParam

from lockstep.server.options import ServerOptions
from tests.server.living import living
from tests.server.process import IN_THREAD, ServerProcess, plain_client, serve
from tests.server.responses.shapes import check_events, check_response
from tests.waiting import ENDLESS_MS, HANG_S, Gate

GREEDY: dict[str, Any] = {"model": "pocket", "temperature": 0.0, "max_output_tokens": 24}
HELLO = "I was charged twice"


def frames(url: str, body: Mapping[str, object]) -> list[dict[str, Any]]:
    """The events of a stream, as they went over the wire."""
    with plain_client(url) as client:
        answer = client.post("/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in answer.text.strip().split("\n\n"):
        kind, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def client_of(url: str, api_key: str = "none") -> openai.OpenAI:
    plain = openai.DefaultHttpxClient(verify=False)  # reading certificates takes it longer than all else
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=HANG_S, http_client=plain)


def test_an_answer_is_an_object_that_openai_would_have_sent(served: ServerProcess) -> None:
    with served.client() as client:
        answer = client.post("/v1/responses", json={**GREEDY, "input": HELLO, "metadata": {"a": "b"}}).json()
    response = check_response(answer)
    assert re.fullmatch(r"resp_[0-9a-f]{48}", response.id)
    assert re.fullmatch(r"msg_[0-9a-f]{48}", answer["output"][0]["id"])
    assert (response.status, response.metadata, answer["store"]) == ("incomplete", {"a": "b"}, True)
    assert response.usage is not None
    assert response.usage.output_tokens == 24
    assert response.usage.total_tokens == response.usage.input_tokens + 24
    assert answer["lockstep"]["request_id"]


def test_a_response_has_the_text_of_a_chat_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}],
        model="pocket",
        temperature=0,
        max_tokens=24,
    )
    response = client.responses.create(instructions="Be brief.", input=HELLO, **GREEDY)
    assert response.output_text == chat.choices[0].message.content != ""


def test_a_stream_works_with_openais_client_and_equals_the_whole_response(
    served: ServerProcess, client: openai.OpenAI
) -> None:
    whole = client.responses.create(input=HELLO, **GREEDY)
    final = check_events(frames(served.base_url, {**GREEDY, "input": HELLO}))
    assert check_response(final).output_text == whole.output_text
    assert final["status"] == whole.status == "incomplete"
    with client.responses.stream(input=HELLO, **GREEDY) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def test_a_piece_of_a_stream_is_there_before_the_next_one_is_computed(gate: Gate) -> None:
    """The next step is let through when the piece has come: where pieces were kept together, none would."""
    with living(f"stub://alpha?step_ms={ENDLESS_MS}") as server, client_of(server.url) as client:
        gate.let_one()
        with client.responses.stream(model="m", input=HELLO, max_output_tokens=5) as stream:
            deltas = []
            for event in stream:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                    gate.let_one()
        gate.open()
    assert deltas == list("[stub")


def test_an_answer_that_came_to_its_end_is_completed(served: ServerProcess, client: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 200, "input": HELLO}
    with client.responses.stream(**asked) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.completed_at is not None
    assert check_events(frames(served.base_url, asked))["output"][0]["content"][0]["text"] == final.output_text


async def test_an_asynchronous_program_gets_the_same(served: ServerProcess, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as made:
        response = await made.responses.create(input=HELLO, **GREEDY)
    assert response.output_text == client.responses.create(input=HELLO, **GREEDY).output_text


def test_continuing_by_id_is_sending_the_whole_conversation(client: openai.OpenAI) -> None:
    """The same bytes, three turns long, and as a chat."""
    turns = [HELLO, "What can I do now?", "Thank you. And my login?"]
    said: list[Any] = []
    chat: list[Any] = []
    previous: Response | None = None
    for turn in turns:
        said.append({"role": "user", "content": turn})
        chat.append({"role": "user", "content": turn})
        previous = client.responses.create(
            input=turn, previous_response_id=None if previous is None else previous.id, **GREEDY
        )
        whole = client.responses.create(input=said, store=False, **GREEDY)
        completion = client.chat.completions.create(messages=chat, model="pocket", temperature=0, max_tokens=24)
        assert previous.output_text == whole.output_text == completion.choices[0].message.content
        assert previous.usage is not None
        assert whole.usage is not None
        assert previous.usage.input_tokens == whole.usage.input_tokens
        said += [item.model_dump(exclude_none=True) for item in previous.output]
        chat.append({"role": "assistant", "content": previous.output_text})


def test_instructions_are_not_inherited(client: openai.OpenAI) -> None:
    first = client.responses.create(input=HELLO, instructions="Answer as a pirate, at length.", **GREEDY)
    by_id = client.responses.create(input="And?", previous_response_id=first.id, **GREEDY)
    conversation: ResponseInputParam = [
        {"role": "user", "content": HELLO},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    whole = client.responses.create(input=conversation, **GREEDY)
    assert by_id.usage is not None
    assert whole.usage is not None
    assert (by_id.output_text, by_id.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    assert by_id.instructions is None


def test_a_stored_response_is_found_until_it_is_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input=HELLO, **GREEDY)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for look in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
        lambda: client.responses.cancel(made.id),
        lambda: client.responses.input_items.list(made.id),
        lambda: client.responses.create(input="And?", previous_response_id=made.id, **GREEDY),
    ):
        with pytest.raises(openai.NotFoundError, match=made.id):
            look()


def test_response_with_store_false_is_not_stored(client: openai.OpenAI) -> None:
    made = client.responses.create(input=HELLO, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="And?", previous_response_id=made.id, **GREEDY)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")


def test_a_streamed_response_is_stored_before_its_last_event(served: ServerProcess, client: openai.OpenAI) -> None:
    final = check_events(frames(served.base_url, {**GREEDY, "input": HELLO}))
    assert client.responses.retrieve(final["id"]).to_dict() == final


def test_input_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    first = client.responses.create(input=HELLO, **GREEDY)
    second = client.responses.create(input="And?", previous_response_id=first.id, **GREEDY)
    newest_first = client.responses.input_items.list(second.id)
    assert [item.type for item in newest_first.data] == ["message"] * 3
    oldest_first = client.responses.input_items.list(second.id, order="asc")
    assert oldest_first.data == newest_first.data[::-1]
    assert oldest_first.data[1].to_dict() == first.output[0].to_dict()
    assert list(client.responses.input_items.list(second.id, order="asc", limit=1)) == oldest_first.data
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(second.id, after="msg_0")
    assert caught.value.param == "after"


def test_only_background_responses_can_be_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(input=HELLO, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="Only background responses"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=HELLO, background=True, **GREEDY)
    assert caught.value.param == "background"


SCHEMA = {
    "type": "object",
    "properties": {"team": {"enum": ["billing", "technical"]}, "urgent": {"type": "boolean"}},
    "required": ["team", "urgent"],
    "additionalProperties": False,
}


def test_structured_answers_obey(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": HELLO, "max_output_tokens": 100}
    schema = {"type": "json_schema", "name": "ticket", "schema": SCHEMA, "strict": True}
    made = client.responses.create(text={"format": schema}, **asked)  # type: ignore[call-overload]  # a plain dict
    jsonschema.validate(json.loads(made.output_text), SCHEMA)
    assert made.text.format.to_dict() == schema
    assert made.status == "completed"


def test_logprobs_come_with_the_text(served: ServerProcess, client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    part: Any = whole.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == whole.output_text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    final = check_events(frames(served.base_url, asked))
    assert final["output"][0]["content"] == [part.to_dict()]


def test_the_seed_decides(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": HELLO, "temperature": 1.5}
    texts = [client.responses.create(extra_body={"seed": seed}, **asked).output_text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


TOOL = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
ALLOWED_PLACE = "tool_choice.tools[0].name"
REFUSED: Sequence[tuple[Mapping[str, object], str]] = (
    ({"input": [{"type": "reasoning", "content": []}]}, "input"),
    ({"colour": "red"}, "colour"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": "x" * 20_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"truncation": "middle"}, "truncation"),
    ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "g"}]}}, ALLOWED_PLACE),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "invented"}]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"priority": 1}, "priority"),
)


@pytest.mark.parametrize(("wrong", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_unsupported_parameters_are_rejected_by_name(
    served: ServerProcess, wrong: Mapping[str, object], param: str, is_stream: bool
) -> None:
    with served.client() as client:
        answer = client.post("/v1/responses", json={**GREEDY, "input": HELLO, "stream": is_stream, **wrong})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize("query", ["include=x", "stream=true", "starting_after=1"])
def test_a_query_that_would_be_ignored_is_refused(served: ServerProcess, query: str) -> None:
    with served.client() as client:
        made = client.post("/v1/responses", json={**GREEDY, "input": HELLO}).json()
        answer = client.get(f"/v1/responses/{made['id']}?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])
        assert client.get(f"/v1/responses/{made['id']}?stream=false").json() == made


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
        client.responses.create(input=HELLO, model="other")


def test_a_failure_in_the_middle_ends_the_stream_as_failed() -> None:
    with living("stub://alpha?fail_every=5") as server:
        events = frames(server.url, {"input": "Hi"})
        assert check_events(events)["status"] == "failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert events[-1]["response"]["output"][0]["content"][0]["text"].startswith("[st")
        assert server.get(f"/v1/responses/{events[-1]['response']['id']}").status_code == 404, "it is not stored"


def test_a_shutdown_ends_open_streams_with_an_error() -> None:
    arguments = ("stub://alpha?step_ms=20", "--served-model-name", "alpha", "--shutdown-timeout", "0.2")
    endless = {"max_output_tokens": 4000}
    with serve(*arguments) as server, client_of(server.base_url) as client:
        with client.responses.create(input="Hi", model="alpha", stream=True, extra_body=endless) as stream:
            events = []
            for event in stream:
                events.append(event.to_dict())
                if event.type == "response.content_part.added":
                    server.signal(signal.SIGTERM)
        assert server.wait() == 0
    error = check_events(events)["error"]
    assert "shutting down" in error["message"]


def test_key_cannot_read_responses_of_another_key() -> None:
    with (
        living("stub://alpha", ServerOptions(api_keys=("key-a", "key-b")), name="alpha") as server,
        client_of(server.url, "key-a") as ours,
        client_of(server.url, "key-b") as theirs,
    ):
        made = ours.responses.create(input="Hi", model="alpha")
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.create(input="And?", previous_response_id=made.id, model="alpha")
        with pytest.raises(openai.NotFoundError):
            theirs.responses.delete(made.id)
        assert ours.responses.retrieve(made.id) == made


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Also when the first server was killed, with nothing to clean by hand."""
    stored = ("--responses-db", str(tmp_path / "responses.db"))
    arguments = ("stub://alpha", *IN_THREAD, "--served-model-name", "alpha", *stored)
    with serve(*arguments) as server, client_of(server.base_url) as client:
        first = client.responses.create(input="Hi", model="alpha")
        second = client.responses.create(input="And?", previous_response_id=first.id, model="alpha")
        expected = client.responses.create(input="Go on", previous_response_id=second.id, model="alpha")
        server.signal(signal.SIGKILL)
        server.wait()
    with serve(*arguments) as server, client_of(server.base_url) as client:
        assert client.responses.retrieve(second.id) == second
        again = client.responses.create(input="Go on", previous_response_id=second.id, model="alpha")
        assert again.output_text == expected.output_text
        assert again.usage is not None
        assert expected.usage is not None
        assert again.usage.input_tokens == expected.usage.input_tokens
