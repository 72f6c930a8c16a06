"""What comes from the hub is what it describes, once, and from where it stopped."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from lockstep.artifacts.hub.download import MAX_ATTEMPTS, local_path, pull
from lockstep.artifacts.hub.source import HubSource, parse_hub_source
from lockstep.artifacts.source import open_artifact
from lockstep.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    CorruptArtifactError,
    DownloadError,
    HubUnreachableError,
    MissingTokenizerError,
    UnsupportedArtifactError,
)
from tests.artifacts.hub.stand_in import Repo, StandIn, hub_environment
from tools.random_models import write_gguf, write_huggingface

TINY = HubSource("acme/tiny")


def silent(name: str, have: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_huggingface(folder / "tiny", "tiny-llama", "BF16")
    write_huggingface(folder / "sharded", "tiny-llama", "BF16", num_shards=2)
    write_gguf(folder / "tiny.gguf", "tiny-llama", "Q8_0")
    return folder


def names(path: Path) -> list[str]:
    return sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if entry.is_file())


@pytest.fixture
def tiny(hub: StandIn, models: Path) -> Repo:
    return hub.add_directory("acme/tiny", models / "tiny")


def test_a_directory_opens_from_the_hub_and_then_without_it(hub: StandIn, tiny: Repo, tmp_path: Path) -> None:
    artifact = open_artifact("hf://acme/tiny", cache_dir=tmp_path / "cache")
    assert (artifact.name, artifact.source, artifact.format) == ("tiny", "hf://acme/tiny", "safetensors")
    asked = len(hub.requests)
    hub.status = 500
    again = open_artifact("acme/tiny", cache_dir=tmp_path / "cache")
    assert again.fingerprint == artifact.fingerprint
    assert len(hub.requests) == asked, "what is whole in the cache is used without asking"
    assert again.load_tokenizer().chat_template


def test_only_needed_files_are_downloaded(hub: StandIn, tiny: Repo, models: Path) -> None:
    junk = ("pytorch_model.bin", "onnx/model.onnx", "original/model.safetensors", "consolidated.safetensors", "a.md")
    tiny.files |= dict.fromkeys(junk, b"x")
    assert names(pull(TINY, silent)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    sharded = hub.add_directory("acme/sharded", models / "sharded")
    sharded.files["model.safetensors"] = b"x"
    path = pull(HubSource("acme/sharded"), silent)
    assert [name for name in names(path) if name.endswith(".safetensors")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_second_pull_downloads_nothing_and_a_new_commit_only_changed_files(hub: StandIn, tiny: Repo) -> None:
    first = pull(TINY, silent)
    sent, asked = hub.sent_bytes, len(hub.requests)
    assert pull(TINY, silent) == first
    assert (hub.sent_bytes, len(hub.requests)) == (sent, asked + 1)
    tiny.files["generation_config.json"] = b'{"temperature": 0.5}'
    assert local_path(TINY, silent) == first, "running a model does not change it"
    second = pull(TINY, silent)
    assert second != first
    assert hub.sent_bytes == sent
    assert local_path(TINY, silent) == second


def test_a_broken_connection_goes_on_where_it_stopped(hub: StandIn, tiny: Repo) -> None:
    hub.break_after_bytes = 70_000
    seen: list[tuple[str, int, int]] = []
    pull(TINY, lambda *told: seen.append(told), retry_wait_s=0.01)
    total = len(tiny.files["model.safetensors"])
    assert hub.store_requests[-1][1] is not None
    assert hub.sent_bytes < 1.5 * total
    assert seen[-1] == ("model.safetensors", total, total)


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_incomplete_download_of_an_earlier_process_is_completed(hub: StandIn, tiny: Repo, ignores_ranges: bool) -> None:
    data = tiny.files["model.safetensors"]
    path = pull(TINY, silent)
    blob = (path / "model.safetensors").resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    with open(blob.with_name(blob.name + ".incomplete"), "r+b") as partial:
        partial.truncate(len(data) - 1000)
    hub.sent_bytes, hub.ignores_ranges = 0, ignores_ranges
    assert (local_path(TINY, silent) / "model.safetensors").read_bytes() == data
    assert hub.sent_bytes == (len(data) if ignores_ranges else 1000)


def test_a_server_that_breaks_every_transfer_is_given_up(hub: StandIn, tiny: Repo) -> None:
    hub.breaks_always = True
    with pytest.raises(HubUnreachableError, match="cannot be reached"):
        pull(TINY, silent, retry_wait_s=0.01)
    assert len(hub.store_requests) == MAX_ATTEMPTS


def test_damage_on_the_way_is_noticed_and_thrown_away(hub: StandIn, tiny: Repo, tmp_path: Path) -> None:
    hub.damaged = {hashlib.sha256(tiny.files["model.safetensors"]).hexdigest()}
    with pytest.raises(CorruptArtifactError, match=r"model\.safetensors does not match the hub"):
        pull(TINY, silent)
    hub.damaged = set()
    assert (pull(TINY, silent) / "model.safetensors").read_bytes() == tiny.files["model.safetensors"]


def test_an_interrupted_update_leaves_the_old_revision_in_use(hub: StandIn, tiny: Repo) -> None:
    old = pull(TINY, silent)
    tiny.files["config.json"] = b"not json"
    with pytest.raises(CorruptArtifactError):
        pull(TINY, silent)
    assert local_path(TINY, silent) == old


def test_unsupported_model_is_rejected_before_its_weights_are_downloaded(hub: StandIn, tiny: Repo) -> None:
    tiny.files["config.json"] = b'{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}'
    with pytest.raises(UnsupportedArtifactError, match="Mamba"):
        pull(TINY, silent)
    assert hub.sent_bytes < 100_000
    assert all("model.safetensors" not in path for path, _ in hub.requests)


def test_a_token_goes_to_the_hub_and_never_to_the_store(
    hub: StandIn, tiny: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    pull(TINY, silent)
    assert {authorization for _, authorization in hub.requests} == {"Bearer secret"}
    assert {authorization for _, _, authorization in hub.store_requests} == {None}


def test_a_revision_is_its_own_model(hub: StandIn, tiny: Repo) -> None:
    tiny.others["refs/pr/1"] = {**tiny.files, "generation_config.json": b"{}"}
    path = pull(parse_hub_source("hf://acme/tiny@refs/pr/1"), silent)
    assert (path / "generation_config.json").read_bytes() == b"{}"
    assert path != pull(TINY, silent)
    hub.status = 500
    assert local_path(parse_hub_source(f"acme/tiny@{path.name}"), silent) == path


@pytest.mark.parametrize(
    ("file", "right"),
    [("tiny-Q8_0.gguf", True), ("q8_0", True), ("sub/other-Q4_K_M.gguf", True), ("Q4_K_M", True), ("Q4_K", False)],
)
def test_a_gguf_file_is_selected_by_path_or_quantisation(hub: StandIn, models: Path, file: str, right: bool) -> None:
    data = (models / "tiny.gguf").read_bytes()
    hub.repos["acme/q"] = Repo({"tiny-Q8_0.gguf": data, "sub/other-Q4_K_M.gguf": data, "mmproj-Q8_0.gguf": b"x"})
    source = HubSource("acme/q", file=file)
    if not right:
        with pytest.raises(ArtifactNotFoundError, match=r"no file 'Q4_K'; the repository has: .*other-Q4_K_M"):
            pull(source, silent)
        return
    path = pull(source, silent)
    assert path.name in ("tiny-Q8_0.gguf", "other-Q4_K_M.gguf")
    hub.status = 500
    assert local_path(source, silent) == path


def test_a_gguf_repository_needs_a_file_unless_it_has_one(hub: StandIn, models: Path, tmp_path: Path) -> None:
    data = (models / "tiny.gguf").read_bytes()
    repo = hub.repos["acme/q"] = Repo({"tiny-Q8_0.gguf": data, "README.md": b"x"})
    assert open_artifact("hf://acme/q", cache_dir=tmp_path / "cache").name == "tiny-Q8_0"
    repo.files["tiny-F16.gguf"] = data
    with pytest.raises(
        ArtifactNotFoundError, match=r"2 GGUF files; add one with '#': tiny-F16\.gguf \([\d.]+ kB\), ti"
    ):
        local_path(HubSource("acme/q"), silent)
    hub.status = 503
    assert local_path(HubSource("acme/q"), silent).name == "tiny-Q8_0.gguf", "without the hub, the one that is there"


REFUSALS: list[tuple[str, Repo, type[ArtifactError], str]] = [
    ("hf://acme/absent", Repo({}), ArtifactNotFoundError, "has no such model, or it is private and HF_TOKEN is not"),
    ("hf://acme/x@v9", Repo({}), ArtifactNotFoundError, "no revision 'v9'"),
    ("hf://acme/x", Repo({}, token="t", gated=True), DownloadError, "gated: http.*/acme/x requires approval.*HF_TOKEN"),
    ("hf://acme/x", Repo({"a.bin": b""}), ArtifactNotFoundError, "has no model.*a.bin is a pickle"),
    ("hf://acme/x", Repo({"adapter_config.json": b""}), UnsupportedArtifactError, "an adapter"),
    ("hf://acme/x", Repo({"config.json": b"", "m.safetensors": b""}), MissingTokenizerError, "no tokenizer.json"),
    ("hf://acme/x#a.gguf", Repo({"config.json": b""}), ArtifactNotFoundError, "no .gguf file; omit '#'"),
    ("hf://acme/x#config.json", Repo({"config.json": b""}), ArtifactNotFoundError, "is not a GGUF file"),
    ("hf://acme/x#Q8", Repo({"a-Q8.gguf": b"", "b-Q8.gguf": b""}), ArtifactNotFoundError, "#Q8 matches 2 files"),
    ("hf://acme/x", Repo({"a-00001-of-00002.gguf": b""}), UnsupportedArtifactError, "one part of a split GGUF"),
    ("hf://nobody", Repo({}), ArtifactNotFoundError, "hf://org/name"),
    ("hf://a/../b", Repo({}), ArtifactNotFoundError, "hf://org/name"),
    ("hf://acme/x@../../y", Repo({}), ArtifactNotFoundError, "hf://org/name"),
]


@pytest.mark.parametrize(("source", "repo", "error", "message"), REFUSALS)
def test_an_unusable_repository_raises_a_one_line_error_that_starts_with_the_source(
    hub: StandIn, tmp_path: Path, source: str, repo: Repo, error: type[ArtifactError], message: str
) -> None:
    hub.repos["acme/x"] = repo
    with pytest.raises(error, match=message) as caught:
        open_artifact(source, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(source)


@pytest.mark.parametrize(("token", "message"), [("expired", r"rejected the token \(401\)"), ("other", "no access yet")])
def test_an_invalid_token_and_missing_access_raise_different_errors(
    hub: StandIn, tiny: Repo, monkeypatch: pytest.MonkeyPatch, token: str, message: str
) -> None:
    tiny.token, tiny.gated = "right", True
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadError, match=message):
        pull(TINY, silent)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_failing_hub_is_not_retried(hub: StandIn, tiny: Repo, status: int) -> None:
    hub.status = status
    with pytest.raises(HubUnreachableError, match=str(status)):
        local_path(TINY, silent)
    assert len(hub.requests) == 1


def test_an_unreachable_or_offline_hub_raises_an_error_that_names_the_variable(hub: StandIn) -> None:
    with hub_environment(HF_ENDPOINT="http://127.0.0.1:9"):
        with pytest.raises(HubUnreachableError, match=r"cannot be reached .*HF_ENDPOINT"):
            local_path(TINY, silent)
        with (
            hub_environment(HF_HUB_OFFLINE="1"),
            pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE is set"),
        ):
            local_path(TINY, silent)


def test_a_full_disk_is_rejected_before_the_download_starts(hub: StandIn, tiny: Repo) -> None:
    tiny.claimed_bytes = 1 << 60
    with pytest.raises(DownloadError, match=r"are needed, but the disk of .* has only \S+ \wB free"):
        pull(TINY, silent)
    assert hub.sent_bytes == 0


def test_a_mistyped_path_is_not_taken_for_a_model_of_the_hub(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for source in ("models/tinny", "elsewhere/tiny.gguf"):
        with pytest.raises(ArtifactNotFoundError, match="no such file or directory"):
            open_artifact(source, cache_dir=tmp_path)
    assert hub.requests == []
