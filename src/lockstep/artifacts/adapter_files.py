"""Files of LoRA adapters: reads PEFT directories and GGUF files, without the model that they adapt.

Sources of the formats: `LoraConfig` and `save_pretrained` of PEFT; llama.cpp's `convert_lora_to_gguf.py` and
`llama-adapter.cpp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.artifacts.gguf_file import read_gguf
from lockstep.artifacts.metadata import Metadata, read_json
from lockstep.artifacts.model import Tensor
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
MAX_INVOCATION_TOKENS = 1024
_MAX_SHOWN_CHARS = 80
_HARMLESS = frozenset((
    "alora_invocation_tokens", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "invocation_string", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
))  # fmt: skip
"""Keys of adapter_config.json that are read here, or that only affect training. Any other key must be unset."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which training starts from the unchanged base model."""
_PATTERN = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight", re.ASCII)
_GGUF_NAME = re.compile(r"(.+)\.lora_([ab])", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's files, under the names of its format."""

    path: Path
    files: tuple[Path, ...]
    """The files that define the adapter."""
    weights_path: Path
    """The file of its tensors, for messages."""
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """By name of the adapted tensor: A [rank, columns] and B [features, rank], whose shapes are not checked."""
    ranks: Mapping[str, int]
    """Declared ranks by the same names."""
    scales: Mapping[str, float]
    """Factors of the products B A, by the same names."""
    rank: int
    """The largest rank."""
    scale: float
    """The factor of most products: that of a tensor without a setting of its own."""
    invocation_ids: tuple[int, ...]
    architecture: str | None = None
    """Architecture of the base model as GGUF files name it; None: PEFT, which does not declare it."""


def read_peft(directory: Path) -> AdapterFiles:
    """Read a PEFT directory: adapter_config.json and adapter_model.safetensors.

    Raises:
        ArtifactNotFoundError: a file is missing.
        CorruptArtifactError: a file is truncated or inconsistent.
        UnsupportedArtifactError: the adapter is of another kind than plain LoRA; the error names the setting.
    """
    declared = read_json(directory / PEFT_CONFIG)
    _refuse_variants(declared)
    weights = directory / PEFT_WEIGHTS
    if not weights.is_file():
        others = [entry.name for entry in sorted(directory.iterdir()) if entry.suffix in (".bin", ".pt", ".pth")]
        hint = f"; {others[0]} is a pickle, which is never loaded: save the adapter as safetensors" if others else ""
        raise ArtifactNotFoundError(f"has no {PEFT_WEIGHTS}{hint}", path=directory)
    pairs = _pairs(read_safetensors(weights), _PEFT_NAME, weights, "base_model.model.*.lora_A.weight and lora_B.weight")
    rank, alpha = _rank(declared, "r"), declared.real("lora_alpha", 8.0)
    is_rank_stabilised = declared.flag("use_rslora", False)
    ranks, alphas = _settings(declared, "rank_pattern", rank), _settings(declared, "alpha_pattern", alpha)
    names = {f"{name}.weight": name for name in pairs}
    rank_of = {name: int(_setting(ranks, module, rank)) for name, module in names.items()}
    return AdapterFiles(
        path=directory,
        files=(declared.path, weights),
        weights_path=weights,
        pairs={name: pairs[module] for name, module in names.items()},
        ranks=rank_of,
        scales={
            name: _scale(_setting(alphas, module, alpha), rank_of[name], is_rank_stabilised)
            for name, module in names.items()
        },
        rank=max(rank_of.values(), default=rank),
        scale=_scale(alpha, rank, is_rank_stabilised),
        invocation_ids=_token_ids(declared, declared.values.get("alora_invocation_tokens", []), declared.path),
    )


def read_gguf_adapter(path: Path) -> AdapterFiles:
    """Read a GGUF file of ``general.type`` adapter and ``adapter.type`` lora.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: see `read_gguf`; the file is a model or
            an adapter of another kind.
    """
    file = read_gguf(path)
    metadata = file.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        found = metadata.text(key, "model" if key == "general.type" else None)
        if found != expected:
            raise metadata.unsupported(f"{key} is {found!r}; {expected!r} is expected in a LoRA adapter")
    pairs = _pairs(file.tensors, _GGUF_NAME, path, "*.lora_a and *.lora_b")
    alpha = metadata.real("adapter.lora.alpha", 0.0)
    ranks = {name: a.shape[0] for name, (a, _) in pairs.items()}
    invocation = metadata.values.get("adapter.alora.invocation_tokens", [])
    scales = {name: alpha / rank if alpha else 1.0 for name, rank in ranks.items()}
    rank = max(ranks.values())
    return AdapterFiles(
        path=path,
        files=(path,),
        weights_path=path,
        pairs=pairs,
        ranks=ranks,
        scales=scales,
        rank=rank,
        scale=alpha / rank if alpha else 1.0,
        invocation_ids=_token_ids(
            metadata, invocation.tolist() if isinstance(invocation, np.ndarray) else invocation, path
        ),
        architecture=metadata.text("general.architecture"),
    )


def _refuse_variants(declared: Metadata) -> None:
    kind = declared.text("peft_type")
    if kind != "LORA":
        raise declared.unsupported(f"peft_type is {kind!r}; LORA is supported")
    if declared.text("bias", "none") != "none":
        raise declared.unsupported(f"bias is {declared.text('bias')!r}; adapters without biases are supported")
    start = declared.values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise declared.unsupported(
            f"init_lora_weights is {_shown(start)}, with which training changes the base model; convert the adapter to "
            "plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, value in declared.values.items():
        if key not in _HARMLESS and value not in (False, 0, "", [], {}):
            raise declared.unsupported(f"{key} is {_shown(value)}; adapters without it are supported")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def _pairs(
    tensors: Mapping[str, Tensor], form: re.Pattern[str], path: Path, expected: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by the name of what they adapt, in the order of the file."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = form.fullmatch(name)
        if match is None:
            raise CorruptArtifactError(
                f"tensor {name!r} is not part of a plain LoRA adapter, which has {expected}", path=path
            )
        found.setdefault(match[1], {})[match[2].lower()] = tensor
    for name, parts in found.items():
        if len(parts) < 2:
            raise CorruptArtifactError(f"{name!r} has no lora_{'b' if 'a' in parts else 'a'}", path=path)
    if not found:
        raise CorruptArtifactError(f"has no tensors; {expected} are expected", path=path)
    return {name: (parts["a"], parts["b"]) for name, parts in found.items()}


def _rank(declared: Metadata, key: str) -> int:
    rank = declared.integer(key)
    if not 1 <= rank <= MAX_RANK:
        raise declared.corrupt(f"{key} is {rank}; 1 to {MAX_RANK} is expected")
    return rank


def _settings(declared: Metadata, key: str, default: float) -> dict[str, float]:
    """Settings of single modules by the end of their names. PEFT reads patterns as regular expressions; those that are
    more than names are refused."""
    section = declared.section(key)
    for pattern in section.values:
        if not _PATTERN.fullmatch(pattern):
            raise declared.unsupported(f"{key} has {_shown(pattern)}; names of modules are supported")
    if isinstance(default, int):
        return {pattern: _rank(section, pattern) for pattern in section.values}
    return {pattern: section.real(pattern) for pattern in section.values}


def _setting(settings: Mapping[str, float], module: str, default: float) -> float:
    """The first setting whose pattern is the end of a module's name, as PEFT's `get_pattern_key` finds it."""
    return next(
        (value for pattern, value in settings.items() if f".{module}".endswith(f".{pattern}")),
        default,
    )


def _scale(alpha: float, rank: int, is_rank_stabilised: bool) -> float:
    return alpha / (math.sqrt(rank) if is_rank_stabilised else rank)


def _token_ids(declared: Metadata, value: object, path: Path) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise CorruptArtifactError(f"the invocation tokens are {_shown(value)}; token ids are expected", path=path)
    if len(value) > MAX_INVOCATION_TOKENS:
        raise declared.corrupt(f"{len(value)} invocation tokens; at most {MAX_INVOCATION_TOKENS} are expected")
    return tuple(value)
