"""A manifest's text means what it says, and what is written is read as the same value."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.dispatch import DispatchRule
from lockstep.cluster.manifest import (
    HostedReplicas,
    Hosts,
    Manifest,
    ModelEntry,
    Persona,
    Remote,
    Resources,
    Routing,
    SessionLimits,
    Tier,
)
from lockstep.cluster.manifest_file import dump, parse, plain, top_keys
from lockstep.cluster.manifest_hosts import HOSTS, REPLICAS, TLS
from lockstep.cluster.manifest_keys import RESOURCES, SAMPLING_KEYS, SESSIONS, engine_keys, entry_keys, remote_keys
from lockstep.cluster.manifest_routing import DISPATCH, ROUTING
from lockstep.core.balancer import RoutingPolicy
from lockstep.engine.options import EngineOptions
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ManifestError, Problem
from lockstep.executors.stub import StubOptions
from tests.cluster.manifests import manifests

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, DOCUMENT = ROOT / "examples", ROOT / "docs" / "manifest.md"
FULL = """\
cluster: full

resources: {gpu_budget: 16GiB, ram_budget: 1.5TB, kv_budget: 4GB, host_kv_budget: 0B, disk_kv_budget: 1TiB}

models:
  router:
    id: router
    source: ./router.gguf
    tier: active
    priority: -5
    persona: suffix
    system_prompt: |
      Route the last message.
      Answer with one word.
    sampling: {temperature: 0, top_k: 1}
    size: 800MB
    engine: {max_num_seqs: 8, kv_cache_memory_bytes: 256MiB, chunking: false, order: fair}
    aliases: gpt-3.5-turbo
  specialists:
    - id: billing
      source: pocket://
      co_activation: [router, legal]
      keep_alive: 5m
      aliases: [openai/gpt-4o, "4"]
    - {id: legal, source: 'hf://org/legal@v2#Q4_K_M', tier: standby, promotion_hint: on_router_classification}
  extra:
    - id: cloud
      remote: {base_url: 'https://${HOST}/v1', model: 'a$$b', api_key_env: CLOUD_KEY, timeout: 2500ms}

fallback: cloud

routing:
  entry: router
  dispatch_rule: router.output.intent->specialists.{intent}
  literal: refund=billing, contract=legal

sessions: {idle_threshold: 1h, min_lifetime: 0s, sweep_interval: 50ms, max_active_sessions: 4}

hosts:
  ray: head.example.com:6379
  replicas:
    router: {num: 2}
    billing: {num: 3, resources: {CPU: 2, memory: 4GB, any_name: 0.5}, spread: true}
  routing: session
  max_imbalance: 0
  secret: /etc/lockstep/secret
  tls: {ca: /etc/ca.pem, cert: ~/host.pem, key: ~/host.key}
  allow_plain: true
"""


def problems_of(text: str) -> tuple[Problem, ...]:
    """Empty where there are none; any other exception is a fault of ours."""
    try:
        parse(text)
    except ManifestError as error:
        return error.problems or (Problem(0, "", "an error without a problem"),)
    return ()


def test_every_key_means_its_field() -> None:
    cloud = Remote("https://api.example.com/v1", "a$b", "CLOUD_KEY", 2.5)
    assert parse(FULL, environment={"HOST": "api.example.com"}) == Manifest(
        cluster="full",
        entries=(
            ModelEntry(
                id="router",
                source="./router.gguf",
                priority=-5,
                aliases=("gpt-3.5-turbo",),
                system_prompt="Route the last message.\nAnswer with one word.\n",
                persona=Persona.SUFFIX,
                sampling={"temperature": 0, "top_k": 1},
                size_bytes=800_000_000,
                engine={"max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20, "chunking": False, "order": "fair"},
            ),
            ModelEntry(
                id="billing",
                source="pocket://",
                set="specialists",
                co_activation=("router", "legal"),
                aliases=("openai/gpt-4o", "4"),
                keep_alive_s=300.0,
            ),
            ModelEntry(
                id="legal",
                source="hf://org/legal@v2#Q4_K_M",
                tier=Tier.STANDBY,
                set="specialists",
                promotes_on_intent=True,
            ),
            ModelEntry(id="cloud", source="https://api.example.com/v1", tier=Tier.REMOTE, set="extra", remote=cloud),
        ),
        resources=Resources(16 << 30, 1_500_000_000_000, 4_000_000_000, 0, 1 << 40),
        routing=Routing(
            "router", DispatchRule("router", "intent", "specialists", None, {"refund": "billing", "contract": "legal"})
        ),
        fallback="cloud",
        sessions=SessionLimits(3600.0, 0.0, 0.05, 4),
        hosts=Hosts(
            ray="head.example.com:6379",
            replicas={
                "router": HostedReplicas(2),
                "billing": HostedReplicas(3, {"CPU": 2, "memory": 4e9, "any_name": 0.5}, spread=True),
            },
            routing=RoutingPolicy.SESSION,
            max_imbalance=0,
            secret="/etc/lockstep/secret",
            tls_ca="/etc/ca.pem",
            tls_cert="~/host.pem",
            tls_key="~/host.key",
            allows_plain=True,
        ),
    )


def test_empty_hosts_block_is_kept_as_default_hosts() -> None:
    text = "cluster: x\nmodels: {m: {source: 'pocket://'}}\n"
    manifest = parse(f"{text}hosts: {{}}\n")
    assert manifest.hosts == Hosts()
    assert parse(dump(manifest)) == manifest
    assert parse(text).hosts is None


def test_models_that_share_replicas_have_the_largest_demand() -> None:
    """A backend, or files of one content, make models share that their text keeps apart."""
    many, spread = HostedReplicas(3), HostedReplicas(3, spread=True)
    hosts = Hosts(replicas={"a": HostedReplicas(2), "b": many, "c": spread})
    assert hosts.demand(["a", "b", "c", "d"]) is many, "the first of equal ones"
    assert hosts.demand(["d", "a"]).num == 2, "who says nothing takes what the others want"
    assert hosts.demand(["d"]) == HostedReplicas()


def test_the_customer_support_manifest() -> None:
    manifest = parse((EXAMPLES / "customer-support.yaml").read_text())
    assert [(entry.id, entry.set, entry.tier.value) for entry in manifest.entries] == [
        ("router", None, "resident"),
        ("billing", "specialists", "resident"),
        ("technical", "specialists", "resident"),
        ("legal", "specialists", "standby"),
        ("fallback", None, "remote"),
    ]
    assert manifest.entry("router").priority == -2
    assert manifest.entry("technical").co_activation == ("router",)
    assert manifest.entry("legal").promotes_on_intent
    assert manifest.resources == Resources(18_000_000_000, 32_000_000_000)
    assert manifest.routing == Routing("router", DispatchRule("router", "intent", "specialists"))
    assert manifest.fallback == "fallback"


@pytest.mark.parametrize(("name", "num_resident", "num_standby"), [("density-50", 26, 25), ("warming-heavy", 1, 8)])
def test_the_larger_examples_have_their_counts(name: str, num_resident: int, num_standby: int) -> None:
    manifest = parse((EXAMPLES / f"{name}.yaml").read_text(), name)
    tiers = [entry.tier for entry in manifest.entries]
    assert (tiers.count(Tier.RESIDENT), tiers.count(Tier.STANDBY)) == (num_resident, num_standby)
    assert len({entry.source for entry in manifest.entries}) == len(manifest.entries)
    num_warmed = sum(entry.co_activation == ("router",) for entry in manifest.entries)
    assert num_warmed == (8 if name == "warming-heavy" else 0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_written_and_read_as_itself(path: Path) -> None:
    manifest = parse(path.read_text())
    assert parse(dump(manifest)) == manifest
    assert dump(parse(dump(manifest))) == dump(manifest)


@settings(max_examples=40)
@given(manifests())
def test_dumped_manifest_parses_to_the_same_value(manifest: Manifest) -> None:
    text = dump(manifest)
    again = parse(text, validators={"rollouts": lambda block: ()})
    assert again == manifest
    assert dump(again) == text, "canonical: one value, one text"


@settings(max_examples=60)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_manifest_or_a_manifest_error(text: str) -> None:
    for candidate in (text, f"cluster: x\nmodels:\n  m: {{source: {text}}}\n", FULL.replace("full", text)):
        for problem in problems_of(candidate):
            assert 1 <= problem.line <= len(candidate.splitlines()) + 1


@pytest.mark.parametrize("written", ["18G", "18gb", "18000000000"])
def test_a_budget_without_an_exact_unit_is_read_and_noted(written: str) -> None:
    """The value is that of the canonical text, which is what is written and needs no note."""
    text = (EXAMPLES / "customer-support.yaml").read_text()
    manifest, meant = parse(text.replace("18GB", written)), parse(text)
    (note,) = manifest.notes
    assert note.startswith(f"line 4: resources.gpu_budget is '{written}', which is read as 18")
    assert manifest == meant
    assert dump(manifest) == dump(meant)
    assert parse(dump(manifest)).notes == meant.notes == ()


def test_a_remote_model_needs_no_source_and_no_tier() -> None:
    manifest = parse("cluster: x\nmodels: {m: {remote: {base_url: 'http://127.0.0.1:1/v1'}}}\n")
    assert manifest.entries == (
        ModelEntry("m", "http://127.0.0.1:1/v1", Tier.REMOTE, remote=Remote("http://127.0.0.1:1/v1")),
    )
    assert "source" not in dump(manifest)


def test_variables_come_only_from_the_given_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST", "from-the-process")
    with pytest.raises(ManifestError, match=r"\$\{HOST\}, which is not set"):
        parse(FULL)
    assert parse(FULL, environment={"HOST": "a.b"}).entry("cloud").source == "https://a.b/v1"


def test_a_manifest_over_http_that_names_a_variable_is_rejected() -> None:
    with pytest.raises(ManifestError, match=r"names \$\{HOST\}, but a manifest sent over HTTP cannot read"):
        parse(FULL, environment=None)


def test_dollars_of_a_remote_are_not_expanded_twice() -> None:
    text = FULL.replace("a$$b", "${NAME}")
    manifest = parse(text, environment={"HOST": "a.b", "NAME": "${HOST}$$"})
    assert manifest.entry("cloud").remote == Remote("https://a.b/v1", "${HOST}$$", "CLOUD_KEY", 2.5)
    assert parse(dump(manifest)) == manifest


def test_a_manifest_in_json_may_write_a_character_as_a_surrogate_pair() -> None:
    """As ``json.dumps`` does by default."""
    entry = ModelEntry("m", "pocket://", system_prompt="a 😀 b")
    written = json.dumps(plain(Manifest("x", (entry,))))
    assert "\\ud83d\\ude00" in written
    assert parse(written).entry("m").system_prompt == "a 😀 b"


def test_yaml_1_1_booleans_are_strings() -> None:
    manifest = parse("cluster: no\nmodels: {on: {source: off}}\n")
    assert (manifest.cluster, manifest.entries[0].id, manifest.entries[0].source) == ("no", "on", "off")


def test_dumped_manifest_is_plain_yaml() -> None:
    manifest = parse(FULL, environment={"HOST": "a.b"})
    told = yaml.safe_load(dump(manifest))
    assert told["models"]["router"]["size"] == "800MB"
    assert told["fallback"] == "cloud"
    odd = Manifest("no", (ModelEntry("1e5", "off"), ModelEntry("1:30", "~")))
    assert yaml.safe_load(dump(odd))["models"] == {
        "1e5": {"source": "off", "tier": "resident"},
        "1:30": {"source": "~", "tier": "resident"},
    }


def test_engine_block_has_the_fields_of_engine_options() -> None:
    router = parse(FULL, environment={"HOST": "a.b"}).entry("router")
    options = EngineOptions(**router.engine)
    assert options.kv_cache_memory_bytes == 256 << 20
    assert (options.max_num_seqs, options.chunking, options.order) == (8, False, "fair")


def test_models_of_one_source_are_counted_once_against_a_budget() -> None:
    text = "cluster: x\nresources: {gpu_budget: 1GB}\nmodels:\n  all:\n"
    text += "".join(f"    - {{id: m{i}, source: pocket://, size: 800MB}}\n" for i in range(10))
    assert len(parse(text).entries) == 10
    with pytest.raises(ManifestError, match=r"need 1600MB \(m0 800MB, m9 800MB\)"):
        parse(text.replace("m9, source: pocket://", "m9, source: other.gguf"))


def test_the_document_names_every_key_and_its_example_is_right() -> None:
    document = DOCUMENT.read_text()
    engine, sampling = set(engine_keys()), set(SAMPLING_KEYS)
    blocks = [
        top_keys({}, {}),
        ROUTING,
        DISPATCH,
        HOSTS,
        REPLICAS,
        TLS,
        RESOURCES,
        SESSIONS,
        entry_keys({}),
        remote_keys({}),
        engine,
        sampling,
    ]
    blocks.append([each.name for each in fields(StubOptions) if each.name != "name"])
    missing = [key for block in blocks for key in block if f"`{key}`" not in document]
    assert not missing
    example, _, hosts = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    assert parse(example).routing is not None
    assert parse(example + hosts).hosts is not None


@pytest.mark.parametrize(
    "written", ["{method: suffix, num_speculative_tokens: 4}", '\'{"method": "suffix", "num_speculative_tokens": 4}\'']
)
def test_speculation_is_a_block_or_json_and_is_written_as_a_block(written: str) -> None:
    text = f"cluster: c\nmodels:\n  a:\n    source: pocket://\n    engine:\n      speculative_config: {written}\n"
    manifest = parse(text)
    config = SpeculativeConfig.parse(str(manifest.entries[0].engine["speculative_config"]))
    assert (config.method, config.num_speculative_tokens) == ("suffix", 4)
    assert "method: suffix" in dump(manifest)
    assert parse(dump(manifest)) == manifest


@pytest.mark.parametrize("written", ["suffix", "[suffix]", "{method: eagle}", "{method: ngram, model: a}", "true"])
def test_other_speculation_is_a_fault_of_its_line(written: str) -> None:
    text = f"cluster: c\nmodels:\n  a:\n    source: pocket://\n    engine:\n      speculative_config: {written}\n"
    with pytest.raises(ManifestError) as caught:
        parse(text)
    assert [problem.line for problem in caught.value.problems] == [6]
