"""Codex CLI: a question that it answers with its own tool, streamed."""

from __future__ import annotations

import sys
from typing import Any

from tools.clients.programs.agents import ASK, CONTENT, FILE, NAME, Workplace, version_of, workplace
from tools.clients.programs.scenarios import check, run

PROGRAM = "codex"
KEY = "LOCKSTEP_KEY"


def _events(place: Workplace) -> list[dict[str, Any]]:
    provider = (
        f'{{name="Lockstep", base_url="{place.url}/v1", wire_api="responses", env_key="{KEY}", '
        "request_max_retries=0, stream_max_retries=0}"
    )
    settings = ["-c", "model_provider=lockstep", "-c", f"model_providers.lockstep={provider}"]
    home = place.home / "codex"
    home.mkdir()
    command = [PROGRAM, "exec", "--json", "--skip-git-repo-check", "--model", NAME, *settings, ASK]
    return place.run(command, {KEY: "none", "CODEX_HOME": str(home)})


def tool_round_trip(base_url: str, model: str) -> None:
    """The agent describes tools of several types, runs the called one, and sends the result; the second prompt begins
    with the first one, which is in the prefix cache."""
    with workplace("exec_command", {"cmd": f"cat {FILE}"}) as place:
        events = _events(place)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    outputs = [item["aggregated_output"] for item in items if item["type"] == "command_execution"]
    check(outputs == [f"{CONTENT}\n"], f"the outputs of commands are {outputs}")
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    check(texts[-1:] == [f"It has {CONTENT}."], f"the texts are {texts}")
    usage = events[-1]["usage"]
    check(usage["cached_input_tokens"] > usage["input_tokens"] / 3, f"tokens from the cache: {usage}")


def namespaced_tool(base_url: str, model: str) -> None:
    """A tool of a namespace is called by both names and runs: it rejects an unknown agent."""
    with workplace("multi_agent_v1__close_agent", {"target": CONTENT}) as place:
        events = _events(place)
    texts = [event["item"].get("text") for event in events if event["type"] == "item.completed"]
    check(texts[-1:] == [f"It has {CONTENT}."], f"the texts are {texts}")


if __name__ == "__main__":
    scenarios = {
        "a tool's round trip, streamed, with a prefix-cache hit": tool_round_trip,
        "a call of a tool in a namespace": namespaced_tool,
    }
    sys.exit(run("codex", scenarios, version_of(PROGRAM)))
