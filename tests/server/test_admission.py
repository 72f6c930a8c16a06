"""Keys: what opens without one, what does not, and that no key is ever shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.server.admission import OPEN_PATHS, AccessKeys
from lockstep.server.options import ServerOptions
from lockstep.server.run import bind
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.server.support import error_of, exchange

KEYS = ("first-secret", "second-secret")


@pytest.fixture(scope="module")
def keyed() -> Iterator[ServerProcess]:
    environment = {"LOCKSTEP_API_KEY": ",".join(KEYS), "LOCKSTEP_LOG_FORMAT": "json", "LOCKSTEP_LOG_LEVEL": "debug"}
    with serve("stub://alpha", *IN_THREAD, environment=environment) as running:
        yield running


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_and_scrapers_need_no_key(keyed: ServerProcess, path: str) -> None:
    with keyed.client() as client:
        assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/alpha"),
        ("POST", "/tokenize"),
        ("GET", "/load"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "/healthy"),
        ("GET", "/health/../v1/models"),
    ],
)
def test_all_other_paths_require_a_key(keyed: ServerProcess, method: str, path: str) -> None:
    with keyed.client() as client:
        response = client.request(method, path)
    assert response.status_code == 401
    assert error_of(response)["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["Bearer", "bearer", "X-Api-Key"])
def test_any_key_opens_in_either_header(keyed: ServerProcess, key: str, form: str) -> None:
    headers = {"X-Api-Key": key} if form == "X-Api-Key" else {"Authorization": f"{form} {key}"}
    with keyed.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic first-secret"},
        {"Authorization": "first-secret"},
        {"Authorization": "Bearer first-secre"},
        {"Authorization": "Bearer first-secret,second-secret"},
        {"X-Api-Key": ""},
        {"X-Api-Key": "wrong"},
    ],
)
def test_other_keys_are_rejected(keyed: ServerProcess, headers: dict[str, str]) -> None:
    with keyed.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 401


def test_a_body_is_not_read_before_the_key_is_known(keyed: ServerProcess) -> None:
    with keyed.client() as client:
        response = client.post("/tokenize", content=b"{", headers={"Content-Length": "1"})
    assert response.status_code == 401


def test_logs_name_the_owner_and_never_the_key(keyed: ServerProcess) -> None:
    with keyed.client(api_key=KEYS[1]) as client:
        client.get("/v1/models", headers={"x-request-id": "whose"})
        client.get("/v1/models", headers={"Authorization": "Bearer nearly-a-secret"})
        metrics = client.get("/metrics").text
    lines = [json.loads(line) for line in keyed.stderr.splitlines()]
    assert next(line for line in lines if line.get("id") == "whose")["tenant"] == "key-2"
    for text in (keyed.stdout, keyed.stderr, metrics):
        assert "secret" not in text


def test_every_key_is_compared_even_after_a_match() -> None:
    """The owner is found among all keys; equal ones belong to the first."""
    keys = AccessKeys(("a", "b", "a"))
    assert keys.tenant([(b"x-api-key", b"a")]) == "key-1"
    assert keys.tenant([(b"x-api-key", b"b")]) == "key-2"
    assert keys.tenant([(b"authorization", b"Bearer no"), (b"x-api-key", b"b")]) == "key-2"
    assert keys.tenant([]) is None
    assert not AccessKeys(())


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_a_key_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(UsageError, match="can be reached from other machines"):
        bind(ServerOptions(host=host, port=0))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    with bind(ServerOptions(host=host, port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_key_or_a_word_opens_the_rest() -> None:
    for options in (
        ServerOptions(host="0.0.0.0", port=0, api_keys=("k",)),
        ServerOptions(host="0.0.0.0", port=0, allow_unauthenticated=True),
    ):
        with bind(options) as listener:
            assert listener.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:9000", "[::1]"])
def test_without_a_key_the_server_answers_to_loopbacks_names(server: ServerProcess, host: str) -> None:
    with server.client() as client:
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9000", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_a_page_that_points_its_name_at_loopback_is_refused(server: ServerProcess, host: str) -> None:
    with server.client() as client:
        refused = client.get("/v1/models", headers={"Host": host})
        assert refused.status_code == 403
        assert error_of(refused)["code"] == "unknown_host"
        assert client.get("/health", headers={"Host": host}).status_code == 200, "probes come by any name"


def test_a_page_from_elsewhere_changes_nothing_without_a_key(tmp_path: Path) -> None:
    """Its browser sends a POST without a body unasked, with the origin that it comes from."""
    manifest = tmp_path / "m.yaml"
    manifest.write_text("cluster: c\nmodels:\n  m: {source: 'stub://m'}\n")
    with serve("--manifest", str(manifest), *IN_THREAD, "--cors-origin", "https://ui.example") as server:

        def status(origin: str | None, path: str = "/v1/models/m/load") -> int:
            headers = {} if origin is None else {"Origin": origin}
            with server.client() as client:
                answer = client.post(path, headers=headers)
            if answer.status_code == 403:
                assert error_of(answer)["code"] == "unknown_origin"
            return answer.status_code

        for foreign in ("https://evil.example", "null", "http://localhost:3000"):
            assert status(foreign) == status(foreign, "/v1/models/m/unload") == 403
        assert status(None) == status(server.base_url) == status("https://ui.example") == 200


@pytest.mark.parametrize(
    ("target", "hosts", "words"),
    [
        ("/v1/models", ("localhost", "localhost"), "2 Host headers"),
        ("/v1/models", ("localhost", "evil.example"), "2 Host headers"),
        ("/v1/models", ("evil.example", "localhost"), "2 Host headers"),
        ("/health", ("a", "b", "c"), "3 Host headers"),
        ("/health", (), "no Host header"),
        ("http://evil.example/v1/models", ("localhost",), "different hosts"),
        ("HTTP://localhost@evil.example/v1/models", ("localhost",), "different hosts"),
    ],
)
def test_a_request_calls_the_server_by_one_name_or_is_400(
    server: ServerProcess, target: str, hosts: tuple[str, ...], words: str
) -> None:
    """On paths that everybody may ask for, too: a proxy before us could have gone by the other name."""
    answer = exchange(server.base_url, spoken(target, hosts))
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "invalid_host"
    assert words in error["message"]


@pytest.mark.parametrize("target", ["/health", "http://LOCALHOST:80/health", "http://localhost/health?a=http://b/"])
def test_a_request_line_may_name_the_host_as_well(server: ServerProcess, target: str) -> None:
    assert exchange(server.base_url, spoken(target, ("localhost",))).startswith(b"HTTP/1.1 200 ")


def spoken(target: str, hosts: tuple[str, ...]) -> bytes:
    lines = [f"GET {target} HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
    return "\r\n".join(lines).encode()


def test_server_with_keys_accepts_any_host_name(keyed: ServerProcess) -> None:
    with keyed.client(api_key=KEYS[0]) as client:
        assert client.get("/v1/models", headers={"Host": "models.example"}).status_code == 200


OPERATED = (
    ("GET", "/v1/cluster"),
    ("POST", "/v1/cluster/hosts/a/drain"),
    ("DELETE", "/v1/cluster/hosts/a/b/drain"),
    ("GET", "/v1/stats"),
    ("GET", "/v1/logs"),
    ("GET", "/v1/manifest"),
    ("PUT", "/v1/manifest"),
    ("GET", "/v1/events"),
    ("POST", "/v1/models/org/alpha/load"),
    ("POST", "/v1/models/alpha/unload"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/debug/check"),
)


@pytest.mark.parametrize(("method", "path"), OPERATED)
def test_shared_state_requires_an_admin_key_if_the_server_has_any(method: str, path: str) -> None:
    keys = AccessKeys(KEYS, ("root",))
    tenants = [keys.tenant([(b"x-api-key", key)]) for key in (b"nobody", KEYS[0].encode(), b"root")]
    assert tenants == [None, "key-1", "admin-1"]
    refusals = [keys.refusal(tenant, path) for tenant in tenants]
    assert [refusal and refusal.status for refusal in refusals] == [401, 403, None]
    assert AccessKeys(KEYS).refusal("key-1", path) is None, "without one any key will do"


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/sessions", "/v1/sessions/a/b"])
def test_own_data_requires_any_key_if_the_server_has_any(path: str) -> None:
    for keys in (AccessKeys(KEYS), AccessKeys(KEYS, ("root",)), AccessKeys((), ("root",))):
        refusals = [keys.refusal(tenant, path) for tenant in (None, "key-1", "admin-1")]
        assert [refusal and refusal.status for refusal in refusals] == [401, None, None]
    assert AccessKeys(()).refusal(None, path) is None


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/v1/models/alpha", "/v1/responses/x", "/v1/cluster2"]
)
def test_an_admin_key_is_accepted_on_client_routes_and_not_required_there(path: str) -> None:
    assert AccessKeys(KEYS, ("root",)).refusal("admin-1", path) is None
    assert AccessKeys(KEYS, ("root",)).refusal("key-1", path) is None
    assert AccessKeys((), ("root",)).refusal(None, path) is None, "no key is asked of callers"


def test_an_admin_key_works_on_a_real_server() -> None:
    keys = ("--api-key", KEYS[0], "--admin-key", "root", "--enable-debug-endpoints")
    with serve("stub://alpha", *keys, *IN_THREAD) as server:
        asked = {}
        for key in (None, KEYS[0], "root"):
            with server.client(api_key=key) as client:
                asked[key] = [client.get(path).status_code for path in ("/debug/check", "/v1/models")]
        log = server.stderr
    assert asked == {None: [401, 401], KEYS[0]: [403, 200], "root": [200, 200]}
    assert "tenant=admin-1" in log
    assert "root" not in log
