"""Whatever bytes are on disk, opening them ends well or in an ArtifactError; nothing else, and nothing slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactError
from tools.random_hybrids import DeltaShape
from tools.random_models import Shape, write_gguf, write_huggingface

SHAPE = Shape(
    num_layers=1, hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=300
)
HYBRIDS = (
    replace(
        SHAPE, architecture="qwen35", num_layers=2, mixers=("delta_net", "attention"),
        delta_net=DeltaShape(1, 2, 32, 32, 4),
    ),
    replace(SHAPE, architecture="lfm2", num_layers=2, mixers=("convolution", "attention"), conv_taps=3),
)  # fmt: skip
FUZZ = settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf", SHAPE, "Q8_0")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_huggingface(tmp_path_factory.mktemp("fuzz") / "m", SHAPE, "BF16", num_shards=2)


def use(source: Path) -> None:
    """Everything that is later asked of an artifact."""
    try:
        artifact = open_artifact(str(source), cache_dir=source.parent / "cache")
        for name in artifact.weights.names():
            tensor = artifact.weights[name]
            assert dequantise(tensor).shape == tensor.shape
        parts = artifact.load_tokenizer()
        ids = parts.tokenizer.encode("Hello <|im_end|>, the world!").ids
        assert all(0 <= index < artifact.config.vocab_size for index in [*ids, *parts.end_token_ids])
        parts.tokenizer.decode(ids)
    except ArtifactError:
        pass


def edited(content: bytes, edits: list[tuple[float, int]], length: int) -> bytes:
    """Overwrite bytes at positions given as a part of the first ``length`` bytes."""
    changed = bytearray(content)
    for position, value in edits:
        changed[int(position * length)] = value
    return bytes(changed)


@FUZZ
@given(edits=EDITS)
def test_edited_gguf_headers(edits: list[tuple[float, int]], original: Path, tmp_path: Path) -> None:
    """The metadata before the vocabulary, where every byte is a length, a type or a size."""
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(original.read_bytes(), edits, 1100))
    use(path)


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda shape: shape.architecture)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    return write_gguf(folder / "m.gguf", request.param, "Q8_0"), write_huggingface(folder / "m", request.param, "BF16")


@settings(FUZZ, max_examples=120)
@given(edits=EDITS)
def test_edited_headers_of_hybrids(edits: list[tuple[float, int]], hybrid: tuple[Path, Path], tmp_path: Path) -> None:
    """Metadata of GGUF, and of safetensors with the configuration."""
    gguf, directory = hybrid
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(gguf.read_bytes(), edits, 1800))
    use(path)
    for name in ("config.json", "model.safetensors"):
        content = (directory / name).read_bytes()
        try:
            (directory / name).write_bytes(edited(content, edits, min(len(content), 3000)))
            use(directory)
        finally:
            (directory / name).write_bytes(content)


@settings(FUZZ, max_examples=40)
@given(part=st.floats(0, 1))
def test_cut_files_of_hybrids(part: float, hybrid: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content = hybrid[0].read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    use(path)


@FUZZ
@given(edits=EDITS)
def test_edited_gguf_files(edits: list[tuple[float, int]], original: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(original.read_bytes(), edits, 16_000))
    use(path)


@settings(FUZZ, max_examples=100)
@given(part=st.floats(0, 1))
def test_cut_gguf_files(part: float, original: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content = original.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    use(path)


@settings(FUZZ, max_examples=200)
@given(content=st.binary(max_size=200))
def test_bytes_of_any_kind(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + content)
    use(path)


FILES = (
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.mark.parametrize("name", FILES)
@settings(FUZZ, max_examples=60)
@given(edits=EDITS)
def test_edited_huggingface_files(name: str, edits: list[tuple[float, int]], directory: Path) -> None:
    path = directory / name
    content = path.read_bytes()
    try:
        path.write_bytes(edited(content, edits, min(len(content), 3000)))
        use(directory)
    finally:
        path.write_bytes(content)
