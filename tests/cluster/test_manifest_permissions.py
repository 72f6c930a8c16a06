"""A manifest over HTTP: what it may name, by whose key it comes, and that a refusal tells nothing of this machine."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Hosts, Manifest, ModelEntry, Remote
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.manifest_permissions import (
    ADDRESS_REFUSED,
    ALL,
    HOSTS_REFUSED,
    NONE,
    SOURCE_REFUSED,
    OperatorNames,
)
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.remote_exchange import NotPublicError, PublicTransport, is_plainly_private, is_public
from lockstep.cluster.state import ClusterOptions
from lockstep.errors import ArtifactError, ManifestError, RequestFailedError
from lockstep.pocket import pocket_path
from lockstep.server.admission import permissions_of
from lockstep.server.options import ServerOptions
from lockstep.worker.link import WorkerOptions
from tests.adapter_files import write_pocket_adapter
from tests.cluster.remotes import call, crooked, events_of, says, whole
from tests.server.living import Living, living_cluster

YAML = {"Content-Type": "application/yaml"}
FIRST = """\
cluster: first
models:
  stub: {{source: 'stub://a'}}
  declared: {{source: '{declared}', tier: standby}}
fallback: {{remote: {{base_url: 'http://127.0.0.1:9/v1'}}}}
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A served cluster, and the files around its manifest."""

    server: Living
    folder: Path
    outside: Path

    def put(self, text: str, key: str) -> httpx2.Response:
        with self.server.client() as client:
            return client.put("/v1/manifest", content=text, headers={**YAML, "X-Api-Key": key})

    def put_source(self, source: str, key: str = "key") -> httpx2.Response:
        return self.put(f"cluster: c\nmodels:\n  m:\n    source: '{source}'\n    tier: standby\n", key)


@contextlib.contextmanager
def machine(root: Path, options: ServerOptions) -> Iterator[Machine]:
    folder, outside = root / "served", root / "outside"
    for each in (folder, outside):
        (each / "directory").mkdir(parents=True)
        (each / "directory" / "a-secret-name.gguf").write_bytes(b"x")
        (each / "notes.txt").write_text("no model")
        (each / "broken.gguf").write_bytes(pocket_path().read_bytes()[:5000])
        shutil.copy(pocket_path(), each / "model.gguf")
        write_pocket_adapter(each / "adapter")
        write_pocket_adapter(each / "aware", alora_invocation_tokens=[5])
    (folder / "link.gguf").symlink_to(outside / "model.gguf")
    (folder / "away").symlink_to(outside)
    text = FIRST.format(declared=outside / "model.gguf")
    placed = ClusterOptions(worker=WorkerOptions("thread"), folder=folder)
    with living_cluster(Cluster(parse(text), placed), options) as server:
        yield Machine(server, folder, outside)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("keyed"), ServerOptions(api_keys=("key",))) as served:
        yield served


def shut_sources(served: Machine) -> list[str]:
    folder, outside = served.folder, served.outside
    return [
        str(outside / "broken.gguf"),
        str(outside / "missing.gguf"),
        str(outside / "modle.gguf"),
        str(outside / "directory"),
        str(outside / "notes.txt"),
        str(outside),
        "/etc/passwd",
        "/etc/no-such-file",
        "/srv/x.gguf",
        "~/x.gguf",
        "~root/x.gguf",
        "~no-such-user/x.gguf",
        str(folder / ".." / "outside" / "model.gguf"),
        str(folder / "no" / ".." / ".." / "outside" / "model.gguf"),
        str(folder / "link.gguf"),
        str(folder / "away" / "model.gguf"),
        str(folder / "away" / "missing.gguf"),
        str(folder / "missing.gguf"),
        str(folder / "modle.gguf"),
        str(folder / "notes.txt"),
        str(folder / "directory"),
        str(folder / "broken.gguf"),
        str(folder),
        "src/lockstep",
        "org/name",
        "hf://org/name",
        *[f"{folder / 'model.gguf'}+lora={outside / name}" for name in ("adapter", "missing", "notes.txt")],
        *[f"{folder / 'model.gguf'}+lora={folder / name}" for name in ("aware", "missing", "notes.txt")],
        f"{folder / 'model.gguf'}+lora=hf://org/name",
        f"{outside / 'broken.gguf'}+lora={folder / 'adapter'}",
        f"{folder / 'missing.gguf'}+lora={folder / 'adapter'}",
        f"pocket://+lora={outside / 'adapter'}",
    ]


def test_all_that_a_key_may_not_name_is_one_refusal_whether_it_is_there_or_not(keyed: Machine) -> None:
    refused = [(each.status_code, each.json()) for each in map(keyed.put_source, shut_sources(keyed))]
    (status, body), *others = refused
    assert [other for other in others if other != (status, body)] == []
    assert status == 400
    assert body["error"]["code"] == "invalid_manifest"
    assert body["error"]["problems"] == [{"line": 4, "where": "models.m.source", "message": SOURCE_REFUSED}]
    with keyed.server.client() as client:
        told = client.get("/v1/cluster", headers={"X-Api-Key": "key"}).text
    assert "secret" not in str(body) + told


def test_key_may_name_files_in_the_manifest_folder_and_declared_sources(keyed: Machine) -> None:
    free = [str(keyed.folder / "model.gguf"), str(keyed.outside / "model.gguf"), "stub://b", "pocket://"]
    free += [f"{source}+lora={keyed.folder / 'adapter'}" for source in (*free[:2], free[3])]
    for source in free:
        assert keyed.put_source(source).status_code == 200, source
    assert keyed.put(FIRST.format(declared=keyed.outside / "model.gguf"), "key").status_code == 200


def test_key_may_not_name_a_file_of_scripted_answers(keyed: Machine) -> None:
    """The answers would show it."""
    answers = keyed.folder / "answers.jsonl"
    answers.write_text('{"answer": "scripted"}\n')
    for option in ("answers", "answer%73"):
        refused = keyed.put_source(f"stub://b?{option}={answers}")
        assert (refused.status_code, refused.json()["error"]["problems"][0]["message"]) == (400, SOURCE_REFUSED)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/v1", "http://[::ffff:10.0.0.1]/v1", "http://localhost:1/v1", "http://169.254.169.254/v1"],
)
def test_a_key_names_no_private_server_but_one_that_the_file_names(keyed: Machine, url: str) -> None:
    text = f"cluster: c\nmodels:\n  a: {{source: 'stub://a'}}\n  m: {{remote: {{base_url: '{url}'}}}}\n"
    refused = keyed.put(text, "key")
    assert refused.status_code == 400
    [problem] = refused.json()["error"]["problems"]
    assert problem == {"line": 4, "where": "models.m.remote.base_url", "message": ADDRESS_REFUSED}


def test_a_remote_that_resolves_to_a_private_address_is_rejected_at_the_request(
    keyed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is one of a public server while it is put, and leads here when it is called."""
    leads_to(monkeypatch, "rebound.example", "127.0.0.1")
    text = "cluster: c\nmodels:\n  a: {source: 'stub://a'}\n  m: {remote: {base_url: 'http://rebound.example:1/v1'}}\n"
    assert keyed.put(text, "key").status_code == 200
    with keyed.server.client() as client:
        asked = {"model": "m", "prompt": "x"}
        answer = client.post("/v1/completions", json=asked, headers={"X-Api-Key": "key"})
    assert answer.status_code >= 500
    assert "no public address" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (ServerOptions(), ""),
        (ServerOptions(api_keys=("key",), admin_keys=("root",)), "root"),
        (ServerOptions(api_keys=("key",), allow_any_source=True, allow_private_remotes=True), "key"),
    ],
    ids=["nobody has keys", "an admin's", "flags"],
)
def test_a_permitted_key_gets_detailed_errors_and_private_remotes(
    tmp_path: Path, options: ServerOptions, key: str
) -> None:
    with machine(tmp_path, options) as served:
        assert served.put_source(str(served.folder / "link.gguf"), key).status_code == 200
        missed = served.put_source(str(served.outside / "modle.gguf"), key)
        assert missed.status_code == 422
        assert "no such file or directory; did you mean model.gguf" in missed.json()["error"]["message"]
        text = "cluster: c\nmodels:\n  a: {source: 'stub://a'}\n  m: {remote: {base_url: 'http://127.0.0.1:1/v1'}}\n"
        assert served.put(text, key).status_code == 200


def test_permissions_are_for_admins_or_for_every_caller_of_a_server_without_remote_access() -> None:
    def permissions(tenant: str, **options: Any) -> tuple[bool, bool]:
        found = permissions_of(tenant, ServerOptions(**options))
        return found.any_source, found.private_remotes

    assert permissions("") == (True, True)
    assert permissions("", allow_unauthenticated=True) == (False, False), (
        "a caller is not the operator just because it can reach the server"
    )
    assert (
        permissions("key-1", api_keys=("k",))
        == permissions("key-1", api_keys=("k",), admin_keys=("a",))
        == (False, False)
    )
    assert permissions("admin-1", api_keys=("k",), admin_keys=("a",)) == (True, True)
    assert permissions("key-1", api_keys=("k",), allow_any_source=True) == (True, False)
    assert permissions("key-1", api_keys=("k",), allow_private_remotes=True) == (False, True)


def test_error_of_an_opened_source_is_redacted_for_senders_without_permissions() -> None:
    names = OperatorNames(Manifest("c", ()), Path.cwd(), lambda path: None, opens_sources=True)
    check = names.check_for(NONE)
    source = str(Path.cwd() / "m.gguf")
    parse(f"cluster: c\nmodels:\n  m:\n    source: '{source}'\n", author_check=check)
    told = check.redacted(ArtifactError("the tensor x.weight is not finite", path=source))
    assert isinstance(told, ManifestError)
    assert [(p.line, p.where, p.message) for p in told.problems] == [(4, "models.m.source", SOURCE_REFUSED)]
    other = ArtifactError("is no model", path="another.gguf")
    assert check.redacted(other) is other


@pytest.mark.parametrize(
    ("served", "block", "line", "where"),
    [
        (None, "hosts: {}", 3, "hosts"),
        (Hosts(), "", 1, "hosts"),
        (Hosts(), "hosts:\n  ray: '10.0.0.1:6379'", 4, "hosts.ray"),
        (Hosts(), "hosts:\n  secret: /tmp/mine", 4, "hosts.secret"),
        (Hosts(secret="/etc/secret"), "hosts:\n  ray: auto", 3, "hosts.secret"),
        (Hosts(), "hosts:\n  allow_plain: true", 4, "hosts.allow_plain"),
        (Hosts(tls_ca="/a", tls_cert="/c"), "hosts:\n  tls: {ca: /a, cert: /b}", 4, "hosts.tls.cert"),
        (Hosts(tls_ca="/a", tls_cert="/c"), "hosts:\n  tls: {ca: /b, cert: /c}", 4, "hosts.tls.ca"),
        (Hosts(tls_ca="/a", tls_cert="/c"), "hosts:\n  tls: {ca: /a, cert: /c, key: /k}", 4, "hosts.tls.key"),
    ],
)
def test_links_between_hosts_are_rejected_over_http_with_any_permission(
    served: Hosts | None, block: str, line: int, where: str
) -> None:
    names = OperatorNames(Manifest("c", (), hosts=served), None, lambda path: None, opens_sources=True)
    with pytest.raises(ManifestError) as caught:
        parse(
            f"cluster: c\nmodels: {{m: {{source: 'stub://a'}}}}\n{block}\n", author_check=names.check_for(ALL, served)
        )
    assert [(p.line, p.where, p.message) for p in caught.value.problems] == [(line, where, HOSTS_REFUSED)]


def test_replica_counts_may_be_set_over_http() -> None:
    served = Hosts(secret="/etc/secret", tls_ca="/a", tls_cert="/c", allows_plain=True)
    names = OperatorNames(Manifest("c", (), hosts=served), None, lambda path: None, opens_sources=True)
    text = (
        "cluster: c\nmodels: {m: {source: 'stub://a'}}\nhosts: {replicas: {m: {num: 3}}, routing: session, "
        "max_imbalance: 9, secret: /etc/secret, tls: {ca: /a, cert: /c}, allow_plain: true}\n"
    )
    hosts = parse(text, author_check=names.check_for(NONE, served)).hosts
    assert hosts is not None
    assert (hosts.replicas["m"].num, hosts.max_imbalance) == (3, 9)


def test_a_manifest_that_is_put_brings_no_hosts_in(keyed: Machine) -> None:
    answer = keyed.put("cluster: c\nmodels: {m: {source: 'stub://a'}}\nhosts: {secret: /etc/passwd}\n", "key")
    assert answer.status_code == 400
    assert f"line 3: hosts {HOSTS_REFUSED}" in answer.json()["error"]["message"]


PRIVATE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "127.9.9.9",
    "169.254.169.254",
    "172.16.0.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::a00:1",
    "64:ff9b:1::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert is_plainly_private(f"[{address}]" if ":" in address else address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_only_loopback_names_count_as_private_without_resolution() -> None:
    hosts = ("localhost", "LOCALHOST.", "a.localhost", "example.com", "localhost.example.com", "2130706433")
    assert [is_plainly_private(host) for host in hosts] == [True, True, True, False, False, False]


async def test_a_guarded_server_is_not_even_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crooked(says(whole("Hi"))) as other:
        port = other.url.rpartition(":")[2].partition("/")[0]
        for name in ("rebound.example", "gone.example"):
            leads_to(monkeypatch, name, "127.0.0.1" if name.startswith("re") else None)
            remote = Remote(f"http://{name}:{port}/v1", only_public=True)
            model = RemoteModel(ModelEntry("cloud", remote.base_url, remote=remote))
            with pytest.raises(RequestFailedError, match="has no public address"):
                await events_of(model, call())
            await model.close()
        assert other.requests == []


async def test_the_address_that_was_looked_at_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name stays what is spoken to: in Host, and for the certificate."""
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200)

    leads_to(monkeypatch, "api.example", "2606:4700::1111", "8.8.8.8")
    async with httpx2.AsyncClient(transport=PublicTransport(httpx2.MockTransport(answer))) as client:
        await client.post("https://api.example:8443/v1/x", json={"a": 1})
        leads_to(monkeypatch, "api.example", "8.8.8.8", "10.0.0.1")
        with pytest.raises(NotPublicError):
            await client.get("https://api.example:8443/v1/x")
    [request] = seen
    assert str(request.url) == "https://8.8.8.8:8443/v1/x"
    assert request.headers["host"] == "api.example:8443"
    assert request.extensions["sni_hostname"] == "api.example"
    assert await request.aread() == b'{"a":1}'


def leads_to(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str | None) -> None:
    """Let a name lead to these addresses, or to none."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != name:
            return resolve(host, port, *args, **more)
        if None in addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [info for each in addresses for info in resolve(each, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
