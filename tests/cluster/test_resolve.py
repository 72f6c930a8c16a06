"""From sources to replicas: what is one artifact, and what it will take."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.artifacts.model import Encoding
from lockstep.artifacts.source import open_artifact
from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.resolve import (
    DEFAULT_KV_BYTES,
    STUB_BLOCKS,
    OpenedManifest,
    OpenedSource,
    local_part,
    open_manifest,
)
from lockstep.engine.options import LoadOptions
from lockstep.errors import ArtifactNotFoundError
from lockstep.pocket import pocket_path
from tests.adapter_files import write_pocket_adapter
from tests.artifacts.hub.stand_in import hub_environment
from tests.cluster.clusters import clustered, say
from tools.random_models import write_gguf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COUNTS = {
    # models, resident, standby, bytes of what is resident at boot
    "customer-support": (5, 3, 1, 2_400_000_000),
    "density-50": (51, 26, 25, 20_800_000_000),
    "warming-heavy": (9, 1, 8, 800_000_000),
}


def opened(text: str, backend: Backend = Backend.AUTO) -> OpenedManifest:
    return open_manifest(served_by(parse(text), backend), LoadOptions())


def test_equal_artifacts_share_a_replica_regardless_of_path(tmp_path: Path) -> None:
    copies = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for copy in copies:
        shutil.copyfile(pocket_path(), copy)
    text = "cluster: twins\nmodels:\n  extra:\n" + "".join(
        f"    - {{id: {id_}, source: '{source}'{more}}}\n"
        for id_, source, more in (
            ("a", copies[0], ""),
            ("b", copies[1], ", system_prompt: hello, sampling: {temperature: 0}"),
            ("c", copies[1], ", engine: {max_model_len: 128}"),
            ("d", copies[1], ", chat_template: '{{ messages[0].content }}'"),
        )
    )
    specs = opened(text).specs
    keys = [specs[id_].key for id_ in "abcd"]
    assert keys[0] == keys[1], "a persona is no other artifact"
    assert len(set(keys)) == 3, "other limits of the engine are another engine, and another text side"
    assert specs["c"].options.engine.max_model_len == 128
    assert specs["d"].options.chat_template == specs["d"].tokenizer().chat_template == "{{ messages[0].content }}"
    assert specs["a"].options.engine.order == "priority"
    assert specs["a"].tokenizer().encode("hello")


async def test_a_merged_adapter_is_a_model_with_its_own_replica(tmp_path: Path) -> None:
    """It has no name of its own beside the model's, and needs the memory of its base. Another content is another
    replica."""
    adapter = write_pocket_adapter(tmp_path / "billing", 1)
    text = f"cluster: c\nmodels: {{plain: {{source: 'pocket://'}}, billing: {{source: 'pocket://+lora={adapter}'}}}}"
    manifest = opened(text)
    plain, billing = (manifest.specs[id_] for id_ in ("plain", "billing"))
    assert plain.key != billing.key
    assert not billing.options.has_adapters
    assert len({need.footprint for need in manifest.needs}) == 1
    async with clustered(text) as cluster:
        for name in ("plain", "billing"):
            assert (await say(cluster, "hello there", name)).output.num_output_tokens
        [_, card] = cluster.cards()
        assert (card.root, card.parent, card.adapter) == (f"pocket://+lora={adapter}", None, None)
    write_pocket_adapter(tmp_path / "billing", 2)
    assert opened(text).specs["billing"].key != billing.key


def test_sources_that_need_a_download_are_left_out(tmp_path: Path) -> None:
    """Beside paths that are nowhere, and users that nobody is: those are faults, and no hub would help."""
    sources = (
        "hf://org/name+lora=a",
        "org/name",
        "pocket://",
        "stub://s",
        "no/such.gguf",
        "~nobody-at-all/m",
        "a" * 5000,
    )
    models = "".join(f"  m{number}: {{source: '{source}'}}\n" for number, source in enumerate(sources))
    manifest = parse(f"cluster: c\nmodels:\n{models}fallback: {{remote: {{base_url: 'http://a.example'}}}}\n")
    with hub_environment(HF_HUB_CACHE=str(tmp_path)):
        assert [entry.source for entry in local_part(manifest).entries] == [*sources[2:], "http://a.example"]


async def test_a_cluster_that_must_fetch_makes_sure_of_the_rest(tmp_path: Path) -> None:
    text = "cluster: c\nmodels:\n  far: {source: 'hf://org/name'}\n  near: {source: 'no/such.gguf'}\n"
    with hub_environment(HF_HUB_CACHE=str(tmp_path)):
        with pytest.raises(ArtifactNotFoundError, match=r"no/such\.gguf"):
            await Cluster(parse(text)).prepare()
        await Cluster(parse(text.replace("no/such.gguf", "pocket://"))).prepare()


def test_pools_share_the_budget_for_kv() -> None:
    text = "cluster: c\nresources: {kv_budget: 60MB, host_kv_budget: 20MB}\nmodels:\n" + "".join(
        f"  {id_}: {{source: '{source}'}}\n" for id_, source in (("a", "pocket://"), ("b", "stub://b"))
    )
    engine = opened(text).specs["a"].options.engine
    assert (engine.kv_cache_memory_bytes, engine.host_kv_memory_bytes) == (30_000_000, 5_000_000), (
        "the other half is for sessions"
    )
    assert opened(text).specs["b"].options.engine.num_blocks == STUB_BLOCKS


def test_weights_that_grow_when_they_are_packed_are_predicted_so(tmp_path: Path) -> None:
    """Three bits of a Q3_K are four when it is loaded."""
    path = write_gguf(tmp_path / "small.gguf", "small-llama", "Q3_K")
    artifact = open_artifact(str(path), cache_dir=tmp_path)
    growth = artifact.bytes_by_encoding[Encoding.Q3_K] * 36 / 110
    opened_source = OpenedSource.open(str(path), LoadOptions(cache_dir=tmp_path))
    assert opened_source.file_bytes == path.stat().st_size + round(growth)


def test_a_single_replica_without_a_budget_sizes_its_kv_when_it_loads() -> None:
    """Also for several models that share it; its pool is not known before, and nothing is cut to the machine."""
    alone = "cluster: c\nmodels:\n  a: {source: 'pocket://'}\n"
    for text in (alone, alone + "  b: {source: 'pocket://', system_prompt: hello}\n"):
        engine = opened(text).specs["a"].options.engine
        assert (engine.kv_cache_memory_bytes, engine.host_kv_memory_bytes, engine.num_blocks) == (None, None, None)
        assert opened(text).table.budgets.gpu.effective_bytes is None
    for text in (
        alone + "  b: {source: 'stub://b'}\n",
        alone + "  b: {source: 'pocket://', engine: {max_num_seqs: 4}}\n",
        alone + "resources: {gpu_budget: 1GB}\n",
    ):
        assert opened(text).specs["a"].options.engine.kv_cache_memory_bytes == DEFAULT_KV_BYTES
        assert opened(text).table.budgets.gpu.effective_bytes is not None


def test_a_missing_source_is_rejected() -> None:
    with pytest.raises(ArtifactNotFoundError, match="nowhere"):
        opened("cluster: c\nmodels:\n  m: {source: /nowhere.gguf}\n")


@pytest.mark.parametrize("name", COUNTS)
async def test_the_examples_boot_on_stubs(name: str) -> None:
    num_models, num_resident, num_standby, num_bytes = COUNTS[name]
    async with clustered((EXAMPLES / f"{name}.yaml").read_text(), "stub") as cluster:
        snapshot = cluster.snapshot()
        tiers = [model.tier for model in snapshot.models]
        assert (len(tiers), tiers.count("resident"), tiers.count("standby")) == (num_models, num_resident, num_standby)
        assert snapshot.budgets[0].used_bytes == num_bytes
        assert sum(model.state == "resident" for model in snapshot.models) == num_resident
        assert (await say(cluster, "I want a refund")).hops
