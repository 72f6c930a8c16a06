"""A model that thinks, behind every API: the same thoughts and the same text, and none where none are wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.adapters.clients import check_events, events_of
from tests.server.living import Living, living
from tools.random_models import write_huggingface

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
"""Opens thoughts itself, which a model of random weights does not close; nor does it end, without a token for that."""
USER: dict[str, Any] = {"role": "user", "content": "Why?"}
TOKENS = 12


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    folder = write_huggingface(tmp_path_factory.mktemp("thinker"), "tiny-llama")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = folder / name
        if path.exists():
            members = json.loads(path.read_text())
            path.write_text(json.dumps({**members, "chat_template": TEMPLATE, "eos_token": None, "eos_token_id": None}))
    with living(str(folder)) as server:
        yield server


def openai_says(server: Living, *, thinks: bool) -> tuple[str, str, int]:
    """Thoughts and content of a chat completion, and how many tokens it thought."""
    body = {"messages": [USER], "max_tokens": TOKENS, "temperature": 0}
    answer = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {"enable_thinking": thinks}}).json()
    message = answer["choices"][0]["message"]
    num_thoughts = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content", ""), message["content"], num_thoughts


@pytest.mark.parametrize("thinks", [True, False])
def test_thoughts_are_the_same_through_every_api(thinker: Living, thinks: bool) -> None:
    thoughts, text, num_thoughts = openai_says(thinker, thinks=thinks)
    assert (bool(thoughts), bool(text)) == (thinks, not thinks)
    kind = {"type": "enabled", "budget_tokens": 1024} if thinks else {"type": "disabled"}
    body = {"messages": [USER], "max_tokens": TOKENS, "temperature": 0, "thinking": kind}
    message = thinker.post("/v1/messages", body).json()
    told = {block["type"]: block[block["type"]] for block in message["content"]}
    assert told == ({"thinking": thoughts} if thinks else {"text": text})
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == num_thoughts
    streamed = check_events(events_of(thinker.post("/v1/messages", {**body, "stream": True}).content))
    assert streamed["content"] == message["content"]
    asked = {"model": "m", "stream": False, "think": thinks, "options": {"num_predict": TOKENS, "temperature": 0}}
    chat = thinker.post("/api/chat", {**asked, "messages": [USER]}).json()["message"]
    assert (chat.get("thinking", ""), chat["content"]) == (thoughts, text)
    generated = thinker.post("/api/generate", {**asked, "prompt": USER["content"]}).json()
    assert (generated.get("thinking", ""), generated["response"]) == (thoughts, text)


def test_a_thinking_model_lists_the_thinking_capability(thinker: Living) -> None:
    assert "thinking" in thinker.post("/api/show", {"model": "m"}).json()["capabilities"]
