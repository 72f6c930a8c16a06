"""Claude Code: a question that it answers with its own tool, streamed."""

from __future__ import annotations

import sys

from tools.clients.programs.agents import ASK, CONTENT, FILE, NAME, version_of, workplace
from tools.clients.programs.scenarios import check, run

PROGRAM = "claude"
VARIABLES = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": NAME,
    "ANTHROPIC_SMALL_FAST_MODEL": NAME,
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
}


def tool_round_trip(base_url: str, model: str) -> None:
    """The agent requests more tokens than the context has left, runs the called tool, and sends the result; the second
    prompt begins with the first one, which is in the prefix cache."""
    with workplace("Read", {"file_path": f"{{folder}}/{FILE}"}) as place:
        command = [PROGRAM, "-p", ASK, "--output-format", "stream-json", "--verbose"]
        events = place.run(command, {**VARIABLES, "ANTHROPIC_BASE_URL": place.url})
    blocks = [block for event in events if "message" in event for block in event["message"]["content"]]
    check([block["name"] for block in blocks if block["type"] == "tool_use"] == ["Read"], "no call, or another call")
    results = [str(block["content"]) for block in blocks if block["type"] == "tool_result"]
    check(len(results) == 1 and CONTENT in results[0], f"the tool's results are {results}")
    last = events[-1]
    check(last["result"] == f"It has {CONTENT}.", f"the answer is {last['result']!r}")
    usage = last["usage"]
    check(usage["cache_read_input_tokens"] > usage["input_tokens"] / 2, f"tokens from the cache: {usage}")


if __name__ == "__main__":
    scenarios = {"a tool's round trip, streamed, with a prefix-cache hit": tool_round_trip}
    sys.exit(run("claude-code", scenarios, version_of(PROGRAM)))
