"""Input files of batches for tests, and waiting for the ends of batches."""

from __future__ import annotations

import json
from typing import Any, Final

import openai
from openai.types import Batch

from tests.waiting import until

ENDED = ("completed", "failed", "expired", "cancelled")
CHAT: Final = "/v1/chat/completions"


def line(index: int, *, url: str = CHAT, method: str = "POST", **body: Any) -> dict[str, Any]:
    """One request of a chat whose answer is short, whatever the model draws."""
    messages = [{"role": "user", "content": f"Number {index}, please."}]
    asked = {"model": "pocket", "messages": messages, "max_tokens": 4, "seed": index, **body}
    return {"custom_id": f"request-{index}", "method": method, "url": url, "body": asked}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def uploaded(client: openai.OpenAI, content: bytes) -> str:
    """The id of an uploaded input file."""
    return client.files.create(file=("requests.jsonl", content), purpose="batch").id


def created(client: openai.OpenAI, content: bytes, *, endpoint: Any = CHAT, window: Any = "24h") -> Batch:
    file_id = uploaded(client, content)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """The batch, once it has ended."""
    found = [batch]

    def has_ended() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        return found[0].status in ENDED

    until(has_ended, f"{batch.id} ends")
    return found[0]


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Lines of a file of results; none where there is no file."""
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
