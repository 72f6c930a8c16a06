"""LoRA adapters from the hub: the two files of a PEFT directory, or a GGUF file, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.artifacts.adapter import open_adapter
from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from lockstep.errors import ArtifactNotFoundError, HubUnreachableError
from tests.artifacts.hub.stand_in import StandIn
from tools.random_adapters import write_gguf_adapter, write_peft
from tools.random_models import SHAPES, write_gguf

TINY = SHAPES["tiny-llama"]


@pytest.fixture
def base(tmp_path: Path) -> Artifact:
    return open_artifact(str(write_gguf(tmp_path / "base.gguf", TINY, "F32")), cache_dir=tmp_path)


def test_peft_adapter_opens_from_the_hub_and_then_without_it(hub: StandIn, base: Artifact, tmp_path: Path) -> None:
    local = write_peft(tmp_path / "local", TINY, 4)
    (local / "optimizer.pt").write_bytes(b"pickle")
    hub.add_directory("acme/billing", local)
    seen: list[str] = []
    adapter = open_adapter(
        "hf://acme/billing", base, cache_dir=tmp_path, progress=lambda name, have, total: seen.append(name)
    )
    assert adapter.name == "billing"
    assert set(seen) == {"adapter_config.json", "adapter_model.safetensors"}
    assert adapter.fingerprint == open_adapter(local, base, cache_dir=tmp_path).fingerprint
    asked = len(hub.requests)
    hub.status = 500
    assert open_adapter("hf://acme/billing", base, cache_dir=tmp_path).fingerprint == adapter.fingerprint
    assert len(hub.requests) == asked
    with pytest.raises(HubUnreachableError):
        open_adapter("hf://acme/other", base, cache_dir=tmp_path)


def test_gguf_adapter_is_chosen_by_its_file(hub: StandIn, base: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    local = write_gguf_adapter(folder / "billing-F16.gguf", TINY, 4)
    write_gguf_adapter(folder / "legal-F16.gguf", TINY, 4, seed=1)
    hub.add_directory("acme/adapters", folder)
    adapter = open_adapter("hf://acme/adapters#billing-F16.gguf", base, cache_dir=tmp_path)
    assert adapter.fingerprint == open_adapter(local, base, cache_dir=tmp_path).fingerprint
    with pytest.raises(ArtifactNotFoundError, match="adapter_config"):
        open_adapter("hf://acme/adapters", base, cache_dir=tmp_path)
