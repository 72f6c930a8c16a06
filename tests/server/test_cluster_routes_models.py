"""Models and health, before a model is loaded and after."""

from __future__ import annotations

import httpx2
import pytest

from tests.server.process import ServerProcess
from tests.server.support import NAME, client_of, error_of
from tests.waiting import ENDLESS_MS

READINESS = ("/health", "/healthz", "/health/ready", "/ping")


def test_every_name_is_listed_in_openais_shape(server: ServerProcess) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [NAME, "alpha"]
    model = listed["data"][0]
    assert isinstance(model["created"], int)
    assert {
        "object": "model",
        "owned_by": "lockstep",
        "root": "stub://alpha",
        "parent": None,
        "max_model_len": 8192,
        "tier": "resident",
    }.items() <= model.items()


@pytest.mark.parametrize("name", [NAME, "alpha"])
def test_one_model_is_found_by_any_name(server: ServerProcess, name: str) -> None:
    with server.client() as client:
        assert client.get(f"/v1/models/{name}").json()["id"] == name


def test_a_name_with_an_escaped_slash_is_the_same(server: ServerProcess) -> None:
    with server.client() as client:
        assert client.get("/v1/models/org%2Falpha").json()["id"] == NAME


def test_an_unknown_model_is_named(server: ServerProcess) -> None:
    with server.client() as client:
        response = client.get("/v1/models/beta")
    assert response.status_code == 404
    error = error_of(response)
    assert error["message"] == "The model `beta` does not exist; this server has `org/alpha`, `alpha`."
    assert error["param"] == "model"


@pytest.mark.parametrize("path", READINESS)
def test_a_loaded_server_is_ready(server: ServerProcess, path: str) -> None:
    with server.client() as client:
        response = client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ready", "reason": "", "warnings": []})
        assert client.post("/ping").status_code == 200


def test_a_loading_server_is_unavailable_with_a_retry_time() -> None:
    """The port is open at once; what needs the model is told when to come back."""
    with ServerProcess(f"stub://alpha?load_ms={ENDLESS_MS}") as loading, loading_client(loading) as client:
        for path in READINESS:
            response = client.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "unavailable", "reason": "the model is loading", "warnings": []}
            assert "retry-after" in response.headers
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["tier"] == "loading"
        refused = client.post("/tokenize", json={"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1


def loading_client(server: ServerProcess) -> httpx2.Client:
    server.wait_listening()
    return server.client()


async def test_the_debug_endpoints_are_off_by_default(server: ServerProcess) -> None:
    with server.client() as client:
        assert client.get("/debug/check").json() == {"ok": True, "problem": ""}
        assert client.post("/reset_prefix_cache").json() == {"num_blocks": 0}
    async with client_of() as plain:
        assert (await plain.get("/debug/check")).status_code == 404
        assert (await plain.post("/reset_prefix_cache")).status_code == 404
