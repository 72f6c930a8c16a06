"""What a key sees of a real server: its own sessions and events, and nothing that another caller said or named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.server.process import IN_THREAD, ServerProcess
from tests.waiting import until

MANIFEST = """\
cluster: shared
models:
  router: {source: 'stub://router?field=intent&ids=billing,legal'}
  specialists:
    - {id: billing, source: 'stub://billing'}
    - {id: legal, source: 'stub://legal'}
routing: {entry: router, dispatch_rule: 'router.output.intent -> specialists.{intent}'}
sessions: {sweep_interval: 20ms}
"""
ANN, BOB, ROOT = "ann-s-key", "bob-s-key", "root-s-key"
TEXT = "I was charged twice for my subscription last week, and nobody answers my letters. " * 2


def test_prefix_cache_is_shared_between_keys_unless_per_key() -> None:
    found = {}
    for switch in ([], ["--prefix-cache-per-key"]):
        with ServerProcess("stub://alpha", "--api-key", ANN, "--api-key", BOB, *switch, *IN_THREAD) as server:
            server.wait_ready()
            with server.client(api_key=ANN) as ann, server.client(api_key=BOB) as bob:
                found[bool(switch)] = [ask(ann, None), ask(ann, None), ask(bob, None), ask(bob, None)]
    ((_, again, others, _), (first, own, foreign, own_again)) = found[False], found[True]
    assert again == others > 0
    assert (first, foreign) == (0, 0)
    assert own == own_again == again


@pytest.fixture(scope="module", params=[False, True], ids=["callers", "callers-and-admins"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("isolation") / "shared.yaml"
    path.write_text(MANIFEST)
    keys = ["--api-key", ANN, "--api-key", BOB, *(["--admin-key", ROOT] if request.param else [])]
    with ServerProcess("--manifest", str(path), *keys, *IN_THREAD) as server:
        server.wait_ready()
        for key, session in ((ANN, "mine"), (BOB, "mine"), (BOB, "bob/s secret plan"), (ANN, None)):
            with server.client(api_key=key) as client:
                ask(client, session)
        yield server


def ask(client: httpx2.Client, session: str | None) -> int:
    """How many tokens of the prompt were there."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "session_id": session}
    response = client.post("/v1/chat/completions", json={**body, "cache_salt": session or "none"})
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def sessions_of(client: httpx2.Client) -> dict[tuple[str, str], int]:
    """Requests by caller and id."""
    found = client.get("/v1/sessions").json()["data"]
    return {(each["caller"], each["id"]): each["num_requests"] for each in found}


def events_until(client: httpx2.Client, type_: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Events since the start, up to so many of a type."""
    seen: list[tuple[str, dict[str, Any]]] = []
    with client.stream("GET", "/v1/events?after=0") as response:
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                seen.append((name, json.loads(line.removeprefix("data: "))))
                if sum(each == type_ for each, _ in seen) == count:
                    break
    return seen


def has_admins(server: ServerProcess) -> bool:
    with server.client(api_key=ROOT) as client:
        return client.get("/v1/cluster").status_code == 200


def test_callers_with_equal_session_ids_have_separate_sessions(server: ServerProcess) -> None:
    with server.client(api_key=ANN) as ann, server.client(api_key=BOB) as bob:
        assert sessions_of(ann) == {("key-1", "mine"): 1}
        assert sessions_of(bob) == {("key-2", "mine"): 1, ("key-2", "bob/s secret plan"): 1}


def test_a_key_sees_its_own_and_an_admin_key_everything(server: ServerProcess) -> None:
    is_administered = has_admins(server)
    with server.client() as nobody:
        assert nobody.get("/v1/sessions").status_code == 401
    with server.client(api_key=ANN) as ann:
        shown = ann.get("/v1/cluster")
        assert shown.status_code == (403 if is_administered else 200)
        if not is_administered:
            told = shown.json()
            assert [(each["caller"], each["id"]) for each in told["sessions"]] == [("key-1", "mine")]
            assert told["counters"]["requests_total"] >= 4, "what is nobody's in particular is for all"
            assert "secret plan" not in shown.text
            assert "key-2" not in shown.text
            assert "charged" not in shown.text
            events = events_until(ann, "hop", 2)
            assert {each["caller"] for name, each in events if name in ("hop", "session_admitted")} == {"key-1"}
            assert "secret plan" not in str(events)
    if is_administered:
        with server.client(api_key=ROOT) as root:
            everybody = {("key-1", "mine"), ("key-2", "mine"), ("key-2", "bob/s secret plan")}
            assert sessions_of(root).keys() == everybody
            assert {(each["caller"], each["id"]) for each in root.get("/v1/cluster").json()["sessions"]} == everybody
            callers = [each["caller"] for name, each in events_until(root, "hop", 4) if name == "hop"]
            assert callers == ["key-1", "key-2", "key-2", "key-1"]


def test_a_key_ends_only_its_own(server: ServerProcess) -> None:
    with server.client(api_key=ANN) as ann, server.client(api_key=BOB) as bob:
        for path in ("/v1/sessions/bob/s secret plan", "/v1/sessions/mine?caller=key-2", "/v1/sessions/nobody-s"):
            refused = ann.delete(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "session_not_found")
        assert ann.delete("/v1/sessions/mine").status_code == 200
        assert sessions_of(ann) == {}
        assert len(sessions_of(bob)) == 2, "the other one of that name goes on"
        if has_admins(server):
            with server.client(api_key=ROOT) as root:
                ask(ann, "mine")
                assert root.delete("/v1/sessions/mine?caller=key-2").status_code == 200
                until(lambda: sessions_of(root).keys() == {("key-1", "mine"), ("key-2", "bob/s secret plan")}, "one")
                ask(bob, "mine")
                assert root.delete("/v1/sessions/mine").status_code == 200
                assert sessions_of(root).keys() == {("key-2", "bob/s secret plan")}, "both of that name"


def test_session_id_that_imitates_another_caller_stays_separate(server: ServerProcess) -> None:
    with server.client(api_key=ANN) as ann, server.client(api_key=BOB) as bob:
        before = sessions_of(bob)
        ask(ann, "key-2\0bob/s secret plan")
        assert ("key-1", "key-2\0bob/s secret plan") in sessions_of(ann)
        assert sessions_of(bob) == before
