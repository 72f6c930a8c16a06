"""Tokenizers of families that call functions: small vocabularies with their markers, templates with their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.stub import stub_tokenizer_parts
from lockstep.server.chat import ChatBody
from lockstep.server.errors import validation_http_error
from lockstep.server.tools.definitions import Function
from lockstep.server.tools.parser import ContentDelta, ToolCall, ToolParser
from lockstep.server.tools.tool_use import ToolUse, resolve_tools
from tests.engine import chat_templates, text_models
from tests.server.tools import templates

LLAMA3 = (
    "{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument names to values}.\\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{{- '<|eot_id|>' }}{% endif %}"
    + chat_templates.LLAMA3
)

MISTRAL_LIST = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- call.function | tojson }}{{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL_NAMED = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}{{- eos_token }}
    {%- else %}{{- message.content + eos_token }}{% endif %}
{%- endfor %}"""

R1 = chat_templates.QWEN3 + "{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
"""A template that opens thoughts itself."""

QWEN35 = (
    templates.QWEN3_CODER
    + """\
{%- if add_generation_prompt %}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}"""
)
"""A template that opens thoughts itself, and shows calls in tags."""

TEMPLATES = {
    "qwen3": chat_templates.QWEN3,
    "thoughts opened": R1,
    "qwen3.5": QWEN35,
    "chatml": chat_templates.CHATML,
    "llama3": LLAMA3,
    "mistral list": MISTRAL_LIST,
    "mistral named": MISTRAL_NAMED,
    "gemma": chat_templates.GEMMA,
    **templates.TEMPLATES,
    "smollm3 code": templates.SMOLLM3,
}
"""By family; `chatml` and `gemma` know no tools."""
KWARGS: Mapping[str, Mapping[str, Any]] = {"smollm3 code": {"python_tools": True}}
"""Variables of requests to a family's template."""

MARKERS = (
    "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|python_tag|>", "<|eom_id|>",
    *templates.MARKERS,
)  # fmt: skip


@cache
def library() -> Library:
    copy = Library.from_str(text_models.byte_level().to_str())
    copy.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    return copy


@cache
def tokenizer_of(family: str, has_markers: bool = True) -> Tokenizer:
    """A family's tokenizer; without markers the calls are spelled letter by letter."""
    if family == "stub":
        return Tokenizer(stub_tokenizer_parts())
    if has_markers:
        return Tokenizer(text_models.parts(library(), TEMPLATES[family]))
    parts = stub_tokenizer_parts()
    return Tokenizer(TokenizerParts(parts.tokenizer, TEMPLATES[family], None, None, parts.end_token_ids))


def function(name: str, parameters: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """One entry of ``tools``."""
    about = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **about, **fields}}


WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["city", "unit"],
}
WEATHER = function("get_weather", WEATHER_SCHEMA, description="The weather of a city.")
TIME = function("get_weather_time", {"properties": {"zone": {"const": "UTC"}}, "required": ["zone"]})
PING = function("ping")
TOOLS: Sequence[Mapping[str, Any]] = (WEATHER, TIME, PING)
STRICT_TOOLS = (
    function("get_weather", {**WEATHER_SCHEMA, "additionalProperties": False}, strict=True),
    function("ping", strict=True),
)


def chat_body(tools: object, choice: object = None) -> ChatBody:
    """A request with these functions, as it comes from a client; errors are what the client is told."""
    try:
        return ChatBody.model_validate(
            {
                "messages": [{"role": "user", "content": "Hello"}],
                "tools": list(tools) if isinstance(tools, tuple) else tools,
                "tool_choice": choice,
            }
        )
    except ValidationError as error:
        refusal = validation_http_error(error.errors())
        raise InvalidParameterError(refusal.message, param=refusal.param) from None


def functions_of(tools: object) -> list[Function]:
    return [tool.function for tool in chat_body(tools).tools or ()]


def tool_use_of(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    choice: object,
    parallel: bool,
    template_kwargs: Mapping[str, Any] | None = None,
    json_constraint: Constraint | None = None,
) -> ToolUse:
    """What such a request means for its model."""
    body = chat_body(list(tools), choice)
    return resolve_tools(
        tokenizer, functions_of(list(tools)), body.tool_choice, parallel, template_kwargs, json_constraint
    )


@dataclass(frozen=True)
class Parsed:
    """A whole answer as its parser reads it."""

    content: str
    calls: Sequence[ToolCall]


def parsed(parser: ToolParser, text: str) -> Parsed:
    deltas = [*parser.append(text), *parser.flush()]
    return Parsed("".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)), parser.calls)
