"""LoRA adapters with golden logits: adapters of tiny random models, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.golden.architecture_cases import HUGGINGFACE_CASES
from tools.golden.logit_cases import CASES, SEED, token_ids
from tools.random_adapters import write_peft
from tools.random_shapes import Shape

INVOCATION_AT, NUM_INVOCATION_IDS = 40, 3
"""The tokens of the prompt that activate an aLoRA."""


@dataclass(frozen=True)
class AdapterCase:
    """An adapter of one of the models with golden logits."""

    base: str
    """Name in `CASES` or `HUGGINGFACE_CASES`."""
    rank: int = 8
    encoding: str = "F16"
    modules: tuple[str, ...] | None = None
    """Last parts of the names of adapted modules; None: all linear layers."""
    settings: Mapping[str, object] = field(default_factory=dict)
    is_activated: bool = False
    """True for an aLoRA, which some tokens of the prompt activate."""
    merged_encodings: tuple[str, ...] = ()
    """Encodings with 16 bits of the base for which the merged model has golden logits."""

    @property
    def shape(self) -> Shape:
        return CASES[self.base].shape if self.base in CASES else HUGGINGFACE_CASES[self.base].shape

    def invocation_ids(self) -> list[int]:
        ids: list[int] = token_ids(self.shape.vocab_size).tolist()
        return ids[INVOCATION_AT : INVOCATION_AT + NUM_INVOCATION_IDS]

    def write(self, directory: Path) -> Path:
        """Write the PEFT directory."""
        settings = {**self.settings}
        if self.is_activated:
            settings["alora_invocation_tokens"] = self.invocation_ids()
        return write_peft(
            directory, self.shape, self.rank, self.encoding, seed=SEED, modules=self.modules, settings=settings
        )


ADAPTER_CASES: Mapping[str, AdapterCase] = {
    "llama": AdapterCase("llama", merged_encodings=("F16", "BF16")),
    "llama-f32": AdapterCase("llama", encoding="F32", merged_encodings=("F16", "BF16")),
    "llama-bf16": AdapterCase("llama", 5, "BF16"),
    "llama-rslora": AdapterCase("llama", settings={"use_rslora": True, "lora_alpha": 4}),
    "llama-patterns": AdapterCase("llama", settings={"alpha_pattern": {"1.mlp.down_proj": 40, "q_proj": 4}}),
    "llama-queries": AdapterCase("llama", 16, modules=("q_proj", "v_proj")),
    "llama-alora": AdapterCase("llama", is_activated=True),
    "qwen3": AdapterCase("qwen3"),
    "gemma3": AdapterCase("gemma3"),
    "phi3": AdapterCase("phi3"),
    "granite": AdapterCase("granite"),
}
"""Cases by name: all seven linear layers, if nothing else is stated."""
