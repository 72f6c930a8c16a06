"""What a user writes is opened, or refused with what was found and what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.artifacts.source import open_artifact
from lockstep.errors import ArtifactError, ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from tools.random_adapters import write_gguf_adapter, write_peft
from tools.random_models import write_gguf, write_huggingface
from tools.random_shapes import SHAPES


def test_the_fingerprint_is_the_contents_and_not_the_paths(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf", "tiny-llama")
    other = tmp_path / "other.gguf"
    other.write_bytes(one.read_bytes())
    first, second = (open_artifact(str(path), cache_dir=tmp_path / "cache") for path in (one, other))
    assert first.fingerprint == second.fingerprint
    assert len(first.fingerprint) == 32
    assert (first.name, second.name, first.source) == ("one", "other", str(one))


def test_a_gguf_file_is_known_by_its_content_too(tmp_path: Path) -> None:
    assert open_artifact(str(write_gguf(tmp_path / "blob", "tiny-llama")), cache_dir=tmp_path).format == "gguf"


def test_a_source_with_adapters_is_another_model(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf", "tiny-llama")
    one, two = (write_peft(tmp_path / name, SHAPES["tiny-llama"], 4, seed=seed) for seed, name in enumerate("ab"))
    sources = (str(base), f"{base}+lora={one}", f"{base}+lora={two}", f"{base}+lora={one}+lora={two}")
    opened = [open_artifact(source, cache_dir=tmp_path / "cache") for source in sources]
    assert [each.name for each in opened] == ["base", "base+a", "base+b", "base+a+b"]
    assert [[adapter.name for adapter in each.adapters] for each in opened] == [[], ["a"], ["b"], ["a", "b"]]
    assert tuple(each.source for each in opened) == sources
    fingerprints = {each.fingerprint for each in opened}
    assert [len(each) for each in fingerprints] == [32] * 4
    assert open_artifact(f"{base}+lora={two}+lora={one}", cache_dir=tmp_path).fingerprint not in fingerprints
    one.rename(tmp_path / "moved")
    again = open_artifact(f"{base}+lora={tmp_path / 'moved'}", cache_dir=tmp_path)
    assert again.fingerprint == opened[1].fingerprint


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "m.gguf", "tiny-llama")
    assert open_artifact("~/m.gguf", cache_dir=tmp_path / "cache").path == tmp_path / "m.gguf"


def test_a_mistyped_name_suggests_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m.gguf").touch()
    (tmp_path / "unrelated").touch()
    with pytest.raises(ArtifactNotFoundError, match=r"did you mean smollm2-135m\.gguf\?; a model is a \.gguf file"):
        open_artifact(str(tmp_path / "smolm2-135m.gguf"), cache_dir=tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match=r"the directory '.*absent' does not exist either"):
        open_artifact(str(tmp_path / "absent" / "m.gguf"), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ([], ArtifactNotFoundError, "the directory has no config.json, but nothing; a model is"),
        (["notes.txt"], ArtifactNotFoundError, "the directory has no config.json, but notes.txt"),
        (["b.gguf", "a.gguf"], ArtifactNotFoundError, "specify one of them: a.gguf, b.gguf"),
        ([f"{i}.txt" for i in range(9)], ArtifactNotFoundError, "7.txt, …"),
        (
            ["openvino_model.xml"],
            ArtifactNotFoundError,
            "has no config.json, but openvino_model.xml; a model is",
        ),
    ],
)
def test_a_directory_without_a_model_is_rejected_with_a_list_of_its_files(
    files: list[str], error: type[ArtifactError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    for name in files:
        (tmp_path / "d" / name).touch()
    with pytest.raises(error, match=message):
        open_artifact(str(tmp_path / "d"), cache_dir=tmp_path)


def test_a_part_of_a_huggingface_model_points_to_its_directory(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path / "m", "tiny-llama", "F16")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ArtifactNotFoundError, match="specify its directory"):
            open_artifact(str(path / name), cache_dir=tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "peft", SHAPES["tiny-llama"], 2)
    file = write_gguf_adapter(tmp_path / "a.gguf", SHAPES["tiny-llama"], 2)
    for path, error in ((folder, ArtifactNotFoundError), (file, UnsupportedArtifactError)):
        with pytest.raises(error, match="a LoRA adapter, not a model"):
            open_artifact(str(path), cache_dir=tmp_path)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ArtifactNotFoundError, match="a file that is not GGUF"):
        open_artifact(str(tmp_path / "m.bin"), cache_dir=tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 10)
    with pytest.raises(CorruptArtifactError, match="is no GGUF file"):
        open_artifact(str(tmp_path / "m.gguf"), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("hf://name", ArtifactNotFoundError, "the name of a model on the hub is hf://org/name"),
        ("stub://router", ArtifactNotFoundError, "a stub is a fake model"),
        ("pocket://other", ArtifactNotFoundError, "the embedded model is called pocket://"),
        ("s3://bucket/key", ArtifactNotFoundError, "unknown scheme 's3'"),
        ("pocket://+lora=none", ArtifactNotFoundError, "an adapter is a PEFT directory"),
        ("pocket://+lora=", ArtifactNotFoundError, "a PEFT directory is expected"),
        ("stub://router+lora=none", ArtifactNotFoundError, "a stub is a fake model"),
        ("", ArtifactNotFoundError, "no config.json"),
        ("a\0b", ArtifactNotFoundError, "a model is"),
        ("x" * 5000, ArtifactNotFoundError, "too long"),
        ("~nobody-of-this-name/m.gguf", ArtifactNotFoundError, "home directory"),
    ],
)
def test_other_sources_are_refused_in_one_line(
    source: str, error: type[ArtifactError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as caught:
        open_artifact(source, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_the_embedded_model_opens(tmp_path: Path) -> None:
    artifact = open_artifact("pocket://", cache_dir=tmp_path)
    assert (artifact.name, artifact.source, artifact.config.architecture) == ("pocket", "pocket://", "llama")
    assert artifact.num_bytes <= 8 << 20
    parts = artifact.load_tokenizer()
    assert parts.chat_template
    assert parts.end_token_ids


def test_an_installation_without_the_embedded_model_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.pocket.pocket_path", lambda: tmp_path / "pocket.gguf")
    with pytest.raises(ArtifactNotFoundError, match="no embedded model"):
        open_artifact("pocket://", cache_dir=tmp_path)


def test_opening_needs_neither_the_tokenizer_library_nor_the_gguf_one(tmp_path: Path) -> None:
    """They are loaded when text is first read; opening stays quick."""
    path = write_gguf(tmp_path / "m.gguf", "tiny-llama")
    script = (
        "import sys; from lockstep.artifacts.source import open_artifact\n"
        f"open_artifact({str(path)!r}, cache_dir=__import__('pathlib').Path({str(tmp_path)!r}))\n"
        "print(sorted({'tokenizers', 'gguf', 'safetensors', 'platformdirs', 'huggingface_hub'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
