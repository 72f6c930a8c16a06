"""The cache shows what can be served, whoever put it there, and gives back what is deleted from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.artifacts.gguf import open_gguf, read_task
from lockstep.artifacts.hub.cache import CachedRepo, cached_models, find_cached, plan_removal, remove_leftovers
from lockstep.artifacts.hub.download import pull
from lockstep.artifacts.hub.source import HubSource, parse_hub_source
from lockstep.errors import ArtifactNotFoundError
from tests.artifacts.hub.stand_in import Repo, StandIn
from tools.random_encoders import ENCODERS, write_encoder_gguf
from tools.random_models import write_gguf, write_huggingface


def silent(name: str, have: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture
def filled(hub: StandIn, tmp_path: Path) -> StandIn:
    """A directory with two revisions, a repository of two GGUF files with the same content, and what is not served."""
    hub.add_directory("acme/tiny", write_huggingface(tmp_path / "tiny", "tiny-llama", "F16"))
    pull(HubSource("acme/tiny"), silent)
    hub.repos["acme/tiny"].files["generation_config.json"] = b"{}"
    pull(HubSource("acme/tiny"), silent)
    data = write_gguf(tmp_path / "t.gguf", "tiny-llama", "Q8_0").read_bytes()
    hub.repos["acme/q"] = Repo({"t-Q8_0.gguf": data, "t-Q4_0.gguf": data, "mmproj-t.gguf": b"x"})
    for quantisation in ("Q8_0", "Q4_0"):
        pull(HubSource("acme/q", file=quantisation), silent)
    foreign = CachedRepo.of("acme/bert").snapshot("0" * 40)
    foreign.mkdir(parents=True)
    (foreign / "config.json").write_text('{"architectures": ["BertModel"]}')
    return hub


def test_cached_models_are_listed_by_their_source_names(filled: StandIn) -> None:
    models = cached_models()
    assert [(model.source.partition("@")[0], model.format) for model in models] == [
        ("hf://acme/q#t-Q4_0.gguf", "gguf"),
        ("hf://acme/q#t-Q8_0.gguf", "gguf"),
        ("hf://acme/tiny", "safetensors"),
        ("hf://acme/tiny", "safetensors"),
    ]
    assert {model.revision for model in models} == {"main", models[-1].commit[:12]}
    for model in models:
        assert find_cached(parse_hub_source(model.source)) is not None


def test_cached_models_have_the_task_of_their_files(hub: StandIn, tmp_path: Path) -> None:
    decoder = write_gguf(tmp_path / "t.gguf", "tiny-llama", "Q8_0")
    embedder = write_encoder_gguf(
        tmp_path / "e.gguf", ENCODERS["bert"], extra=lambda writer: writer.add_uint32("bert.pooling_type", 1)
    )
    reranker = write_encoder_gguf(tmp_path / "r.gguf", ENCODERS["xlm-roberta-classifier"])
    content = decoder.read_bytes()
    files = {
        "decoder.gguf": (content, "generate"),
        "embedder.gguf": (embedder.read_bytes(), "embed"),
        "reranker.gguf": (reranker.read_bytes(), "rerank"),
        "damaged.gguf": (content[:1_000], None),
        "unsupported.gguf": (content.replace(b"llama", b"mamba"), None),
    }
    hub.repos["acme/q"] = Repo({name: data for name, (data, _) in files.items()})
    for name in files:
        pull(HubSource("acme/q", file=name), silent)
    assert {model.source: model.task for model in cached_models()} == {
        f"hf://acme/q#{name}": task for name, (_, task) in files.items()
    }
    assert read_task(decoder) == open_gguf(decoder, str(decoder), tmp_path / "cache").task


def test_removing_a_repository_leaves_nothing_of_it(filled: StandIn) -> None:
    source = HubSource("acme/tiny")
    path = CachedRepo.of(source.repo).path
    (path / "blobs" / "0123.incomplete").write_bytes(b"x" * 100)
    strategy = plan_removal(source)
    strategy.execute()
    remove_leftovers(source)
    assert not path.exists()
    assert {model.format for model in cached_models()} == {"gguf"}


def test_removing_a_revision_keeps_files_of_the_other(filled: StandIn) -> None:
    old = next(model for model in cached_models() if model.revision != "main" and model.format == "safetensors")
    strategy = plan_removal(parse_hub_source(old.source))
    assert strategy.expected_freed_size < 1000
    strategy.execute()
    assert remove_leftovers(HubSource("acme/tiny")) == 0
    assert find_cached(HubSource("acme/tiny")) is not None
    assert find_cached(parse_hub_source(old.source)) is None


def test_removing_one_file_keeps_a_content_that_another_name_needs(filled: StandIn) -> None:
    strategy = plan_removal(HubSource("acme/q", file="Q4_0"))
    assert strategy.expected_freed_size == 0
    strategy.execute()
    remaining = find_cached(HubSource("acme/q", file="Q8_0"))
    assert remaining is not None
    assert remaining.is_file()
    assert find_cached(HubSource("acme/q", file="Q4_0")) is None


@pytest.mark.parametrize("source", ["acme/none", "acme/tiny@v9", "acme/q#Q2_K", "acme/tiny#a.gguf"])
def test_removing_an_uncached_model_fails(filled: StandIn, source: str) -> None:
    with pytest.raises(ArtifactNotFoundError, match="the cache"):
        plan_removal(parse_hub_source(source))


def test_an_empty_cache_is_no_error(hub: StandIn) -> None:
    assert cached_models() == []
    with pytest.raises(ArtifactNotFoundError, match="lockstep list"):
        plan_removal(HubSource("acme/tiny"))
