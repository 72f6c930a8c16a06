"""LoRA adapters with random weights for the models of `tools.random_models`: PEFT directories and GGUF files.

    python -m tools.random_adapters peft smollm2-135m 16 out_directory
    python -m tools.random_adapters gguf smollm2-135m 16 out.gguf

Changes are about half as large as what they change, so that an adapter that is left out, or another one's, is noticed.
The module does not import `lockstep`, so that it can test it.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tools.random_configs import INTERLEAVED, gguf_architecture
from tools.random_hybrids import KERNELS, huggingface_name
from tools.random_models import SHAPES, Array, Shape, as_float, gguf_tensor_name, interleaved_rows, write_safetensors
from tools.random_shapes import tensor_shapes

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear layers of a plain decoder."""
_STRENGTH = 0.5


def adapter_matrices(
    shape: Shape, rank: int, encoding: str = "F16", *, seed: int = 0, modules: tuple[str, ...] | None = None
) -> dict[str, tuple[Array, Array]]:
    """A [rank, columns] and B [features, rank] by the adapted tensor's Hugging Face name, for a factor of 2.

    Args:
        modules: last parts of the names of adapted modules; None: all products of all layers.
    """
    matrices = {}
    for name, size in tensor_shapes(shape).items():
        is_product = len(size) == 2 and name.startswith("model.layers.") and not name.endswith(KERNELS)
        if not is_product or (modules is not None and name.split(".")[-2] not in modules):
            continue
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        a = rng.standard_normal((rank, size[1]), np.float32) * np.float32(size[1] ** -0.5)
        b = rng.standard_normal((size[0], rank), np.float32) * np.float32(_STRENGTH / 2 * rank**-0.5)
        matrices[name] = (as_float(a, encoding), as_float(b, encoding))
    return matrices


def write_peft(
    directory: Path | str, shape: Shape, rank: int, encoding: str = "F16", *, seed: int = 0,
    modules: tuple[str, ...] | None = None, settings: Mapping[str, object] | None = None,
) -> Path:  # fmt: skip
    """Write adapter_config.json and adapter_model.safetensors.

    Args:
        settings: further entries of adapter_config.json.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    matrices = adapter_matrices(shape, rank, encoding, seed=seed, modules=modules)
    names = sorted({name.split(".")[-2] for name in matrices})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "target_modules": names,
        "bias": "none", "modules_to_save": None, "use_dora": False, "use_rslora": False, "inference_mode": True,
        "base_model_name_or_path": None, **(settings or {}),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    stored: dict[str, Array] = {}
    for name, pair in matrices.items():
        module = huggingface_name(shape, name).removesuffix(".weight")
        stored |= {f"base_model.model.{module}.lora_{k}.weight": each for k, each in zip("AB", pair, strict=True)}
    write_safetensors(directory / "adapter_model.safetensors", stored)
    return directory


def write_gguf_adapter(
    path: Path | str, shape: Shape, rank: int, encoding: str = "F16", *, seed: int = 0,
    modules: tuple[str, ...] | None = None, invocation_ids: tuple[int, ...] = (), architecture: str | None = None,
) -> Path:  # fmt: skip
    """Write a GGUF file as llama.cpp's converter does: queries and keys of some architectures are permuted."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture or gguf_architecture(shape))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    if invocation_ids:
        kind = gguf.GGUFValueType
        key = "adapter.alora.invocation_tokens"
        writer.add_key_value(key, list(invocation_ids), kind.ARRAY, kind.UINT32)
    for name, (a, b) in adapter_matrices(shape, rank, encoding, seed=seed, modules=modules).items():
        if shape.architecture in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            b = interleaved_rows(b, shape.num_heads if "q_proj" in name else shape.num_kv_heads)
        for part, data in (("lora_a", a), ("lora_b", b)):
            raw_type = gguf.GGMLQuantizationType.BF16 if encoding == "BF16" else None
            raw = np.ascontiguousarray(data)
            stored = raw.view(np.uint8) if encoding == "BF16" else raw
            writer.add_tensor(f"{gguf_tensor_name(name, shape)}.{part}", stored, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a LoRA adapter with random weights for all products.")
    parser.add_argument("format", choices=("peft", "gguf"))
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("rank", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("--encoding", choices=("F32", "F16", "BF16"), default="F16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write = write_peft if args.format == "peft" else write_gguf_adapter
    write(args.path, SHAPES[args.shape], args.rank, args.encoding, seed=args.seed)


if __name__ == "__main__":
    main()
