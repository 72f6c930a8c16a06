"""LoRA adapters on disk: PEFT directories and GGUF files, and the refusal of what does not fit the base model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.adapter import MERGED_ENCODINGS, merged, open_adapter
from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.model import Adapter, Artifact, Encoding
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ArtifactError, ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from tools.random_adapters import MODULES, adapter_matrices, write_gguf_adapter, write_peft
from tools.random_models import SHAPES, as_float, write_gguf, write_huggingface, write_safetensors

TINY = SHAPES["tiny-llama"]
FILES = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("base")
    return open_artifact(str(write_gguf(folder / "base.gguf", TINY, "F32")), cache_dir=folder)


def opened(path: Path, base: Artifact) -> Adapter:
    return open_adapter(path, base, cache_dir=path.parent / "cache")


def numbers(adapter: Adapter) -> dict[str, tuple[Any, Any, float]]:
    return {name: (dequantise(a), dequantise(b), scale) for name, (a, b, scale) in adapter.targets.items()}


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_peft_and_gguf_give_the_same_adapter(tmp_path: Path, base: Artifact, encoding: str) -> None:
    peft = opened(write_peft(tmp_path / "billing", TINY, 8, encoding), base)
    gguf = opened(write_gguf_adapter(tmp_path / "billing.gguf", TINY, 8, encoding), base)
    assert (peft.name, gguf.name) == ("billing", "billing")
    for adapter in (peft, gguf):
        assert (adapter.rank, adapter.scale, adapter.invocation_ids) == (8, 2.0, ())
        assert adapter.num_bytes == sum(2 * (a.size + b.size) for a, b in adapter_matrices(TINY, 8).values())
    assert len(peft.targets) == 7 * TINY.num_layers
    found, expected = numbers(gguf), numbers(peft)
    assert list(found) == list(expected)
    for name in expected:
        for one, other in zip(found[name], expected[name], strict=True):
            assert np.array_equal(one, other), name


def test_fingerprint_depends_on_content_and_not_on_the_path(tmp_path: Path, base: Artifact) -> None:
    first, same, other = (
        opened(write_peft(tmp_path / name, TINY, 4, seed=seed), base).fingerprint
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == same != other
    assert len(first) == 32


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny-")])
def test_adapters_of_all_architectures(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    model = open_artifact(str(write_huggingface(tmp_path / "base", shape, "BF16")), cache_dir=tmp_path)
    adapter = opened(write_peft(tmp_path / "peft", shape, 4), model)
    assert {"q_proj", "down_proj"} <= {each.split(".")[-2] for each in adapter.targets}
    assert all(model.weights[each].shape == (b.shape[0], a.shape[1]) for each, (a, b, _) in adapter.targets.items())
    if "linear_attn" in " ".join(adapter.targets):
        with pytest.raises(UnsupportedArtifactError, match="order"):
            opened(write_gguf_adapter(tmp_path / "adapter.gguf", shape, 4), model)
    elif name != "tiny-lfm3" and not ARCHITECTURES[shape.architecture].has_shared_mlp:  # no GGUF, or split there
        gguf = opened(write_gguf_adapter(tmp_path / "adapter.gguf", shape, 4), model)
        assert all(
            np.array_equal(dequantise(gguf.targets[each].b), dequantise(b))
            for each, (_, b, _) in adapter.targets.items()
        )


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 4}, 0.5),
        ({"use_rslora": True}, 16 / np.sqrt(8)),
        ({"alpha_pattern": {"q_proj": 4}}, 2.0),
        ({"init_lora_weights": "gaussian", "layers_to_transform": None, "future_setting": False}, 2.0),
    ],
)
def test_scales(tmp_path: Path, base: Artifact, settings: dict[str, object], scale: float) -> None:
    adapter = opened(write_peft(tmp_path / "adapter", TINY, 8, settings=settings), base)
    assert adapter.scale == scale
    for name, target in adapter.targets.items():
        assert target.scale == (0.5 if "alpha_pattern" in settings and "q_proj" in name else scale)


def test_ranks_by_pattern(tmp_path: Path, base: Artifact) -> None:
    directory = write_peft(tmp_path / "adapter", TINY, 8, settings={"rank_pattern": {"layers.1.mlp.up_proj": 4}})
    stored: dict[str, Any] = {}
    for name, (a, b) in adapter_matrices(TINY, 8).items():
        short = name == "model.layers.1.mlp.up_proj.weight"
        module = f"base_model.model.{name.removesuffix('.weight')}"
        stored |= {
            f"{module}.lora_A.weight": a[: 4 if short else 8],
            f"{module}.lora_B.weight": b[:, : 4 if short else 8],
        }
    write_safetensors(directory / FILES[1], stored)
    adapter = opened(directory, base)
    assert adapter.targets["model.layers.1.mlp.up_proj.weight"].a.shape[0] == 4
    assert adapter.targets["model.layers.1.mlp.up_proj.weight"].scale == 16 / 4
    assert adapter.targets["model.layers.0.mlp.up_proj.weight"].scale == 2.0


def test_invocation_tokens(tmp_path: Path, base: Artifact) -> None:
    settings = {"alora_invocation_tokens": [5, 6, 7]}
    assert opened(write_peft(tmp_path / "a", TINY, 8, settings=settings), base).invocation_ids == (5, 6, 7)
    path = write_gguf_adapter(tmp_path / "a.gguf", TINY, 8, invocation_ids=(5, 6, 7))
    assert opened(path, base).invocation_ids == (5, 6, 7)


REFUSED_SETTINGS: dict[str, object] = {
    "peft_type": "IA3",
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [1],
    "target_parameters": ["experts.weight"],
    "init_lora_weights": "pissa",
    "rank_pattern": {".*q_proj": 4},
    "future_setting": {"depth": 2},
}


@pytest.mark.parametrize("key", REFUSED_SETTINGS)
def test_other_kinds_are_refused_by_name(tmp_path: Path, base: Artifact, key: str) -> None:
    directory = write_peft(tmp_path / "adapter", TINY, 8, settings={key: REFUSED_SETTINGS[key]})
    with pytest.raises(UnsupportedArtifactError, match=key):
        opened(directory, base)


INVALID_SETTINGS: list[tuple[str, object]] = [
    ("r", 0), ("r", 513), ("r", "8"), ("r", True), ("r", 4), ("r", 1 << 70), ("lora_alpha", "16"), ("lora_alpha", True),
    ("use_rslora", 1), ("rank_pattern", {"q_proj": 0}), ("rank_pattern", []), ("alpha_pattern", {"q_proj": "a"}),
    ("alora_invocation_tokens", [1, -1]), ("alora_invocation_tokens", "abc"), ("alora_invocation_tokens", [True]),
    ("alora_invocation_tokens", [512]), ("alora_invocation_tokens", [1] * 1025), ("peft_type", 7),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), INVALID_SETTINGS)
def test_invalid_settings_are_refused(tmp_path: Path, base: Artifact, key: str, value: object) -> None:
    directory = write_peft(tmp_path / "adapter", TINY, 8, settings={key: value})
    with pytest.raises(CorruptArtifactError):
        opened(directory, base)


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        stored: dict[str, Any] = {}
        for name, (a, b) in adapter_matrices(TINY, 8).items():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            stored |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        change(stored)
        write_safetensors(directory / FILES[1], stored)

    return write


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
HALF = np.float16


def _without_b(stored: dict[str, Any]) -> None:
    del stored[f"{QUERY}.lora_B.weight"]


def _with(name: str, shape: tuple[int, ...], value: float = 0.0) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        stored[name] = np.full(shape, value, HALF)

    return change


def _embedding(stored: dict[str, Any]) -> None:
    stored["base_model.model.lm_head.lora_A.weight"] = np.zeros((8, 128), HALF)
    stored["base_model.model.lm_head.lora_B.weight"] = np.zeros((512, 8), HALF)


def _more_layers(stored: dict[str, Any]) -> None:
    for part in "AB":
        name = f"{QUERY}.lora_{part}.weight"
        stored[name.replace("layers.0", "layers.2")] = stored[name]


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], type[ArtifactError], str]] = {
    "no B": (_without_b, CorruptArtifactError, "lora_b"),
    "no tensors": (dict.clear, CorruptArtifactError, "no tensors"),
    "a wrong rank of A": (_with(f"{QUERY}.lora_A.weight", (7, 128)), CorruptArtifactError, "rank"),
    "a wrong rank of B": (_with(f"{QUERY}.lora_B.weight", (128, 9)), CorruptArtifactError, "rank"),
    "other columns": (_with(f"{QUERY}.lora_A.weight", (8, 96)), CorruptArtifactError, "shape"),
    "other features": (_with(f"{QUERY}.lora_B.weight", (96, 8)), CorruptArtifactError, "shape"),
    "a vector": (_with(f"{QUERY}.lora_B.weight", (1024,)), CorruptArtifactError, "matrix"),
    "infinity in A": (_with(f"{QUERY}.lora_A.weight", (8, 128), np.inf), CorruptArtifactError, "infinity"),
    "NaN in B": (_with(f"{QUERY}.lora_B.weight", (128, 8), np.nan), CorruptArtifactError, "NaN"),
    "DoRA": (_with(f"{QUERY}.lora_magnitude_vector", (128,)), CorruptArtifactError, "magnitude"),
    "a whole module": (_with("base_model.model.model.norm.weight", (128,)), CorruptArtifactError, "model.norm"),
    "the head": (_embedding, UnsupportedArtifactError, "lm_head"),
    "more layers": (_more_layers, UnsupportedArtifactError, r"layers\.2"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tensors_are_refused(tmp_path: Path, base: Artifact, name: str) -> None:
    change, error, reason = HOSTILE[name]
    directory = write_peft(tmp_path / "adapter", TINY, 8)
    _changed(change)(directory)
    with pytest.raises(error, match=reason):
        opened(directory, base)


def test_infinity_in_bfloat16_is_found(tmp_path: Path, base: Artifact) -> None:
    def change(stored: dict[str, Any]) -> None:
        stored[f"{QUERY}.lora_A.weight"] = as_float(np.full((8, 128), np.inf, np.float32), "BF16")

    directory = write_peft(tmp_path / "adapter", TINY, 8)
    _changed(change)(directory)
    with pytest.raises(CorruptArtifactError, match="infinity"):
        opened(directory, base)


def test_truncated_files_are_refused_at_every_length(tmp_path: Path, base: Artifact) -> None:
    directory = write_peft(tmp_path / "adapter", TINY, 4, modules=("q_proj",))
    gguf = write_gguf_adapter(tmp_path / "adapter.gguf", TINY, 4, modules=("q_proj",))
    for path, where in ((directory / FILES[0], directory), (directory / FILES[1], directory), (gguf, gguf)):
        content = path.read_bytes()
        for length in sorted(
            {0, 1, 7, 8, 9, 24, *range(30, len(content), max(1, len(content) // 40)), len(content) - 1}
        ):
            path.write_bytes(content[:length])
            with pytest.raises(ArtifactError):
                opened(where, base)
        path.write_bytes(content)
    assert len(opened(directory, base).targets) == len(opened(gguf, base).targets) == 2


def test_adapters_of_another_base_are_refused(tmp_path: Path, base: Artifact) -> None:
    other = SHAPES["tiny-qwen3"]
    with pytest.raises(CorruptArtifactError, match=r"general\.architecture"):
        opened(write_gguf_adapter(tmp_path / "a.gguf", TINY, 8, architecture="qwen3"), base)
    with pytest.raises(ArtifactError):
        opened(write_peft(tmp_path / "a", SHAPES["small-llama"], 8), base)
    if other.hidden_size != TINY.hidden_size:
        with pytest.raises(ArtifactError):
            opened(write_peft(tmp_path / "b", other, 8), base)


@pytest.mark.parametrize("encoding", [each.value for each in Encoding])
def test_adapters_are_merged_into_floats_and_q8_0(tmp_path: Path, encoding: str) -> None:
    shape = SHAPES["small-llama"]  # rows of 256 values, as some encodings need them
    base = open_artifact(str(write_gguf(tmp_path / "base.gguf", shape, encoding)), cache_dir=tmp_path)
    adapter = opened(write_peft(tmp_path / "adapter", shape, 4), base)
    if Encoding(encoding) in MERGED_ENCODINGS:
        assert merged(base, adapter).adapters == (adapter,)
        assert merged(base, adapter).bytes_by_encoding == base.bytes_by_encoding
    else:
        with pytest.raises(UnsupportedArtifactError, match=f"{encoding} in 'base' .* beside its base"):
            merged(base, adapter)


def test_an_adapter_that_is_not_active_everywhere_is_not_merged(tmp_path: Path, base: Artifact) -> None:
    aware = opened(write_peft(tmp_path / "aware", TINY, 8, settings={"alora_invocation_tokens": [5]}), base)
    with pytest.raises(UnsupportedArtifactError, match="aLoRA"):
        merged(base, aware)


def test_what_is_no_adapter_is_refused(tmp_path: Path, base: Artifact) -> None:
    with pytest.raises(ArtifactNotFoundError):
        opened(tmp_path / "missing", base)
    with pytest.raises(ArtifactNotFoundError, match="adapter_config"):
        opened(tmp_path, base)
    with pytest.raises(UnsupportedArtifactError, match=r"general\.type"):
        opened(base.path, base)
    directory = write_peft(tmp_path / "pickled", TINY, 8)
    (directory / FILES[1]).rename(directory / "adapter_model.bin")
    with pytest.raises(ArtifactNotFoundError, match="pickle"):
        opened(directory, base)


def test_unknown_config_content_is_refused(tmp_path: Path, base: Artifact) -> None:
    directory = write_peft(tmp_path / "adapter", TINY, 8)
    for content in ("", "[]", "{", json.dumps({"peft_type": "LORA"}), '{"r": 8, "r": 8, "peft_type": "LORA"}'):
        (directory / FILES[0]).write_text(content)
        with pytest.raises(CorruptArtifactError):
            opened(directory, base)


def test_all_linear_layers_are_known() -> None:
    assert {name.split(".")[-2] for name in adapter_matrices(TINY, 1)} == set(MODULES)
