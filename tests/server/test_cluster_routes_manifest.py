"""The routes that look at a cluster and change it, against a small cluster in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
import yaml
from hypothesis import given, settings

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.manifest_file import parse, plain
from lockstep.server.app import create_app
from lockstep.server.body import YAML_TYPES, kind_of
from lockstep.server.cluster_routes import accepted_type, manifest_text
from lockstep.server.options import ServerOptions
from lockstep.server.serving import ServerPhase
from tests.cluster.manifests import manifests
from tests.server.managing import FAULTS, MANIFEST, Hosted, Managed
from tests.server.support import NAME, client_of, error_of

YAML = {"Content-Type": "application/yaml"}
ROUTES = (
    ("GET", "/v1/cluster"),
    ("POST", "/v1/cluster/hosts/a/drain"),
    ("DELETE", "/v1/cluster/hosts/a/drain"),
    ("GET", "/v1/manifest"),
    ("PUT", "/v1/manifest"),
    ("GET", "/v1/sessions"),
    ("DELETE", "/v1/sessions/a"),
    ("GET", "/v1/events"),
    ("POST", "/v1/models/org/alpha/load"),
    ("POST", "/v1/models/alpha/unload"),
)


@contextlib.asynccontextmanager
async def managing(options: ServerOptions | None = None) -> AsyncIterator[tuple[httpx2.AsyncClient, Managed]]:
    cluster = Managed()
    transport = httpx2.ASGITransport(app=create_app(cluster, options))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, cluster


@pytest.mark.parametrize(
    ("method", "path"), [route for route in ROUTES if any(each in route[1] for each in ("manifest", "load", "hosts"))]
)
async def test_manifest_load_and_host_routes_need_a_manifest(method: str, path: str) -> None:
    """The keys of a server of one model are those of its clients."""
    async with client_of() as client:
        response = await client.request(method, path)
    assert response.status_code == 404
    error = error_of(response)
    assert error["code"] == "no_manifest"
    assert "--manifest FILE" in error["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_the_key(method: str, path: str) -> None:
    async with managing(ServerOptions(api_keys=("secret",))) as (client, _):
        assert (await client.request(method, path)).status_code == 401


async def test_single_model_has_a_cluster_snapshot() -> None:
    async with client_of() as client:
        shown = (await client.get("/v1/cluster")).json()
        asked = {"prompt": "x", "max_tokens": 1, "session_id": "s"}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        sessions = (await client.get("/v1/sessions")).json()["data"]
        assert (await client.delete("/v1/sessions/s")).json()["deleted"]
    [model] = shown["models"]
    assert (model["id"], model["aliases"], model["state"]) == (NAME, ["alpha"], "resident")
    assert model["max_active_sessions"] is None
    assert [budget["effective_bytes"] for budget in shown["budgets"]] == [None, None]
    assert [(session["id"], session["model"]) for session in sessions] == [("s", NAME)]


async def test_the_cluster_is_shown_as_it_is() -> None:
    async with managing() as (client, cluster):
        shown = (await client.get("/v1/cluster")).json()
    assert shown["cluster"] == "small"
    assert [(model["id"], model["state"]) for model in shown["models"]] == list(cluster.states.items())
    assert shown["budgets"] == [{"name": "gpu_budget", "declared_bytes": 100, "effective_bytes": 80, "used_bytes": 40}]
    assert shown["counters"]["requests_total"] == 3


@pytest.mark.parametrize("kind", ["application/json", "application/yaml", "text/yaml"])
async def test_manifest_from_get_can_be_put(kind: str) -> None:
    async with managing() as (client, cluster):
        got = await client.get("/v1/manifest", headers={"Accept": kind})
        assert kind_of(got.headers["content-type"]) == kind
        assert got.headers["vary"] == "Accept"
        put = await client.put("/v1/manifest", content=got.content, headers={"Content-Type": kind})
    assert put.status_code == 200
    assert cluster.text == got.text
    assert yaml.safe_load(got.text) == yaml.safe_load(MANIFEST)
    assert put.json()["unchanged"] == ["router"]


async def test_manifest_without_a_specific_accept_header_is_json() -> None:
    """As curl does, whose output goes on to jq."""
    async with managing() as (client, _):
        for accept in ("*/*", "application/json"):
            got = await client.get("/v1/manifest", headers={"Accept": accept})
            assert got.headers["content-type"] == "application/json"
            assert got.json() == yaml.safe_load(MANIFEST)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "application/json"),
        ("*/*", "application/json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "application/json"),
        ("application/*", "application/json"),
        ("image/png", "application/json"),
        ("Application/YAML; charset=utf-8", "application/yaml"),
        ("text/yaml, */*", "text/yaml"),
        ("*/*, application/x-yaml", "application/x-yaml"),
        ("text/*", "text/yaml"),
        ("application/yaml, application/json", "application/yaml"),
        ("application/json, application/yaml", "application/json"),
        ("application/yaml;q=0.5, application/json;q=0.9", "application/json"),
        ("application/yaml;q=0.5, */*;q=0.1", "application/yaml"),
        ("application/yaml;q=0", "application/json"),
        ("text/yaml;q=many", "text/yaml"),
    ],
)
def test_accept_header_selects_the_most_preferred_type(accept: str, kind: str) -> None:
    assert accepted_type(accept) == kind


@pytest.mark.parametrize(
    "words", ["caf\u00e9 \U0001f600", "\x7f", "a\x85b", "a\u2028 b\u2029", "\ufeff", "\\ud83d", "a\tb\n: #", "/"]
)
def test_text_in_a_json_manifest_is_read_unchanged(words: str) -> None:
    """Whatever YAML would make of it; as compact JSON and as its escapes."""
    value = {"cluster": "c", "models": {"a": {"source": "stub://a", "tier": "resident", "system_prompt": words}}}
    for body in (msgspec.json.encode(value), json.dumps(value).encode()):
        read = parse(manifest_text(body, "application/json"))
        assert read.entry("a").system_prompt == words
        assert plain(read) == value


async def test_a_manifest_may_be_json() -> None:
    value = {"cluster": "caf\u00e9 \U0001f600", "models": {"a": {"source": "stub://a"}}}
    async with managing() as (client, cluster):
        assert (await client.put("/v1/manifest", json=value)).status_code == 200
        assert yaml.safe_load(cluster.text) == value
        escaped = json.dumps(value, ensure_ascii=True, indent="\t").encode()
        response = await client.put("/v1/manifest", content=escaped, headers={"Content-Type": "application/json"})
        assert response.status_code == 200
        assert yaml.safe_load(cluster.text) == value


@settings(max_examples=40)
@given(manifests())
def test_every_manifest_is_read_back_from_its_json(manifest: Manifest) -> None:
    body = msgspec.json.encode(plain(manifest))
    assert parse(manifest_text(body, "application/json"), validators={"rollouts": lambda block: ()}) == manifest


def test_the_lines_of_json_are_the_clients_where_they_can_be() -> None:
    text = '{"cluster":\n\n "a"}'
    assert manifest_text(text.encode(), "application/json; charset=utf-8") == text


async def test_put_manifest_reports_all_faults_at_once_and_changes_nothing() -> None:
    async with managing() as (client, cluster):
        response = await client.put("/v1/manifest", content="bad: 1", headers=YAML)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_manifest"
    assert error["problems"] == [{"line": p.line, "where": p.where, "message": p.message} for p in FAULTS]
    assert all(str(fault) in error["message"] for fault in FAULTS)
    assert cluster.text == MANIFEST


async def test_put_manifest_reports_why_a_manifest_does_not_fit() -> None:
    async with managing() as (client, _):
        response = await client.put("/v1/manifest", content="big: 1", headers=YAML)
    assert response.status_code == 422
    error = error_of(response)
    assert (error["code"], error["type"]) == ("not_loadable", "invalid_request_error")
    assert error["message"] == "the manifest is not applied: router needs 3 GB, gpu_budget is 2 GB"


@pytest.mark.parametrize(
    ("content", "headers", "status", "words"),
    [
        (b"a: 1", {"Content-Type": "text/csv"}, 415, "or YAML with `application/yaml`"),
        (b"a: \xff", YAML, 400, "not UTF-8"),
        (b"  \n", YAML, 400, "the body is empty"),
        (b"", {}, 400, "the body is empty"),
        (b"{", {"Content-Type": "application/json"}, 400, "not valid JSON"),
        (b"{" + b"[" * 200, {"Content-Type": "application/json"}, 400, "nests objects and lists more than"),
    ],
)
async def test_a_body_that_is_no_manifest_is_refused(
    content: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    async with managing() as (client, cluster):
        response = await client.put("/v1/manifest", content=content, headers=headers)
    assert response.status_code == status
    assert words in error_of(response)["message"]
    assert cluster.text == MANIFEST


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"a: \xff", "application/yaml", "invalid_yaml"),
        (b"a: [", "application/yaml", "invalid_manifest"),
        (b"a: " + b"[" * 200, "text/yaml", "invalid_manifest"),
        (b"cluster: !!python/object/apply:os.getcwd []", "application/yaml", "invalid_manifest"),
        (b"{", "application/json", "invalid_json"),
        (b'{"cluster": "\xff"}', "application/json", "invalid_json"),
        (b'{"cluster": "' + rb"\ud83d" + b'"}', "application/json", "invalid_json"),
        (b'{"cluster": 1}', "application/json", "invalid_manifest"),
    ],
)
async def test_a_fault_has_the_code_of_the_language_that_it_is_in(content: bytes, kind: str, code: str) -> None:
    """Read by a real cluster: only what is no JSON is `invalid_json`."""
    cluster = Cluster(parse(MANIFEST))
    app = create_app(cluster)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        response = await client.put("/v1/manifest", content=content, headers={"Content-Type": kind})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


async def test_yaml_is_for_manifests_only() -> None:
    async with managing() as (client, _):
        assert (await client.post("/v1/chat/completions", content="a: 1", headers=YAML)).status_code == 415


async def test_no_manifest_is_replaced_while_the_server_drains() -> None:
    cluster = Managed()
    app = create_app(cluster)
    app.state.serving.lifecycle.on_signal()
    assert app.state.serving.lifecycle.phase is ServerPhase.DRAINING
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        response = await client.put("/v1/manifest", content=MANIFEST, headers=YAML)
    assert response.status_code == 503


@pytest.mark.parametrize("name", ["org/legal", "law"])
async def test_a_model_is_loaded_and_unloaded_by_hand(name: str) -> None:
    """By its id, slashes and all, or an alias."""
    async with managing() as (client, cluster):
        loaded = await client.post(f"/v1/models/{name}/load")
        assert (loaded.json()["id"], loaded.json()["state"]) == ("org/legal", "resident")
        assert cluster.states["org/legal"] == "resident"
        assert (await client.post(f"/v1/models/{name}/unload")).json()["state"] == "standby"


async def test_a_model_that_is_not_there_or_far_away_cannot_be_loaded() -> None:
    async with managing() as (client, _):
        missing, far = [await client.post(f"/v1/models/{name}/load") for name in ("nobody", "far")]
        assert (await client.get("/v1/models/far/load")).status_code == 404, "loading is a POST"
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")
    assert (far.status_code, error_of(far)["param"]) == (400, "model")


@pytest.mark.parametrize("name", ["a", "10.0.0.1"])
async def test_a_host_is_drained_and_takes_replicas_again(name: str) -> None:
    """By its name, or by an address that it alone has."""
    cluster = Hosted()
    transport = httpx2.ASGITransport(app=create_app(cluster))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        drained = (await client.post(f"/v1/cluster/hosts/{name}/drain")).json()
        assert (drained["name"], drained["is_drained"], drained["num_replicas"]) == ("a", True, 0)
        assert [host["is_drained"] for host in (await client.get("/v1/cluster")).json()["hosts"]] == [
            True,
            False,
            False,
        ]
        again = (await client.delete(f"/v1/cluster/hosts/{name}/drain")).json()
        assert (again["name"], again["is_drained"]) == ("a", False)
    assert cluster.drained == {}


async def test_draining_an_unknown_host_is_not_found() -> None:
    """And where everything runs on one machine, none is."""
    for cluster, message in ((Hosted(), "did you mean 'gone'?"), (Managed(), "the manifest has no `hosts:`")):
        transport = httpx2.ASGITransport(app=create_app(cluster))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            refused = await client.post("/v1/cluster/hosts/gon/drain")
        assert (refused.status_code, error_of(refused)["code"]) == (404, "host_not_found")
        assert message in error_of(refused)["message"]


async def test_sessions_are_listed_and_ended() -> None:
    async with managing() as (client, cluster):
        listed = (await client.get("/v1/sessions")).json()
        assert listed["data"] == [
            {
                "id": "a/b",
                "model": "router",
                "state": "idle",
                "age_s": 2.0,
                "idle_s": 1.0,
                "num_requests": 3,
                "num_tokens": 32,
                "num_stored_tokens": 0,
                "num_host_tokens": 0,
                "num_disk_tokens": 0,
                "place": "none",
                "caller": "",
            }
        ]
        ended = await client.delete("/v1/sessions/a/b")
        assert ended.json() == {"id": "a/b", "object": "session", "deleted": True}
        again = await client.delete("/v1/sessions/a/b")
    assert cluster.ended == ["a/b"]
    assert (again.status_code, error_of(again)["code"]) == (404, "session_not_found")


def answers_of(document: dict[str, Any], path: str, method: str) -> dict[str, Any]:
    content: dict[str, Any] = document["paths"][path][method]["responses"]["200"]["content"]
    return content


def test_the_openapi_document_has_the_schemas_of_cluster_and_manifest() -> None:
    document = create_app(Managed()).openapi()
    schema = answers_of(document, "/v1/cluster", "get")["application/json"]["schema"]
    assert "$ref" not in json.dumps(schema)
    assert {"models", "budgets", "counters"} <= schema["properties"].keys()
    assert schema["properties"]["models"]["items"]["properties"]["state"] == {"type": "string"}
    body = document["paths"]["/v1/manifest"]["put"]["requestBody"]["content"]
    assert body.keys() == answers_of(document, "/v1/manifest", "get").keys() == {*YAML_TYPES, "application/json"}
