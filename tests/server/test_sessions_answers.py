"""A conversation over HTTP on a model whose answers are found again: cached tokens, sessions, a restart."""

from __future__ import annotations

from pathlib import Path

import httpx2

from lockstep.replay.trace import open_trace
from lockstep.replay.verify import verify
from tests.server.process import serve
from tests.waiting import until

BLOCK = 16
MANIFEST = """\
cluster: talking
models:
  router: {source: 'stub://talker', max_active_sessions: 4}
"""
Messages = list[dict[str, str]]


def say(client: httpx2.Client, messages: Messages, text: str) -> tuple[int, int]:
    """Ask, and take the answer over; cached tokens of the prompt, and tokens of prompt and answer that have KV."""
    messages.append({"role": "user", "content": text})
    body = {"model": "router", "messages": messages, "max_tokens": 100, "session_id": "s"}
    told = client.post("/v1/chat/completions", json=body).json()
    [choice] = told["choices"]
    assert choice["finish_reason"] == "stop"
    messages.append(choice["message"] | {"role": "assistant"})
    usage = told["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["total_tokens"] - 1


def test_each_turn_finds_the_answer_before_it_and_so_does_the_first_after_a_restart(tmp_path: Path) -> None:
    manifest, flight = tmp_path / "talking.yaml", tmp_path / "flight"
    manifest.write_text(MANIFEST)
    arguments = ("--manifest", str(manifest), "--kv-dir", str(tmp_path / "kv"))
    messages: Messages = []
    with serve(*arguments, "--trace", str(flight)) as server, server.client() as client:
        found = [say(client, messages, f"and what is number {number}?") for number in range(8)]
        [session] = client.get("/v1/sessions").json()["data"]
        full = [num_tokens // BLOCK * BLOCK for _, num_tokens in found]
        assert [cached for cached, _ in found] == [0, *full[:-1]]
        assert session["num_tokens"] == full[-1]
        until(lambda: client.get("/v1/sessions").json()["data"][0]["num_stored_tokens"] == full[-1], "it is kept")
        assert server.stop() == 0
    assert verify(open_trace(flight)).is_identical
    with serve(*arguments) as server, server.client() as client:
        assert say(client, messages, "are you back?")[0] == full[-1]
