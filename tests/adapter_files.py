"""Writes adapters for tests: folders in PEFT's format, as stub models read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.engine.options import AdapterSource
from tools.random_adapters import write_peft
from tools.random_shapes import Shape


def write_stub_adapter(folder: Path, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """Write an adapter for a stub model, which needs no weights. Different seeds give different fingerprints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 8, **config}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights %d" % seed)
    return folder


def stub_adapters(folder: Path, num: int, rank: int = 4) -> tuple[AdapterSource, ...]:
    """Adapters ``a0``, ``a1``, … of different contents."""
    return tuple(
        AdapterSource(f"a{index}", str(write_stub_adapter(folder / f"a{index}", index, rank))) for index in range(num)
    )


POCKET = Shape(
    num_layers=4, hidden_size=256, intermediate_size=768, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=4096
)
"""Shape of the embedded model."""


def write_pocket_adapter(folder: Path, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """Write an adapter with random weights for the embedded model."""
    return write_peft(folder, POCKET, rank, seed=seed, settings=config)
