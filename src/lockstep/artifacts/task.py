"""Tasks, poolings and merged adapters of models: values without imports, because every page of help needs them."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal["generate", "embed", "rerank"]
"""Task of a model: text, vectors, or scores of pairs of texts."""
TASKS: tuple[Task, ...] = get_args(Task)
MERGE = "+lora="
"""Separates a model from the LoRA adapter that its load merges into its weights, in a source."""
ADAPTER_FORMS = "a PEFT directory, a GGUF file, hf://org/name or pocket://NAME"
"""Sources of adapters, for errors."""
Pooling = Literal["mean", "last", "cls"]
"""Hidden states that become the vector: the mean of all tokens, the last token, or the first one."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
