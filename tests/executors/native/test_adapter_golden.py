"""Logits with LoRA adapters are those of PEFT, for the adapter beside the model and for the merged model.

tools/golden/logits_peft.py wrote them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.adapter import open_adapter
from lockstep.artifacts.model import Artifact
from lockstep.executors.base import Logits
from tests.executors.native.adapter_models import run_with
from tests.executors.native.golden_models import GOLDEN, artifact_of_case, open_huggingface_case, relative_error
from tests.executors.native.loading import loaded
from tools.golden.adapter_cases import ADAPTER_CASES, INVOCATION_AT
from tools.golden.logit_cases import CASES, POSITIONS, token_ids

EXACT, ROUNDED = 2e-5, 2e-3
"""Relative error of a row: of numbers in 16 bits, which both compute with; of F32, which is rounded here. Seen: 6e-6,
1.1e-3."""
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
