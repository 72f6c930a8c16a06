"""Logits with LoRA adapters are those of PEFT, for the adapter beside the model and for the merged model.

tools/golden/logits_peft.py wrote them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.adapter import merged, open_adapter
from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.executors.base import Logits
from tests.executors.native.adapter_models import run_with
from tests.executors.native.golden_models import (
    GOLDEN,
    artifact_of_case,
    golden_prompt_logits,
    open_huggingface_case,
    relative_error,
)
from tests.executors.native.loading import loaded
from tests.executors.native.support import MemoryWeights
from tools.golden.adapter_cases import ADAPTER_CASES, INVOCATION_AT
from tools.golden.logit_cases import CASES, POSITIONS, token_ids
from tools.random_models import as_float

EXACT, ROUNDED = 2e-5, 2e-3
"""Relative error of a row: of numbers in 16 bits, which both compute with; of F32, which is rounded here. Seen: 6e-6,
1.1e-3."""
SAME_STEP = 2e-4
"""Relative error of a row if a few weights lie so close to the middle of two numbers in 16 bits that the last bit of a
sum decides. Seen: 5e-5, and 4e-3 without the rounding."""
TABLE = (3, 1, 4, 2)


def base_of(name: str, folder: Path) -> Artifact:
    return artifact_of_case(name, CASES[name]) if name in CASES else open_huggingface_case(name, folder)


def logits_of(name: str, folder: Path, active_from: int | None = 0, isa: str | None = None) -> Logits:
    """Logits at the stored positions, with the adapter from a token of the prompt on."""
    case = ADAPTER_CASES[name]
    base = base_of(case.base, folder)
    tokens = token_ids(case.shape.vocab_size).tolist()
    with loaded(base, 8, 0, kv_cache_precision="f32", isa=isa) as executor:
        adapter = open_adapter(case.write(folder / "adapter"), base, cache_dir=folder)
        assert adapter.invocation_ids == (tuple(case.invocation_ids()) if case.is_activated else ())
        slot = executor.load_adapter(adapter)
        start = len(tokens) if active_from is None else active_from
        parts = [(tokens[:start], 0, 0), (tokens[start:], start, slot)]
        rows = [run_with(executor, [each], (ids, at, TABLE)) for ids, at, each in parts if ids]
        return np.concatenate(rows)[list(POSITIONS)]


@pytest.mark.parametrize("kind", ["unmerged", "merged"])
@pytest.mark.parametrize("name", [name for name, case in ADAPTER_CASES.items() if not case.is_activated])
def test_logits_are_those_of_peft(name: str, kind: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "logits_peft.npz")[f"{name}.{kind}"]
    bound = ROUNDED if ADAPTER_CASES[name].encoding == "F32" else EXACT
    assert relative_error(logits_of(name, tmp_path), golden) <= bound


@pytest.mark.parametrize("name", [name for name, case in ADAPTER_CASES.items() if not case.is_activated])
def test_logits_of_adapters_that_are_merged_at_load_are_those_of_peft(name: str, tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "logits_peft.npz")[f"{name}.merged"]
    case = ADAPTER_CASES[name]
    base = base_of(case.base, tmp_path)
    adapter = open_adapter(case.write(tmp_path / "adapter"), base, cache_dir=tmp_path)
    assert relative_error(golden_prompt_logits(merged(base, adapter)), golden) <= EXACT


@pytest.mark.parametrize("encoding", ["F16", "BF16"])
@pytest.mark.parametrize("name", [name for name, case in ADAPTER_CASES.items() if case.merged_encodings])
def test_weights_in_16_bits_are_rounded_once_after_the_merge(name: str, encoding: str, tmp_path: Path) -> None:
    stored = np.load(GOLDEN / "logits_peft.npz")
    case = ADAPTER_CASES[name]
    base = in_16_bits(base_of(case.base, tmp_path), encoding)
    adapter = open_adapter(case.write(tmp_path / "adapter"), base, cache_dir=tmp_path)
    found = golden_prompt_logits(merged(base, adapter))
    assert relative_error(found, stored[f"{name}.merged-{encoding}"]) <= SAME_STEP
    assert relative_error(found, stored[f"{name}.merged"]) > 10 * SAME_STEP


def in_16_bits(base: Artifact, encoding: str) -> Artifact:
    tensors = {name: base.weights[name] for name in base.weights.names()}
    rounded = {name: as_float(each.data.astype(np.float32), encoding) for name, each in tensors.items()}
    weights = {name: Tensor(name, Encoding(encoding), tensors[name].shape, data) for name, data in rounded.items()}
    return replace(base, weights=MemoryWeights(weights))


def test_adapter_is_active_from_its_invocation_tokens_on(tmp_path: Path) -> None:
    golden = np.load(GOLDEN / "logits_peft.npz")["llama-alora.unmerged"]
    assert relative_error(logits_of("llama-alora", tmp_path, INVOCATION_AT), golden) <= EXACT
    for other in (0, INVOCATION_AT - 1, INVOCATION_AT + 1, None):
        assert relative_error(logits_of("llama-alora", tmp_path, other), golden) > 100 * EXACT, other


def test_settings_have_an_effect(tmp_path: Path) -> None:
    stored = np.load(GOLDEN / "logits_peft.npz")
    names = ("llama", "llama-rslora", "llama-patterns", "llama-queries")
    for name in names[1:]:
        assert relative_error(stored[f"{name}.unmerged"], stored["llama.unmerged"]) > 100 * EXACT
