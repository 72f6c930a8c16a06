"""The parameter tables of other APIs: what a parameter becomes, what an error calls it, and which have no effect.

An API that does not exist shows what an adapter needs: a table, an encoder and a route.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import APIRouter
from pydantic import Field
from pydantic.fields import FieldInfo
from starlette.requests import Request
from starlette.responses import Response

from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.option_fields import field_docs, option_types
from lockstep.server.adapters import anthropic_body, ollama_body
from lockstep.server.adapters.anthropic_body import MessagesBody
from lockstep.server.adapters.ollama_body import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from lockstep.server.answer import JSON_LINES_TYPE, Framing, encode, json_line
from lockstep.server.answer_response import Answer
from lockstep.server.app import create_app
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat import ChatBody
from lockstep.server.chat_adapter import NoEffect, ParameterTable, To, answer_as_chat, dropped, table_of
from lockstep.server.choices import Choice
from lockstep.server.completions import CompletionBody
from lockstep.server.errors import HttpError
from lockstep.server.fields import Body, unsupported
from lockstep.server.generation import SharedBody
from lockstep.server.responses import translation
from lockstep.server.responses.schema import Reasoning, ResponseBody, TextConfig
from tests.cluster.support import one_model
from tests.server.support import NAME, error_of

BODIES: tuple[type[Body], ...] = (MessagesBody, OllamaChatBody, OllamaGenerateBody, ResponseBody)
PARTS: tuple[type[Body], ...] = (
    anthropic_body.OutputConfig,
    anthropic_body.RequestMetadata,
    anthropic_body.MessagesToolChoice,
    OllamaOptions,
    TextConfig,
    Reasoning,
)
SAMPLING = {"repeat_penalty": "repetition_penalty", "stop_sequences": "stop"}
"""Names of sampling parameters that differ from ours."""


class StyleBody(Body):
    words: Annotated[int | None, Field(ge=1), To("max_tokens", lambda words: 2 * words)] = None
    ignore_eos: bool | None = None


class GreetingBody(SharedBody):
    """The body of an API that does not exist."""

    text: Annotated[str, To("messages", lambda text: [{"role": "user", "content": text}], dropped)]
    style: StyleBody | None = None
    ends: Annotated[list[str] | None, To("stop")] = None
    thinks: Annotated[bool | None, To("chat_template_kwargs.enable_thinking")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    tone: Annotated[str | None, NoEffect("the model has one tone", unless=lambda tone: tone == "plain")] = None
    image: Annotated[None, unsupported("only text is supported")] = None
    echo_of: str | None = None
    """Of this API alone."""


TABLE = table_of(GreetingBody, ChatBody)
router = APIRouter(route_class=LongBodyRoute)


class GreetingEncoder:
    """Encoder of lines of JSON."""

    framing = Framing(JSON_LINES_TYPE, b"{}\n")

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        return json_line({"text": choice.text}) if choice.text else b""

    def end(self, answer: Answer) -> bytes:
        return json_line({"tokens": answer.totals.num_output_tokens})

    def failed(self, error: HttpError) -> bytes:
        return json_line({"error": error.message})

    def whole(self, answer: Answer) -> bytes:
        return encode({"text": answer.choices[0].text, "tokens": answer.totals.num_output_tokens})


@router.post("/greetings")
async def greet(body: GreetingBody, request: Request) -> Response:
    return await answer_as_chat(
        request,
        None,
        lambda: TABLE.request(body),
        TABLE,
        lambda accepted: GreetingEncoder(),
        is_stream=bool(body.stream),
        new_call_id=lambda: "call",
        warnings=TABLE.warnings(body),
    )


async def test_an_adapter_is_a_table_an_encoder_and_a_route() -> None:
    cluster = one_model("stub://alpha", (NAME,))
    await cluster.start()
    app = create_app(cluster)
    app.router.routes.extend(router.routes)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        body = {"text": "hi", "style": {"words": 1}, "tone": "warm"}
        whole = await client.post("/greetings", json=body)
        stream = await client.post("/greetings", json={**body, "stream": True})
        refused = await client.post("/greetings", json={"text": "hi", "ends": [""]})
    await cluster.close()
    assert whole.headers["x-lockstep-warning"].startswith("tone:")
    assert whole.json()["tokens"] == 2
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == whole.json()["text"]
    assert lines[-1] == {"tokens": 2}
    assert (refused.status_code, error_of(refused)["param"]) == (400, "ends[0]")


def test_request_has_the_members_that_the_table_states() -> None:
    body = GreetingBody.model_validate({
        "text": "hi", "style": {"words": 3, "ignore_eos": True}, "ends": ["."], "thinks": False, "temperature": 0.5,
        "chat_template_kwargs": {"date": "today"}, "tone": "warm", "echo_of": "x", "session_id": "s",
    })  # fmt: skip
    assert TABLE.request(body, logprobs=True).model_dump(exclude_unset=True) == {
        "temperature": 0.5,
        "session_id": "s",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "ignore_eos": True,
        "stop": ["."],
        "chat_template_kwargs": {"enable_thinking": False, "date": "today"},
        "logprobs": True,
    }


@pytest.mark.parametrize(
    ("param", "name"),
    [
        ("messages[2].content", "text"),
        ("max_tokens", "style.words"),
        ("ignore_eos", "style.ignore_eos"),
        ("stop[1]", "ends[1]"),
        ("chat_template_kwargs.enable_thinking", "thinks"),
        ("chat_template_kwargs.date", "chat_template_kwargs.date"),
        ("temperature", "temperature"),
        ("tools[0]", "tools[0]"),
        ("stopping", "stopping"),
    ],
)
def test_errors_have_the_name_of_the_table(param: str, name: str) -> None:
    assert TABLE.name(param) == name


def test_value_that_is_invalid_in_a_chat_names_the_parameter_of_the_api() -> None:
    body = GreetingBody(text="hi", ends=[""])
    with pytest.raises(InvalidParameterError, match="ends") as caught:
        TABLE.request(body)
    assert caught.value.param == "ends[0]"


@pytest.mark.parametrize(("tone", "names"), [("warm", ["tone"]), ("plain", []), (None, [])])
def test_parameter_without_effect_has_a_warning_unless_it_requests_what_happens_anyway(
    tone: str | None, names: list[str]
) -> None:
    warnings = TABLE.warnings(GreetingBody(text="hi", tone=tone))
    assert [warning.partition(":")[0] for warning in warnings] == names


@pytest.mark.parametrize(
    ("table", "param", "name"),
    [
        (anthropic_body.TABLE, "stop[2]", "stop_sequences[2]"),
        (anthropic_body.TABLE, "tools[1].function.name", "tools[1].name"),
        (anthropic_body.TABLE, "tools[1].function.parameters.function", "tools[1].input_schema.function"),
        (anthropic_body.TABLE, "response_format.json_schema.schema", "output_config.format.schema"),
        (anthropic_body.TABLE, "reasoning_effort", "output_config.effort"),
        (anthropic_body.TABLE, "chat_template_kwargs.enable_thinking", "thinking"),
        (anthropic_body.TABLE, "user", "metadata.user_id"),
        (anthropic_body.TABLE.with_tools([3, 5]), "tools[1].function", "tools[5]"),
        (ollama_body.CHAT, "max_tokens", "options.num_predict"),
        (ollama_body.CHAT, "repetition_penalty", "options.repeat_penalty"),
        (ollama_body.CHAT, "temperature", "options.temperature"),
        (ollama_body.CHAT, "messages[1].content", "messages[1].content"),
        (ollama_body.CHAT, "tools[1].function.name", "tools[1].function.name"),
        (ollama_body.CHAT, "response_format.json_schema", "format"),
        (ollama_body.CHAT, "reasoning_effort", "think"),
        (ollama_body.GENERATE, "messages[0].content", "prompt"),
        (ollama_body.RAW, "prompt", "prompt"),
        (translation.TABLE, "messages[3]", "input"),
        (translation.TABLE, "max_tokens", "max_output_tokens"),
        (translation.TABLE, "logprobs", "include"),
        (translation.TABLE, "top_logprobs", "top_logprobs"),
        (translation.TABLE, "verbosity", "text.verbosity"),
        (translation.TABLE, "tool_choice.allowed_tools.tools[2].function.name", "tool_choice.tools[2].name"),
    ],
)  # fmt: skip
def test_each_api_has_its_own_names(table: ParameterTable[Any], param: str, name: str) -> None:
    assert table.name(param) == name


def _fields(*bodies: type[Body]) -> Iterator[tuple[str, FieldInfo]]:
    for body in bodies:
        yield from body.model_fields.items()


def test_every_target_is_a_parameter_of_chats_or_completions() -> None:
    """A table leaves out other targets, because a body may become one request or the other."""
    known = {*ChatBody.model_fields, *CompletionBody.model_fields}
    marks = [mark for _, field in _fields(*BODIES, *PARTS) for mark in field.metadata if isinstance(mark, To)]
    assert len(marks) > 20
    assert {mark.target.partition(".")[0] for mark in marks} <= known


def test_sampling_parameter_has_one_range_and_one_text_in_all_apis() -> None:
    texts, types = field_docs(SamplingParams), option_types(SamplingParams)
    found = 0
    for name, field in _fields(*BODIES, OllamaOptions, ChatBody, CompletionBody):
        ours = SAMPLING.get(name, name)
        if ours not in types or ours in ("max_tokens", "logprobs"):
            continue
        assert field.description == texts[ours], name
        bounds = {
            kind: getattr(each, kind) for each in field.metadata for kind in ("ge", "gt", "le") if hasattr(each, kind)
        }
        range_ = types[ours].range
        assert bounds.get("gt" if range_.above_low else "ge") == range_.low, name
        assert range_.high is None or bounds["le"] == range_.high, name
        found += 1
    assert found > 50
