"""Real chat templates, which are not in the repository: ``LOCKSTEP_CHAT_TEMPLATES=DIR`` names a folder of them.

The source distribution of llama-cpp-python holds most (`vendor/llama.cpp/models/templates/*.jinja`); the others are in
the models' repositories, to be saved under the names below. A file that the folder does not have is skipped by name.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.stub import stub_tokenizer_parts
from lockstep.server.tools.call_formats import (
    FUNCTION_GEMMA,
    FUNCTOOLS,
    GEMMA4,
    GRANITE3,
    HERMES,
    LFM2,
    LLAMA3_JSON,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    OLMO3,
    PHI4_MINI,
    QWEN3_CODER,
    SMOLLM3_CODE,
    CallFormat,
)
from lockstep.server.tools.tool_use import ToolUse
from tests.server.tools.models import parsed, tool_use_of

FOLDER = os.environ.get("LOCKSTEP_CHAT_TEMPLATES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="LOCKSTEP_CHAT_TEMPLATES names no folder of real chat templates")

FORMATS: dict[str, CallFormat] = {
    "ibm-granite-granite-3.3-2B-Instruct": GRANITE3,
    "ibm-granite-granite-4.0": HERMES,
    "ibm-granite-granite-4.1": HERMES,
    "microsoft-Phi-4-mini-instruct": PHI4_MINI,
    "vllm-tool_chat_template_phi4_mini": FUNCTOOLS,
    "allenai-Olmo-3.1-32B-Instruct": OLMO3,
    "vllm-tool_chat_template_olmo3": OLMO3,
    "HuggingFaceTB-SmolLM3-3B-original": HERMES,
    "HuggingFaceTB-SmolLM3-3B": HERMES,
    "google-functiongemma-litert": FUNCTION_GEMMA,
    "google-gemma-4-31B-it": GEMMA4,
    "LFM2-8B-A1B": LFM2,
    "LFM2.5-8B-A1B": LFM2,
    "LFM2.5-Instruct": LFM2,
    "Qwen3-Coder": QWEN3_CODER,
    "Qwen3.5-4B": QWEN3_CODER,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": QWEN3_CODER,
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA3_JSON,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA3_JSON,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL_LIST,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL_NAMED,
}
OTHER_SHAPES = ("google-functiongemma-litert",)
"""Templates whose callers write functions and arguments as text themselves: only the markup is theirs."""
NO_RESULTS = ("vllm-tool_chat_template_phi4_mini",)
"""Templates that write calls as text of their own, which is not their model's."""
NOW = datetime(2026, 1, 2)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
                "wind": {"type": "boolean", "description": "With wind."},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {"city": "Rome <Lazio>", "days": 2, "wind": True}


def calling(number: int) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
    return {"id": f"call{number:05}", "type": "function", "function": function}


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [calling(0), calling(1)]},
    {"role": "tool", "tool_call_id": "call00000", "content": "It rains."},
    {"role": "tool", "tool_call_id": "call00001", "content": "It snows."},
    {"role": "assistant", "content": "Bad weather."},
    {"role": "user", "content": "Thanks!"},
]


@cache
def real(name: str) -> Tokenizer:
    path = Path(FOLDER or "") / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the folder")
    parts = stub_tokenizer_parts()
    return Tokenizer(TokenizerParts(parts.tokenizer, path.read_text("utf-8"), "<s>", "</s>", parts.end_token_ids))


def prompt(tokenizer: Tokenizer, tool_use: ToolUse, messages: list[dict[str, Any]]) -> str:
    return tokenizer.render_chat(tool_use.messages(messages), template_kwargs=tool_use.template_kwargs, now=NOW)


@pytest.mark.parametrize("name", FORMATS)
def test_a_real_template_shows_its_format_and_the_functions(name: str) -> None:
    tool_use = tool_use_of(real(name), [TOOL], None, True)
    assert tool_use.call_format is FORMATS[name]
    text = prompt(real(name), tool_use, HISTORY[:2])
    assert "get_weather" in text
    assert "How many." in text
    assert "get_weather" not in prompt(real(name), tool_use_of(real(name), (), None, True), HISTORY[:2])


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*OTHER_SHAPES, *NO_RESULTS)])
def test_calls_in_a_real_prompt_are_calls_to_the_parser_and_results_are_there(name: str) -> None:
    tool_use = tool_use_of(real(name), [TOOL], None, True)
    form = tool_use.call_format
    histories = [HISTORY] if form is not LLAMA3_JSON else [[*HISTORY[:2], one_call(0), HISTORY[3], *HISTORY[5:]]]
    for history in histories:
        text = prompt(real(name), tool_use, history)
        past = text[text.rindex("Weather?") :]
        calls = parsed(
            tool_use.parser(lambda: "id"), past[past.index(form.begin) if form.begin in past else past.index("{") :]
        )
        assert [json.loads(call.arguments) for call in calls.calls] == [ARGUMENTS] * len(history[2]["tool_calls"])
        assert "It rains." in text
        assert "Bad weather." in text or form is MISTRAL_LIST


def one_call(number: int) -> dict[str, Any]:
    return {**HISTORY[2], "tool_calls": [calling(number)]}


THOUGHTS: list[dict[str, Any]] = [
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "An earlier thought."},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [calling(0)], "reasoning_content": "A later thought."},
    {"role": "tool", "tool_call_id": "call00000", "content": "It rains."},
]


@pytest.mark.parametrize(("thinks", "is_open"), [(None, True), (True, True), (False, False)])
def test_answers_of_qwen35_begin_inside_their_reasoning_unless_it_is_disabled(
    thinks: bool | None, is_open: bool
) -> None:
    tokenizer = real("Qwen3.5-4B")
    kwargs = {} if thinks is None else {"enable_thinking": thinks}
    reasoning = tokenizer.reasoning_after(tokenizer.encode_chat(THOUGHTS[:1], template_kwargs=kwargs))
    assert reasoning is not None
    assert (reasoning.tags.begin, reasoning.is_open) == ("<think>", is_open)


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "LFM2.5-8B-A1B"])
def test_reasoning_is_shown_within_a_turn_and_dropped_after_it(name: str) -> None:
    tool_use = tool_use_of(real(name), [TOOL], None, True)
    text = prompt(real(name), tool_use, THOUGHTS)
    assert "A later thought." in text
    assert "An earlier thought." not in text
    assert "later" not in prompt(real(name), tool_use, [*THOUGHTS, {"role": "user", "content": "Thanks!"}])


def test_lfm25_keeps_the_thoughts_in_its_last_answer_only() -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>First.</think>Yes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>Second.</think>No."},
        {"role": "user", "content": "Three?"},
    ]
    text = real("LFM2.5-Instruct").render_chat(messages)
    assert "First." not in text
    assert "<think>Second.</think>No." in text
    kept = real("LFM2.5-Instruct").render_chat(messages, template_kwargs={"keep_past_thinking": True})
    assert "First." in kept
    ids = real("LFM2.5-Instruct").encode_chat(messages)
    reasoning = real("LFM2.5-Instruct").reasoning_after(ids)
    assert reasoning is not None
    assert not reasoning.is_open


def test_smollm3_calls_tools_in_python_with_the_python_tools_variable() -> None:
    tokenizer = real("HuggingFaceTB-SmolLM3-3B-original")
    tool_use = tool_use_of(tokenizer, [TOOL], None, True, {"python_tools": True})
    assert tool_use.call_format is SMOLLM3_CODE
    text = prompt(tokenizer, tool_use, HISTORY)
    assert "<code>" in text
    assert "<tool_call>" not in text
    assert 'get_weather(city="Rome <Lazio>", days=2, wind=True)' in text
