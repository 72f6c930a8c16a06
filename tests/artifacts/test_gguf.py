"""GGUF as an artifact: configuration as data, canonical names, rotate-half rows."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.model import RopeScaling
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from tests.artifacts.support import F32, LLAMA, LLAMA_TENSORS, HandMadeGguf, approximately, f32, floats, text, u32
from tools.random_blocks import has_long_blocks
from tools.random_models import (
    ENCODINGS,
    MIXES,
    SHAPES,
    Shape,
    interleaved_rows,
    random_tensor,
    tensor_shapes,
    write_gguf,
)

OWN_NAMES = ("llama", "qwen2", "qwen3", "gemma3", "granite", "olmo2", "smollm3")


@pytest.mark.parametrize("name", [f"tiny-{name}" for name in OWN_NAMES])
def test_the_configuration_is_the_shape_that_was_written(name: str, tmp_path: Path) -> None:
    artifact = open_artifact(str(write_gguf(tmp_path / "small.gguf", name, "Q4_0")), cache_dir=tmp_path)
    found = asdict(artifact.config)
    shape = asdict(SHAPES[name])
    assert {key: found[key] for key in shape} == approximately(shape)
    assert artifact.config.qk_norm == (name in ("tiny-qwen3", "tiny-gemma3", "tiny-olmo2"))
    assert (artifact.name, artifact.format) == ("small", "gguf")
    assert artifact.num_bytes == (tmp_path / "small.gguf").stat().st_size
    assert artifact.weights.names() == tuple(tensor_shapes(SHAPES[name]))
    assert artifact.config.norm_offset == 0, "converters have added it"


def _families(encoding: str) -> tuple[str, ...]:
    if has_long_blocks(encoding):
        return ("small-llama", "small-qwen3")
    return ("tiny-llama", "tiny-qwen3", "tiny-granite", "tiny-smollm3", "tiny-qwen2")


@pytest.mark.parametrize(
    ("name", "encoding"),
    [(name, encoding) for encoding in (*ENCODINGS, *MIXES) for name in _families(encoding)],
)
def test_rows_come_back_in_rotate_half_order_in_every_encoding(name: str, encoding: str, tmp_path: Path) -> None:
    """Files of the llama family are permuted as converters do; what is read is what was drawn, block for block."""
    artifact = open_artifact(str(write_gguf(tmp_path / "m.gguf", name, encoding, seed=4)), cache_dir=tmp_path)
    for tensor_name, size in tensor_shapes(SHAPES[name]).items():
        tensor = artifact.weights[tensor_name]
        expected = random_tensor(tensor_name, size, tensor.encoding.value if len(size) > 1 else "F32", seed=4)
        assert tensor.data.tobytes() == expected.tobytes(), tensor_name
        assert tensor.shape == size


def test_permuting_is_the_converters_inverse_on_numbers_too(tmp_path: Path) -> None:
    """q rows of head h: row 2i of the file is row i of the canonical head, row 2i + 1 is row i + half."""
    made = HandMadeGguf()
    rows = np.arange(32, dtype=np.float32)[:, None] + np.zeros((32, 32), np.float32)
    made.arrays["blk.0.attn_q.weight"] = rows
    canonical = dequantise(made.open(tmp_path).weights["model.layers.0.self_attn.q_proj.weight"])[:, 0]
    assert canonical[:16].tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    np.testing.assert_array_equal(interleaved_rows(canonical[:, None], 2)[:, 0], rows[:, 0])


def test_biases_are_found_and_permuted(tmp_path: Path) -> None:
    made = HandMadeGguf()
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        made.tensors[f"blk.0.attn_{name}.bias"] = ((size,), F32)
        made.arrays[f"blk.0.attn_{name}.bias"] = np.arange(size, dtype=np.float32)
    artifact = made.open(tmp_path)
    assert artifact.config.attention_bias
    bias = artifact.weights["model.layers.0.self_attn.k_proj.bias"].data
    assert bias.tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    assert artifact.weights["model.layers.0.self_attn.v_proj.bias"].data.tolist() == [*range(16)]


def test_a_head_of_its_own_unties_the_embedding(tmp_path: Path) -> None:
    made = HandMadeGguf()
    assert made.open(tmp_path).config.tied_embeddings
    made.tensors["output.weight"] = ((40, 32), F32)
    assert not made.open(tmp_path).config.tied_embeddings


def test_defaults_are_those_of_llama_cpp(tmp_path: Path) -> None:
    values = {key: value for key, value in LLAMA.items() if key != "llama.attention.head_count_kv"}
    tensors = {**LLAMA_TENSORS, "blk.0.attn_k.weight": ((32, 32), F32), "blk.0.attn_v.weight": ((32, 32), F32)}
    config = HandMadeGguf(values, tensors).open(tmp_path).config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.rope_scaling) == (2, 16, 10000.0, None)


def test_rope_scaling_is_data(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": text("linear"), "llama.rope.scaling.factor": f32(4.0)}
    assert HandMadeGguf({**LLAMA, **linear}).open(tmp_path).config.rope_scaling == RopeScaling("linear", 4.0)
    old = {"llama.rope.scale_linear": f32(2.0)}
    assert HandMadeGguf({**LLAMA, **old}).open(tmp_path).config.rope_scaling == RopeScaling("linear", 2.0)
    made = HandMadeGguf(tensors={**LLAMA_TENSORS, "rope_freqs.weight": ((8,), F32)})
    made.arrays["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    artifact = made.open(tmp_path)
    assert artifact.config.rope_scaling == RopeScaling("factors", 1.0, factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))
    assert "rope_freqs.weight" not in artifact.weights


def test_sampling_defaults_in_the_metadata_are_read(tmp_path: Path) -> None:
    values = {"general.sampling.temp": f32(0.5), "general.sampling.top_k": u32(20)}
    artifact = HandMadeGguf({**LLAMA, **values}).open(tmp_path)
    assert artifact.sampling_defaults == {"temperature": 0.5, "top_k": 20}


def changed(**values: bytes | None) -> HandMadeGguf:
    """The correct file with llama.* values replaced, or removed by None; underscores of Python stand for dots."""
    merged = dict(LLAMA) | {key.replace("__", "."): value for key, value in values.items() if value is not None}
    removed = {key.replace("__", ".") for key, value in values.items() if value is None}
    return HandMadeGguf({key: value for key, value in merged.items() if key not in removed})


def reshaped(name: str, *shape: int) -> HandMadeGguf:
    return HandMadeGguf(tensors={**LLAMA_TENSORS, name: (shape, F32)})


CORRUPT = {
    "no architecture": (changed(general__architecture=None), "'general.architecture' is missing"),
    "architecture is a number": (changed(general__architecture=u32(1)), "a string is expected"),
    "no layer count": (changed(llama__block_count=None), "'llama.block_count' is missing"),
    "a layer too few": (changed(llama__block_count=u32(2)), r"model\.layers\.1\.input_layernorm\.weight"),
    "too many layers": (changed(llama__block_count=u32(4_000_000_000)), "4000000000 layers"),
    "no heads": (changed(llama__attention__head_count=u32(0)), "number of heads is 0"),
    "huge hidden size": (changed(llama__embedding_length=u32(4_000_000_000)), "hidden size is 4000000000"),
    "odd head size": (changed(llama__attention__key_length=u32(15), llama__attention__value_length=u32(15)), "even"),
    "uneven sharing": (
        changed(llama__attention__head_count=u32(3), llama__attention__head_count_kv=u32(2)),
        "3 heads cannot share 2",
    ),
    "NaN epsilon": (changed(llama__attention__layer_norm_rms_epsilon=f32(float("nan"))), "epsilon' is nan"),
    "negative epsilon": (changed(llama__attention__layer_norm_rms_epsilon=f32(-1.0)), "rms norm epsilon is -1.0"),
    "infinite theta": (changed(llama__rope__freq_base=f32(float("inf"))), "freq_base' is inf"),
    "zero theta": (changed(llama__rope__freq_base=f32(0.0)), "rope theta is 0.0"),
    "zero rope factor": (
        changed(llama__rope__scaling__type=text("linear"), llama__rope__scaling__factor=f32(0.0)),
        "scaling factor is 0.0",
    ),
    "wrong shape": (reshaped("blk.0.ffn_up.weight", 48, 16), r"up_proj.weight' has shape \[48, 16\]; \[48, 32\]"),
    "transposed": (reshaped("blk.0.ffn_down.weight", 48, 32), r"has shape \[48, 32\]; \[32, 48\] is expected"),
    "wrong rope factors": (reshaped("rope_freqs.weight", 7), r"F32 \[7\]; F32 \[8\]"),
    "no embedding": (
        HandMadeGguf(tensors={name: entry for name, entry in LLAMA_TENSORS.items() if name != "token_embd.weight"}),
        "token_embd.weight",
    ),
    "no tensor": (HandMadeGguf(tensors={}), "token_embd.weight"),
    "one missing": (
        HandMadeGguf(tensors={name: entry for name, entry in LLAMA_TENSORS.items() if "attn_v" not in name}),
        r"no tensor 'model.layers.0.self_attn.v_proj.weight'; one of shape \[16, 32\]",
    ),
    "bad sampling default": (changed(general__sampling__temp=f32(-1.0)), "sampling default 'temperature'"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_an_inconsistent_model_is_corrupt(case: str, tmp_path: Path) -> None:
    made, message = CORRUPT[case]
    with pytest.raises(CorruptArtifactError, match=message):
        made.open(tmp_path)


UNSUPPORTED = {
    "architecture": (
        changed(general__architecture=text("mamba")),
        "'mamba'; supported: llama, qwen2, qwen3, gemma3",
    ),
    "experts": (changed(llama__expert_count=u32(8)), "mixture of experts"),
    "split": (changed(split__count=u32(3)), "split GGUF"),
    "heads by layer": (changed(llama__attention__head_count_kv=floats([1.0])), "differ by layer"),
    "rope scaling": (changed(llama__rope__scaling__type=text("spiral")), "scaling 'spiral'; supported: none"),
    "partial rope": (changed(llama__rope__dimension_count=u32(8)), "dimension_count is 8"),
    "unknown tensor": (reshaped("blk.0.attn_sub_norm.weight", 32), "attn_sub_norm.weight' is not part of"),
    "layer beyond the last": (reshaped("blk.1.attn_norm.weight", 32), "not part of a plain llama"),
    "norm of queries": (reshaped("blk.0.attn_q_norm.weight", 16), "not part of a plain llama"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_variant_that_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    made, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedArtifactError, match=message):
        made.open(tmp_path)


def test_a_tensor_that_is_not_there_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    weights = HandMadeGguf().open(tmp_path).weights
    with pytest.raises(
        CorruptArtifactError, match=r"no tensor 'model\.norm'; the nearest name is 'model\.norm\.weight'"
    ):
        weights["model.norm"]


def test_a_qwen3_of_another_head_size_than_hidden_by_heads_is_read(tmp_path: Path) -> None:
    shape = Shape("qwen3", num_heads=2, num_kv_heads=1, head_dim=96, tied_embeddings=True)
    config = open_artifact(str(write_gguf(tmp_path / "m.gguf", shape, "F16")), cache_dir=tmp_path).config
    assert (config.head_dim, config.hidden_size) == (96, 128)
