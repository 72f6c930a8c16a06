"""Logits of tiny random checkpoints with LoRA adapters, computed by PEFT in float32 on the CPU.

    python -m tools.golden.logits_peft tests/golden/logits_peft.npz

It needs the ``golden`` extra. Models and adapters are drawn from a seed (adapter_cases.py), so only logits are stored:
those of the adapter beside the model, and those of the merged model. For some adapters, these are also stored for a
model in 16 bits: its weights are rounded, merged in float32, and rounded again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.adapter_cases import ADAPTER_CASES, AdapterCase
from tools.golden.architecture_cases import HUGGINGFACE_CASES
from tools.golden.logit_cases import CASES, POSITIONS, Floats, sharpened, tensors, token_ids
from tools.golden.logits_transformers import model_of, plain_model, with_weights


def peft_logits(case: AdapterCase, folder: Path) -> dict[str, Floats]:
    """Logits [len(POSITIONS), vocab]: ``unmerged``, ``merged`` if PEFT can merge the adapter, and ``merged-F16`` or
    ``merged-BF16`` for each of the case's encodings of the base."""
    from peft import PeftModel

    def adapted(base: Any) -> Any:
        return PeftModel.from_pretrained(base, str(case.write(folder))).eval()

    model = adapted(_base_of(case))
    assert bool(model.peft_config["default"].alora_invocation_tokens) == case.is_activated
    logits = {"unmerged": _logits(model, case)}
    if not case.is_activated:
        logits["merged"] = _logits(model.merge_and_unload().eval(), case)
    for encoding in case.merged_encodings:
        merged = adapted(_rounded(_base_of(case), encoding)).merge_and_unload().eval()
        logits[f"merged-{encoding}"] = _logits(_rounded(merged, encoding), case)
    return logits


def _rounded(model: Any, encoding: str) -> Any:
    """The model with all weights rounded to 16 bits, in float32."""
    import torch

    for weights in model.parameters():  # and not the frequencies, which no file stores
        weights.data = weights.data.to({"F16": torch.float16, "BF16": torch.bfloat16}[encoding]).to(torch.float32)
    return model


def _base_of(case: AdapterCase) -> Any:
    if case.base in CASES:
        base = CASES[case.base]
        return with_weights(plain_model(base), tensors(base), base.shape)
    return with_weights(model_of(HUGGINGFACE_CASES[case.base]), sharpened(case.shape), case.shape)


def _logits(model: Any, case: AdapterCase) -> Floats:
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(token_ids(case.shape.vocab_size))[None], use_cache=False).logits[0]
    return np.asarray(logits.numpy()[list(POSITIONS)], np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    golden: dict[str, Floats] = {}
    for name, case in ADAPTER_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            golden |= {f"{name}.{kind}": logits for kind, logits in peft_logits(case, Path(folder)).items()}
    np.savez_compressed(args.out, **golden)  # type: ignore[arg-type]  # the stub confuses the names with its flag
    for name, logits in golden.items():
        print(f"{name}: {logits.shape}, deviation {logits.std():.3f}")
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
