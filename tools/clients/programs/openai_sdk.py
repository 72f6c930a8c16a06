"""The official client: everything that it gets is sent back as its own dump."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tools.clients.programs.scenarios import ASK, MAX_TOKENS, PARAMETERS, QUEUES, SEED, TOOL, check, open_ticket, run

DUMPS: tuple[Callable[[Any], Any], ...] = (
    lambda made: made.model_dump(),
    lambda made: made.model_dump(exclude_none=True),
    lambda made: made.to_dict(),
)
QUESTION: dict[str, Any] = {"role": "user", "content": ASK}
ITEM_TOOL: dict[str, Any] = {"type": "function", "name": "open_ticket", "parameters": PARAMETERS, "strict": True}


class Ticket(BaseModel):
    queue: Literal["billing", "technical", "legal"]
    urgent: bool


def client_of(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def models(base_url: str, model: str) -> None:
    client = client_of(base_url)
    check(model in [served.id for served in client.models.list()], "the model is not in the list")
    check(client.models.retrieve(model).id == model, "another model was retrieved")


def chat(base_url: str, model: str) -> None:
    answer = client_of(base_url).chat.completions.create(
        model=model, messages=[QUESTION], max_completion_tokens=MAX_TOKENS, seed=SEED
    )
    check(answer.usage.completion_tokens > 0, "no tokens were counted")
    for dumped in _dumps(answer.choices[0].message):
        client_of(base_url).chat.completions.create(
            model=model, messages=[QUESTION, dumped, QUESTION], max_completion_tokens=4
        )


def stream(base_url: str, model: str) -> None:
    chunks = list(
        client_of(base_url).chat.completions.create(
            model=model,
            messages=[QUESTION],
            max_completion_tokens=MAX_TOKENS,
            seed=SEED,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    check(counts == sorted(counts), f"the counts fall: {counts}")
    check(not chunks[-1].choices, "the last chunk has choices")


def tools(base_url: str, model: str) -> None:
    client = client_of(base_url)
    message = (
        client.chat.completions.create(
            model=model, messages=[QUESTION], tools=[TOOL], tool_choice="required", parallel_tool_calls=False, seed=SEED
        )
        .choices[0]
        .message
    )
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": open_ticket(**json.loads(call.function.arguments))}
    for dumped in _dumps(message):
        client.chat.completions.create(
            model=model, messages=[QUESTION, dumped, result], tools=[TOOL], tool_choice="none", max_completion_tokens=4
        )


def streamed_tools(base_url: str, model: str) -> None:
    client = client_of(base_url)
    with client.chat.completions.stream(
        model=model, messages=[QUESTION], tools=[TOOL], tool_choice="required", seed=SEED
    ) as events:
        message = events.get_final_completion().choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    for dumped in _dumps(message):
        client.chat.completions.create(
            model=model, messages=[QUESTION, dumped, *results], tools=[TOOL], max_completion_tokens=4
        )


def structured(base_url: str, model: str) -> None:
    answer = client_of(base_url).chat.completions.parse(
        model=model, messages=[QUESTION], response_format=Ticket, seed=SEED
    )
    check(answer.choices[0].message.parsed.queue in QUEUES, "no ticket came")
    for dumped in _dumps(answer.choices[0].message):
        client_of(base_url).chat.completions.create(
            model=model, messages=[QUESTION, dumped, QUESTION], max_completion_tokens=4
        )


def functions(base_url: str, model: str) -> None:
    client = client_of(base_url)
    choice = client.chat.completions.create(
        model=model,
        messages=[QUESTION],
        functions=[TOOL["function"]],
        function_call={"name": "open_ticket"},
        seed=SEED,
    ).choices[0]
    called = choice.message.function_call
    result = {"role": "function", "name": called.name, "content": open_ticket(**json.loads(called.arguments))}
    for dumped in _dumps(choice.message):
        client.chat.completions.create(
            model=model,
            messages=[QUESTION, dumped, result],
            functions=[TOOL["function"]],
            function_call="none",
            max_completion_tokens=4,
        )


def responses(base_url: str, model: str) -> None:
    client = client_of(base_url)
    first = client.responses.create(model=model, input=ASK, max_output_tokens=MAX_TOKENS)
    client.responses.create(model=model, input=ASK, previous_response_id=first.id, max_output_tokens=4)
    for items in _item_dumps(first.output):
        client.responses.create(model=model, input=[QUESTION, *items, QUESTION], max_output_tokens=4)


def response_tools(base_url: str, model: str) -> None:
    client = client_of(base_url)
    first = client.responses.create(
        model=model,
        input=[QUESTION],
        tools=[ITEM_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        truncation="auto",
    )
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": open_ticket(**json.loads(call.arguments)),
    }
    for items in _item_dumps(first.output):
        client.responses.create(
            model=model, input=[QUESTION, *items, result], tools=[ITEM_TOOL], tool_choice="none", max_output_tokens=4
        )


def response_stream(base_url: str, model: str) -> None:
    client = client_of(base_url)
    with client.responses.stream(model=model, input=ASK, text_format=Ticket) as events:
        final = events.get_final_response()
    check(final.output_parsed.queue in QUEUES, "no ticket came")


def completions(base_url: str, model: str) -> None:
    answer = client_of(base_url).completions.create(model=model, prompt=ASK, max_tokens=8, best_of=1, echo=True)
    check(answer.choices[0].text.startswith(ASK), "the prompt is not echoed")


def embeddings(base_url: str, model: str) -> None:
    made = client_of(base_url).embeddings.create(model=model, input=[ASK, "another"])
    check(len(made.data) == 2, "not two vectors")


def _dumps(made: Any) -> Iterator[dict[str, Any]]:
    return (dump(made) for dump in DUMPS)


def _item_dumps(items: Any) -> Iterator[list[dict[str, Any]]]:
    return ([dump(item) for item in items] for dump in DUMPS)


if __name__ == "__main__":
    sys.exit(
        run(
            "openai",
            {
                "models": models,
                "chat, second turn": chat,
                "stream with usage": stream,
                "tools, second turn": tools,
                "streamed tools, second turn": streamed_tools,
                "structured output": structured,
                "deprecated functions": functions,
                "responses, second turn": responses,
                "responses with tools": response_tools,
                "responses streamed, structured": response_stream,
                "completions": completions,
                "embeddings": embeddings,
            },
        )
    )
