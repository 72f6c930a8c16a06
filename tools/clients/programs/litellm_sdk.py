"""LiteLLM, as gateways use it: by the provider `openai`, and by `hosted_vllm`, which sends vLLM's parameters."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

from tools.clients.programs.scenarios import ASK, MAX_TOKENS, PARAMETERS, QUEUES, SEED, TOOL, check, open_ticket, run

QUESTION: dict[str, Any] = {"role": "user", "content": ASK}
PROVIDERS = ("openai", "hosted_vllm")


def _complete(base_url: str, model: str, provider: str, **more: Any) -> Any:
    asked: dict[str, Any] = {"messages": [QUESTION], "max_tokens": MAX_TOKENS, "seed": SEED, **more}
    return litellm.completion(model=f"{provider}/{model}", api_base=base_url, api_key="none", num_retries=0, **asked)


def chat(base_url: str, model: str) -> None:
    for provider in PROVIDERS:
        message = _complete(base_url, model, provider).choices[0].message
        check(message.content, "no text came")
        for dumped in (message, message.model_dump(), message.json()):
            _complete(base_url, model, provider, messages=[QUESTION, dumped, QUESTION], max_tokens=4)


def cached(base_url: str, model: str) -> None:
    marked = [{"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}}]
    for provider in PROVIDERS:
        _complete(base_url, model, provider, messages=[{"role": "user", "content": marked}], max_tokens=4)


def tools(base_url: str, model: str) -> None:
    for provider in PROVIDERS:
        choice = _complete(base_url, model, provider, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        _second_turn(base_url, model, provider, choice.choices[0].message)


def streamed_tools(base_url: str, model: str) -> None:
    for provider in PROVIDERS:
        chunks = list(
            _complete(
                base_url,
                model,
                provider,
                tools=[TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        built = litellm.stream_chunk_builder(chunks, messages=[QUESTION])
        check(built.usage.completion_tokens > 0, "no tokens were counted")
        _second_turn(base_url, model, provider, built.choices[0].message)


def _second_turn(base_url: str, model: str, provider: str, message: Any) -> None:
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": open_ticket(**json.loads(call.function.arguments))}
    for dumped in (message, message.model_dump(), message.json()):
        _complete(base_url, model, provider, messages=[QUESTION, dumped, result], tools=[TOOL], max_tokens=4)


def structured(base_url: str, model: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": PARAMETERS, "strict": True}}
    for provider in PROVIDERS:
        message = _complete(base_url, model, provider, response_format=schema).choices[0].message
        check(json.loads(message.content)["queue"] in QUEUES, "no ticket came")


def responses(base_url: str, model: str) -> None:
    about: dict[str, Any] = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none"}
    first = litellm.responses(input=ASK, max_output_tokens=MAX_TOKENS, **about)
    items = [item.model_dump() for item in first.output]
    litellm.responses(input=[QUESTION, *items, QUESTION], max_output_tokens=4, **about)


def embeddings(base_url: str, model: str) -> None:
    made = litellm.embedding(model=f"openai/{model}", input=[ASK], api_base=base_url, api_key="none")
    check(len(made.data) == 1, "no vector came")


if __name__ == "__main__":
    sys.exit(
        run(
            "litellm",
            {
                "chat, second turn": chat,
                "cache_control": cached,
                "tools, second turn": tools,
                "streamed tools, second turn": streamed_tools,
                "structured output": structured,
                "responses, second turn": responses,
                "embeddings": embeddings,
            },
        )
    )
