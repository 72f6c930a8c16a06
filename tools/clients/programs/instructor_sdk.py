"""Instructor: structured objects in each of its modes for servers with OpenAI's API."""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel

from tools.clients.programs.scenarios import ASK, QUEUES, SEED, check, run

MODES = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "JSON", "JSON_SCHEMA", "RESPONSES_TOOLS")


class Ticket(BaseModel):
    """A ticket."""

    queue: Literal["billing", "technical", "legal"]
    urgent: bool


def _in_mode(mode: str) -> Any:
    def scenario(base_url: str, model: str) -> None:
        client = instructor.from_openai(
            openai.OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=instructor.Mode[mode]
        )
        told = {"messages": [{"role": "user", "content": ASK}], "max_retries": 0}
        more: dict[str, Any] = {} if mode == "RESPONSES_TOOLS" else {"seed": SEED}
        if mode == "JSON":  # the mode requests any JSON; only the prompt describes the object
            more["extra_body"] = {"response_format": None, "guided_json": Ticket.model_json_schema()}
        ticket = client.chat.completions.create(model=model, response_model=Ticket, **told, **more)
        check(ticket.queue in QUEUES, "no ticket came")

    return scenario


def partial(base_url: str, model: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none", max_retries=0))
    parts = client.chat.completions.create_partial(
        model=model, response_model=Ticket, messages=[{"role": "user", "content": ASK}], seed=SEED
    )
    check(list(parts)[-1].queue in QUEUES, "no ticket came")


if __name__ == "__main__":
    sys.exit(run("instructor", {**{f"mode {mode}": _in_mode(mode) for mode in MODES}, "streamed in parts": partial}))
