"""LangChain's `ChatOpenAI`, by chat completions and by responses, with tools and an agent."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from tools.clients.programs.scenarios import ASK, MAX_TOKENS, QUEUES, SEED, check, open_ticket, run


class Ticket(BaseModel):
    """A ticket."""

    queue: Literal["billing", "technical", "legal"]
    urgent: bool


def _tool() -> Any:
    return StructuredTool.from_function(open_ticket, args_schema=Ticket)


def _model(base_url: str, model: str, **more: Any) -> Any:
    return ChatOpenAI(base_url=base_url, model=model, api_key="none", max_retries=0, max_tokens=MAX_TOKENS, **more)


def chat(base_url: str, model: str) -> None:
    asked = _model(base_url, model, seed=SEED)
    answer = asked.invoke(ASK)
    check(answer.content, "no text came")
    asked.invoke([HumanMessage(ASK), answer, HumanMessage(ASK)])


def stream(base_url: str, model: str) -> None:
    whole = None
    for chunk in _model(base_url, model, seed=SEED, stream_usage=True).stream(ASK):
        whole = chunk if whole is None else whole + chunk
    check(whole is not None and whole.usage_metadata["output_tokens"] > 0, "no tokens were counted")


def tools(base_url: str, model: str) -> None:
    for more in ({}, {"use_responses_api": True}):
        asked = _model(base_url, model, **more)
        bound = asked.bind_tools([_tool()], tool_choice="required", parallel_tool_calls=False)
        answer = bound.invoke(ASK)
        [call] = answer.tool_calls
        result = ToolMessage(open_ticket(**call["args"]), tool_call_id=call["id"])
        asked.bind_tools([_tool()]).invoke([HumanMessage(ASK), answer, result])


def streamed_tools(base_url: str, model: str) -> None:
    for more in ({}, {"use_responses_api": True}):
        asked = _model(base_url, model, **more)
        whole: Any = None
        for chunk in asked.bind_tools([_tool()], tool_choice="required", parallel_tool_calls=False).stream(ASK):
            whole = chunk if whole is None else whole + chunk
        [call] = whole.tool_calls
        asked.bind_tools([_tool()]).invoke([HumanMessage(ASK), whole, ToolMessage("done", tool_call_id=call["id"])])


def structured(base_url: str, model: str) -> None:
    for method in ("json_schema", "function_calling"):
        ticket = _model(base_url, model).with_structured_output(Ticket, method=method, strict=True).invoke(ASK)
        check(ticket.queue in QUEUES, f"no ticket came by {method}")


def responses(base_url: str, model: str) -> None:
    asked = _model(
        base_url, model, use_responses_api=True, reasoning={"effort": "low", "summary": "auto"}, truncation="auto"
    )
    answer = asked.invoke(ASK)
    asked.invoke([HumanMessage(ASK), answer, HumanMessage(ASK)])
    kept = _model(base_url, model, use_responses_api=True, use_previous_response_id=True)
    kept.invoke([HumanMessage(ASK), kept.invoke(ASK), HumanMessage(ASK)])


def agent(base_url: str, model: str) -> None:
    played = create_agent(_model(base_url, model), response_format=Ticket)
    state = played.invoke({"messages": [HumanMessage(ASK)]})
    check(state["structured_response"].queue in QUEUES, "no ticket came")


def completions(base_url: str, model: str) -> None:
    OpenAI(base_url=base_url, model=model, api_key="none", max_retries=0, max_tokens=8).invoke(ASK)


def embeddings(base_url: str, model: str) -> None:
    made = OpenAIEmbeddings(base_url=base_url, model=model, api_key="none", check_embedding_ctx_length=False)
    check(len(made.embed_documents([ASK, "another"])) == 2, "not two vectors")


if __name__ == "__main__":
    sys.exit(
        run(
            "langchain-openai",
            {
                "chat, second turn": chat,
                "stream with usage": stream,
                "tools, second turn": tools,
                "streamed tools, second turn": streamed_tools,
                "structured output": structured,
                "responses, second turn": responses,
                "agent": agent,
                "completions": completions,
                "embeddings": embeddings,
            },
        )
    )
