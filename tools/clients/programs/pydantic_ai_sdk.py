"""Pydantic AI: agents by chat completions and by responses, whose runs send back all that was answered."""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel, OpenAIResponsesModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from tools.clients.programs.scenarios import ASK, QUEUES, check, run


class Ticket(BaseModel):
    """A ticket."""

    queue: Literal["billing", "technical", "legal"]
    urgent: bool


def _models(base_url: str, model: str) -> list[Any]:
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    return [OpenAIChatModel(model, provider=provider), OpenAIResponsesModel(model, provider=provider)]


def text(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        agent = Agent(asked, model_settings={"max_tokens": 32})
        first = agent.run_sync(ASK)
        agent.run_sync(ASK, message_history=first.all_messages())


async def stream(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        async with Agent(asked, model_settings={"max_tokens": 32}).run_stream(ASK) as result:
            pieces = [piece async for piece in result.stream_text(delta=True)]
        check(pieces, "no text came")


def tools(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        agent = Agent(asked, output_type=ToolOutput(Ticket, strict=True))
        result = agent.run_sync(ASK)
        check(result.output.queue in QUEUES, "no ticket came")
        agent.run_sync(ASK, message_history=result.all_messages())


def structured(base_url: str, model: str) -> None:
    for asked in _models(base_url, model):
        result = Agent(asked, output_type=NativeOutput(Ticket)).run_sync(ASK)
        check(result.output.queue in QUEUES, "no ticket came")


def settings(base_url: str, model: str) -> None:
    asked = _models(base_url, model)[1]
    agent = Agent(
        asked,
        model_settings=OpenAIResponsesModelSettings(
            max_tokens=32,
            openai_reasoning_effort="low",
            openai_reasoning_summary="auto",
            openai_truncation="auto",
            openai_text_verbosity="low",
            openai_service_tier="priority",
        ),
    )
    first = agent.run_sync(ASK)
    agent.run_sync(ASK, message_history=first.all_messages())


if __name__ == "__main__":
    sys.exit(
        run(
            "pydantic-ai-slim",
            {
                "chat, second turn": text,
                "stream": stream,
                "tools, second turn": tools,
                "structured output": structured,
                "responses with settings": settings,
            },
        )
    )
