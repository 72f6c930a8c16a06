"""Tasks of models. They have a module without imports, because every page of help needs them."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal["generate", "embed", "rerank"]
"""What a model is for: text, vectors, or scores of pairs of texts."""
TASKS: tuple[Task, ...] = get_args(Task)
