"""OpenAI's Agents SDK: a required tool call, its result, and a final object, by both APIs."""

from __future__ import annotations

import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tools.clients.programs.scenarios import ASK, QUEUES, check, open_ticket, run


class Ticket(BaseModel):
    """A ticket."""

    queue: Literal["billing", "technical", "legal"]
    urgent: bool


def _models(base_url: str, model: str) -> list[Any]:
    set_tracing_disabled(True)  # a trace would be sent to another server
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    return [
        OpenAIChatCompletionsModel(model=model, openai_client=client),
        OpenAIResponsesModel(model=model, openai_client=client),
    ]


async def chat(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        agent = Agent(name="helper", instructions="Help.", model=asked)
        first = await Runner.run(agent, ASK)
        await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": ASK}])


async def tools(base_url: str, model: str) -> None:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    for asked in _models(base_url, model):
        agent = Agent(name="helper", model=asked, tools=[function_tool(open_ticket)], model_settings=settings)
        result = await Runner.run(agent, ASK, max_turns=8)
        check(any(item.type == "tool_call_output_item" for item in result.new_items), "no tool was called")
        await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": ASK}], max_turns=8)


async def streamed_tools(base_url: str, model: str) -> None:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    for asked in _models(base_url, model):
        agent = Agent(name="helper", model=asked, tools=[function_tool(open_ticket)], model_settings=settings)
        result = Runner.run_streamed(agent, ASK, max_turns=8)
        async for _ in result.stream_events():
            pass
        check(any(item.type == "tool_call_output_item" for item in result.new_items), "no tool was called")


async def structured(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        result = await Runner.run(Agent(name="helper", model=asked, output_type=Ticket), ASK)
        check(result.final_output.queue in QUEUES, "no ticket came")


async def structured_with_tools(base_url: str, model: str) -> None:
    """The model may call a tool or answer with the object; it must end with the object."""
    for asked in _models(base_url, model):
        agent = Agent(name="helper", model=asked, output_type=Ticket, tools=[function_tool(open_ticket)])
        result = await Runner.run(agent, ASK, max_turns=8)
        check(result.final_output.queue in QUEUES, "no ticket came")


async def settings(base_url: str, model: str) -> None:
    given = ModelSettings(
        store=True,
        truncation="auto",
        verbosity="low",
        parallel_tool_calls=True,
        reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"],
        prompt_cache_retention="24h",
        include_usage=True,
    )
    for asked in _models(base_url, model):
        await Runner.run(Agent(name="helper", model=asked, model_settings=given), ASK)


if __name__ == "__main__":
    sys.exit(
        run(
            "openai-agents",
            {
                "chat, second turn": chat,
                "tools, second turn": tools,
                "streamed tools": streamed_tools,
                "structured output": structured,
                "structured output or tools": structured_with_tools,
                "all settings": settings,
            },
        )
    )
