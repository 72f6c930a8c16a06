"""One server for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.coming_from.page import ROOT
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.waiting import until

SUPPORT = (ROOT / "examples" / "customer-support.yaml").read_text(encoding="utf-8")
BUSY = (
    SUPPORT.replace("max_active_sessions: 16", "max_active_sessions: 1")
    .replace("tier: resident\n      co_activation", "tier: standby\n      co_activation")
    .replace("tech-phi3\n", "tech-phi3\n      max_active_sessions: 1\n")
)
"""The example with one session at once in two models, and with specialists that are warmed: every counter and event
occurs."""
YAML = {"Content-Type": "application/yaml"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A server of `BUSY` in which everything has happened that the page describes."""

    client: httpx2.Client
    cluster: dict[str, Any]
    metrics: str
    events: list[str]
    answers: list[dict[str, Any]]
    routes: Mapping[str, Mapping[str, Any]]
    replacement: dict[str, Any]
    """The answer to a PUT of the same manifest."""

    def ask(self, text: str, **more: Any) -> dict[str, Any]:
        return ask(self.client, text, **more)

    def session(self, id_: str) -> dict[str, Any]:
        """A session as `/v1/sessions` lists it."""
        sessions = self.client.get("/v1/sessions").json()["data"]
        [found] = [session for session in sessions if session["id"] == id_]
        return dict(found)


@pytest.fixture(scope="session")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("coming-from")
    path = folder / "cluster.yaml"
    path.write_text(BUSY)
    flags = ("--backend", "stub", "--kv-dir", str(folder / "kv"), *IN_THREAD)
    with serve("--manifest", str(path), *flags) as server, server.client() as client:
        answers = [
            ask(client, "billing", session_id="one"),
            ask(client, "a question about nothing", session_id="two"),
        ]
        for what in ("load", "unload"):
            assert client.post(f"/v1/models/legal/{what}").status_code == 200
        until(lambda: client.get("/v1/cluster").json()["counters"]["co_activation_warms"] == 2, "two models are warmed")
        put = client.put("/v1/manifest", content=BUSY, headers=YAML)
        assert put.status_code == 200
        yield Seen(
            client,
            client.get("/v1/cluster").json(),
            client.get("/metrics").text,
            events_of(server),
            answers,
            client.get("/openapi.json").json()["paths"],
            put.json(),
        )


def ask(client: httpx2.Client, text: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events_of(server: ServerProcess) -> list[str]:
    """Lines of the event stream until the replacement's end, which is the last thing that happened."""
    lines: list[str] = []
    with server.client() as client, client.stream("GET", "/v1/events?after=0") as response:
        for line in response.iter_lines():
            lines.append(line)
            if "event: manifest_replaced" in lines and line.startswith("data: "):
                break
    return lines
