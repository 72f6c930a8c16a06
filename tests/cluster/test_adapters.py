"""Adapters in a manifest: models of one base share its replica, budgets count them, and a reload leaves the base."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.adapter_flags import adapters_of, separated
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.manifest_file import dump, parse
from lockstep.cluster.manifest_permissions import ALL, NONE, OperatorNames
from lockstep.cluster.placement import place, text_of
from lockstep.cluster.resolve import OpenedManifest, open_manifest
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import (
    ArtifactNotFoundError,
    ConfigError,
    InvalidParameterError,
    ManifestError,
    ModelNotFoundError,
    UsageError,
)
from lockstep.executors.stub import BYTES_PER_RANK, DECLARED_BYTES
from tests.adapter_files import write_stub_adapter
from tests.cluster.clusters import clustered, say
from tests.waiting import eventually

ROUTED = """
cluster: routed
models:
  router: {{source: 'stub://base?field=intent&ids=legal,billing'}}
  specialists:
    - {{id: legal, source: 'stub://specialist', adapter: '{folder}/legal'}}
    - {{id: billing, source: 'stub://specialist', adapter: '{folder}/billing'}}
    - {{id: plain, source: 'stub://specialist'}}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{{intent}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("legal", "billing", "third")):
        write_stub_adapter(tmp_path / name, number)
    return tmp_path


def manifest(folder: Path, **more: Any) -> Manifest:
    return replace(parse(ROUTED.format(folder=folder)), **more)


def opened(given: Manifest, **engine: Any) -> OpenedManifest:
    return open_manifest(given, LoadOptions(EngineOptions(**engine)))


def states(cluster: Cluster) -> dict[str, tuple[str, str | None]]:
    return {model.id: (model.state, model.adapter) for model in cluster.snapshot().models}


# -- manifests --------------------------------------------------------------------------------------------------------


def test_a_written_manifest_reads_back(folder: Path) -> None:
    first = manifest(folder)
    assert parse(dump(first)) == first
    assert first.entry("legal").adapter == f"{folder}/legal"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("''", "is empty"),
        ("stub://a", "an adapter is"),
        ("[a]", "a list"),
        ("3", "must be a string"),
        ("pocket://", "no adapter ''"),
        ("pocket://legl", r"line 3: .*no adapter 'legl'; did you mean 'legal'\? its adapters are pocket://billing, "),
    ],
)
def test_an_adapter_is_a_path(value: str, fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        parse(f"cluster: c\nmodels:\n  a: {{source: 'stub://a', adapter: {value}}}\n")


def test_a_remote_model_has_no_adapter() -> None:
    with pytest.raises(ManifestError, match="does not apply to a remote model"):
        parse("cluster: c\nmodels:\n  a: {remote: {base_url: 'https://x.example/v1'}, adapter: a}\n")


def test_other_backends_have_no_adapters(folder: Path) -> None:
    served = served_by(manifest(folder), Backend.STUB)
    assert {entry.adapter for entry in served.entries} == {None}


def test_a_sender_may_name_adapters_of_the_operator_and_of_the_folder(folder: Path) -> None:
    names = OperatorNames(manifest(folder), folder / "third", str, opens_sources=True)
    text = ROUTED.format(folder=folder)
    parse(text, environment={}, author_check=names.check_for(NONE))
    embedded = text.replace(f"{folder}/legal", "pocket://legal")
    parse(embedded, environment={}, author_check=names.check_for(NONE))
    inside = text.replace(f"{folder}/legal", f"{folder}/third/inner")
    parse(inside, environment={}, author_check=names.check_for(NONE))
    outside = text.replace(f"{folder}/legal", "/etc/passwd")
    with pytest.raises(ManifestError, match="requires an admin's key"):
        parse(outside, environment={}, author_check=names.check_for(NONE))
    parse(outside, environment={}, author_check=names.check_for(ALL))


# -- replicas and budgets ---------------------------------------------------------------------------------------------


def test_models_of_one_base_share_a_replica_whose_budget_counts_the_slots(folder: Path) -> None:
    result = opened(manifest(folder), max_loras=2, max_lora_rank=8)
    specs = result.specs
    assert specs["legal"].key == specs["billing"].key == specs["plain"].key != specs["router"].key
    assert [each.name for each in specs["plain"].options.adapters] == ["legal", "billing"]
    assert specs["plain"].predicted_bytes == DECLARED_BYTES + 2 * 8 * BYTES_PER_RANK
    assert specs["router"].predicted_bytes == DECLARED_BYTES


def test_only_a_replica_without_room_for_adapters_gets_another_key(folder: Path) -> None:
    first = manifest(folder)
    entries = {entry.id: entry for entry in first.entries}
    fewer = replace(first, entries=tuple([entries[id_] for id_ in ("router", "legal", "plain")]))
    none = replace(first, entries=tuple([replace(entry, adapter=None) for entry in first.entries]))
    keys = [opened(each).specs["plain"].key for each in (first, fewer, none)]
    assert keys[0] == keys[1] != keys[2]
    assert opened(none, enable_lora=True).specs["plain"].key == keys[0]


def test_an_adapter_that_cannot_be_used_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"billing: the adapter has rank 4, more than max_lora_rank \(3\)"):
        opened(replace(manifest(folder), entries=manifest(folder).entries[2:]), max_lora_rank=3)
    with pytest.raises(ArtifactNotFoundError):
        opened(manifest(folder / "nowhere"))
    placed = place(manifest(folder / "nowhere"), Backend.AUTO, LoadOptions())
    assert [each.partition(":")[0] for each in placed.refusals] == ["legal", "billing"]


def test_the_plan_shows_adapters(folder: Path) -> None:
    text = text_of(place(manifest(folder), Backend.AUTO, LoadOptions()))
    assert "stub://specialist + " in text


# -- a running cluster ------------------------------------------------------------------------------------------------


async def test_routed_requests_are_answered_with_their_adapters(folder: Path) -> None:
    async with clustered(ROUTED.format(folder=folder)) as cluster:
        _, specialists = cluster.snapshot().replicas
        assert specialists.models == ("legal", "billing", "plain")
        texts = {words: (await say(cluster, words)).text for words in ("a contract", "an invoice")}
        assert len(set(texts.values())) == 2
        assert all(text.startswith("[stub:specialist+") for text in texts.values())
        assert (await say(cluster, "hello", "plain")).text.startswith("[stub:specialist] ")
        cards = {card.name: card for card in cluster.cards()}
        assert (cards["legal"].parent, cards["legal"].root) == ("plain", f"{folder}/legal")
        assert (cards["plain"].parent, cards["router"].parent) == (None, None)


async def test_a_reload_changes_adapters_and_leaves_the_base_loaded(folder: Path) -> None:
    text = ROUTED.format(folder=folder)
    async with clustered(text) as cluster:
        before = (await say(cluster, "hello", "legal")).text
        transitions = len(cluster.snapshot().transitions)
        open_call = asyncio.create_task(say(cluster, "hello", "billing"))
        await cluster.replace(text.replace(f"{folder}/legal", f"{folder}/third"), None, ALL)
        after = (await say(cluster, "hello", "legal")).text
        assert after != before
        assert after.startswith("[stub:specialist+")
        await open_call
        assert len(cluster.snapshot().transitions) == transitions, "no replica was loaded or unloaded"
        assert states(cluster)["legal"] == ("resident", f"{folder}/third")


async def test_a_reload_with_a_missing_adapter_changes_nothing(folder: Path) -> None:
    text = ROUTED.format(folder=folder)
    async with clustered(text) as cluster:
        before = (await say(cluster, "hello", "legal")).text
        with pytest.raises(ArtifactNotFoundError):
            await cluster.replace(text.replace(f"{folder}/legal", f"{folder}/none"), None, ALL)
        assert (await say(cluster, "hello", "legal")).text == before
        assert states(cluster)["legal"] == ("resident", f"{folder}/legal")


async def test_the_last_adapter_of_a_base_can_leave_and_come_back(folder: Path) -> None:
    """Without any adapter, the base is loaded without room for adapters."""
    text = ROUTED.format(folder=folder)
    without = text.replace(f", adapter: '{folder}/legal'", "").replace(f", adapter: '{folder}/billing'", "")
    async with clustered(text) as cluster:
        await cluster.replace(without, None, ALL)
        assert (await say(cluster, "hello", "legal")).text.startswith("[stub:specialist] ")
        await cluster.replace(text, None, ALL)
        assert (await say(cluster, "hello", "legal")).text.startswith("[stub:specialist+")


async def test_adapters_of_a_standby_base_come_with_its_load(folder: Path) -> None:
    text = ROUTED.format(folder=folder).replace("id: legal,", "id: legal, tier: standby,")
    text = text.replace("id: billing,", "id: billing, tier: standby,").replace(
        "id: plain,", "id: plain, tier: standby,"
    )
    async with clustered(text) as cluster:
        assert states(cluster)["legal"][0] == "standby"
        assert (await say(cluster, "a contract")).text.startswith("[stub:specialist+")


async def test_adapters_are_added_to_a_manifest_at_runtime(folder: Path) -> None:
    async with clustered(ROUTED.format(folder=folder)) as cluster:
        await cluster.adapters.load("third", str(folder / "third"), ALL)
        assert (await say(cluster, "hello", "third")).text.startswith("[stub:specialist+")
        assert parse(cluster.manifest_text()).entry("third").adapter == str(folder / "third")
        for name, base, error in (
            ("fourth", "router", InvalidParameterError),  # has no room for adapters
            ("fourth", "unknown", ModelNotFoundError),
            ("plain", None, InvalidParameterError),
            ("two words", None, InvalidParameterError),
        ):
            with pytest.raises(error):
                await cluster.adapters.load(name, str(folder / "third"), ALL, base, replaces=True)
        with pytest.raises(InvalidParameterError, match="requires an admin's key"):
            await cluster.adapters.load("fourth", str(folder / "third"), NONE)
        await cluster.adapters.unload("third")
        with pytest.raises(InvalidParameterError, match="routing"):
            await cluster.adapters.unload("legal")
        with pytest.raises(ModelNotFoundError):
            await cluster.adapters.unload("plain")


@pytest.mark.parametrize("name", ["legal", "law"])
async def test_a_replaced_adapter_keeps_everything_else_of_its_entry(folder: Path, name: str) -> None:
    more = "aliases: [law], system_prompt: You know the law., sampling: {temperature: 0.5}"
    text = ROUTED.format(folder=folder).replace("{id: legal,", f"{{id: legal, {more},")
    async with clustered(text) as cluster:
        before = (await say(cluster, "a contract")).text
        await cluster.adapters.load(name, str(folder / "third"), ALL, replaces=True)
        expected = text.replace(f"{folder}/legal", f"{folder}/third")
        assert cluster.manifest_text() == dump(parse(expected))
        after = (await say(cluster, "a contract")).text
        assert after != before
        assert after == (await say(cluster, "a contract", "law")).text
        with pytest.raises(InvalidParameterError, match="routing"):
            await cluster.adapters.unload("legal")
        await cluster.adapters.load(name, str(folder / "legal"), ALL, "plain", replaces=True)
        assert cluster.manifest_text() == dump(parse(text))


async def test_two_bases_need_a_name(folder: Path) -> None:
    two = ROUTED.format(folder=folder).replace(
        "{id: plain, source: 'stub://specialist'}", f"{{id: plain, source: 'stub://other', adapter: '{folder}/third'}}"
    )
    async with clustered(two) as cluster:
        with pytest.raises(InvalidParameterError, match="base_model_name must be one of legal or plain"):
            await cluster.adapters.load("new", str(folder / "third"), ALL)
        await cluster.adapters.load("new", str(folder / "third"), ALL, "plain")
        assert (await say(cluster, "hello", "new")).text.startswith("[stub:other+")
        await cluster.adapters.load("new", str(folder / "legal"), ALL, replaces=True)  # of the same base
        assert (await say(cluster, "hello", "new")).text.startswith("[stub:other+")
        await eventually(lambda: states(cluster)["new"][0] == "resident")


# -- flags ------------------------------------------------------------------------------------------------------------


def test_several_values_may_follow_one_flag() -> None:
    words = ["serve", "--lora-modules", "a=1", "b=2", '{"name": "c"}', "--port", "1", "model", "--lora-modules", "d=4"]
    repeated = ["--lora-modules", "a=1", "--lora-modules", "b=2", "--lora-modules", '{"name": "c"}']
    assert separated(words) == ["serve", *repeated, "--port", "1", "model", "--lora-modules", "d=4"]
    assert separated(["serve", "--lora-modules", "a=1", "model"]) == ["serve", "--lora-modules", "a=1", "model"]


def test_modules_are_read_in_both_forms() -> None:
    found = adapters_of(["a=x/y=z", '{"name": "b", "path": "p", "base_model_name": "m"}'])
    assert [(each.name, each.path) for each in found] == [("a", "x/y=z"), ("b", "p")]
    assert adapters_of(None) == ()


@pytest.mark.parametrize("value", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "x", "pth": "y"}'])
def test_a_module_without_a_name_or_path_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="must be NAME=PATH"):
        adapters_of([value])


def test_an_adapter_for_another_model_is_refused() -> None:
    value = '{"name": "b", "path": "p", "base_model_name": "other"}'
    with pytest.raises(UsageError, match="'other'; this server's model is org/m or m"):
        adapters_of([value], ("org/m", "m"))
    assert len(adapters_of([value], ("m", "other"))) == 1


def test_a_name_has_one_adapter() -> None:
    with pytest.raises(UsageError, match="twice"):
        adapters_of(["a=1", "a=2"])
