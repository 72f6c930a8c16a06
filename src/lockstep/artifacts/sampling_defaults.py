"""Sampling defaults that an artifact carries, under the names of `Artifact.sampling_defaults`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import CorruptArtifactError

# GGUF key: our name. Written by llama.cpp's converter from generation_config.json.
_GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_NAMES = tuple(_GGUF_NAMES.values())


def from_generation_config(config: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """The values that are present. ``do_sample`` is not consulted, as in vLLM: a file that sets a temperature means it,
    and a request that wants greedy decoding says ``temperature: 0``.
    """
    return _checked({name: config.get(name) for name in _NAMES}, path)


def from_gguf(metadata: Mapping[str, object], path: Path) -> dict[str, float | int]:
    """The values that are present."""
    return _checked({name: metadata.get(key) for key, name in _GGUF_NAMES.items()}, path)


def _checked(values: Mapping[str, object], path: Path) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise CorruptArtifactError(f"sampling default {name!r} is {value!r}; a number is expected", path=path)
        defaults[name] = int(value) if name == "top_k" else float(value)
    return defaults
