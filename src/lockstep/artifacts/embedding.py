"""How a model turns hidden states into a vector: reads the files of sentence-transformers, and the metadata of GGUF.

sentence-transformers writes a list of modules (``modules.json``), each with its directory. The modules that are read
here are Transformer, Pooling (one mode), Dense (a layer on the pooled vector) and Normalize; a model with another one
is refused, because its vectors would be wrong without it. ``config_sentence_transformers.json`` has the prompts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from lockstep.artifacts.metadata import Metadata, read_bytes, read_json, read_optional_json
from lockstep.artifacts.model import Tensor
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError

Pooling = Literal["mean", "last", "cls"]
"""Which hidden states become the vector: the mean of all tokens, the last token, or the first one."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
_MAX_MODULES = 16
_MODES: Mapping[str, Pooling] = MappingProxyType({"cls": "cls", "mean": "mean", "lasttoken": "last"})
_FORMER_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Flags of versions before 5.3, in the place of ``pooling_mode``."""
_ACTIVATIONS = MappingProxyType(
    {
        "torch.nn.modules.linear.Identity": "identity",
        "torch.nn.modules.activation.Tanh": "tanh",
        "torch.nn.modules.activation.GELU": "gelu_erf",
        "torch.nn.modules.activation.ReLU": "relu",
    }
)
_GGUF_POOLINGS: Mapping[int, Pooling] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
"""By ``pooling_type``; 0 is none and 4 is the score of a classifier."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer on the pooled vector: ``activation(weight @ x + bias)``."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None
    activation: str
    """``identity``, ``tanh``, ``gelu_erf`` or ``relu``."""


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a model makes vectors."""

    pooling: Pooling = "mean"
    normalize: bool = True
    """Whether the model's own pipeline scales vectors to length 1."""
    dense: tuple[DenseLayer, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that are put before an input, by name, e.g. ``query``."""
    default_prompt: str | None = None
    """Name of the prompt that is used if a request names none; None: no prompt."""
    max_tokens: int | None = None
    """Maximum tokens of a text, if it is less than the context of the model."""


def read_sentence_transformers(path: Path) -> EmbeddingConfig | None:
    """Read a directory's modules; None: it has no ``modules.json``, or one without a pooling.

    Raises:
        CorruptArtifactError: a file is malformed, or a dense layer does not fit the vector before it.
        UnsupportedArtifactError: the model needs a module, a pooling mode or an activation that is not supported.
    """
    modules = _modules(path)
    lengths = read_optional_json(path / LENGTHS)
    prompts = read_optional_json(path / PROMPTS)
    pooling: Pooling | None = None
    dense: list[DenseLayer] = []
    normalizes = False
    for kind, directory in modules:
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(read_json(path / directory / "config.json"))
            case "Dense":
                dense.append(_dense(path / directory))
            case "Normalize":
                normalizes = True
            case _:
                raise UnsupportedArtifactError(
                    f"uses the module {kind!r}; the supported ones are Transformer, Pooling, Dense and Normalize",
                    path=path / MODULES,
                )
    if pooling is None:
        return None
    for before, after in itertools.pairwise(dense):
        if before.weight.shape[0] != after.weight.shape[1]:
            raise CorruptArtifactError(
                f"a dense layer gives {before.weight.shape[0]} values and the next one takes {after.weight.shape[1]}",
                path=path / MODULES,
            )
    named = prompts.section("prompts")
    texts = {name: named.text(name) for name in named.values}
    default = prompts.text("default_prompt_name", "") or None
    if default is not None and default not in texts:
        raise prompts.corrupt(f"'default_prompt_name' is {default!r}, which is not among its prompts")
    longest = lengths.integer("max_seq_length", 0)
    if longest < 0:
        raise lengths.corrupt(f"'max_seq_length' is {longest}; a number of tokens is expected")
    return EmbeddingConfig(pooling, normalizes, tuple(dense), MappingProxyType(texts), default, longest or None)


def files_of(path: Path) -> tuple[str, ...]:
    """Names of the files in a directory that decide how vectors are made, for the model's fingerprint."""
    if not (path / MODULES).is_file():
        return ()
    names = [name for name in (MODULES, PROMPTS, LENGTHS) if (path / name).is_file()]
    for _, directory in _modules(path):
        if directory:
            inner = [f"{directory}/{name}" for name in ("config.json", "model.safetensors")]
            names += [name for name in inner if (path / name).is_file()]
    return tuple(names)


def from_gguf_metadata(metadata: Metadata, prefix: str) -> EmbeddingConfig | None:
    """Read ``PREFIX.pooling_type``; None: the model pools nothing, or has a classifier.

    Vectors are normalized, as llama.cpp's server does.

    Raises:
        CorruptArtifactError: the type is not known.
    """
    kind = metadata.integer(f"{prefix}.pooling_type", 0)
    if kind in (0, 4):
        return None
    if kind not in _GGUF_POOLINGS:
        raise metadata.corrupt(f"'{prefix}.pooling_type' is {kind}; 0 to 4 are expected")
    return EmbeddingConfig(_GGUF_POOLINGS[kind])


def _modules(path: Path) -> list[tuple[str, str]]:
    """Kind and directory of each module, in order; empty without ``modules.json``."""
    file = path / MODULES
    if not file.is_file():
        return []
    try:
        listed = json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise CorruptArtifactError(f"is not valid JSON ({error})", path=file) from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_MODULES:
        raise CorruptArtifactError(f"is not a list of 1 to {_MAX_MODULES} modules", path=file)
    modules = []
    for each in listed:
        match each:
            case {"type": str(type_), "path": str(directory)} if not _leaves(directory):
                modules.append((type_.rsplit(".", 1)[-1], directory))
            case _:
                raise CorruptArtifactError(f"has a malformed module {each!r:.80}", path=file)
    return modules


def _leaves(directory: str) -> bool:
    """True if a module's directory is not a plain name within the model's directory."""
    return directory not in ("", Path(directory).name) or directory == ".."


def _pooling(config: Metadata) -> Pooling:
    modes: Sequence[object]
    declared = config.values.get("pooling_mode")
    if declared is None:
        modes = [mode for flag, mode in _FORMER_MODES.items() if config.flag(flag, False)] or ["mean"]
    else:
        modes = declared if isinstance(declared, list) else [declared]
    [mode] = modes if len(modes) == 1 else [None]
    if mode not in _MODES:
        shown = " and ".join(str(each) for each in modes)
        raise config.unsupported(f"pools by {shown}; the supported modes are {', '.join(_MODES)}, one at a time")
    if not config.flag("include_prompt", True):
        raise config.unsupported("leaves the prompt's tokens out of the pooling, which is not supported")
    return _MODES[str(mode)]


def _dense(directory: Path) -> DenseLayer:
    config = read_json(directory / "config.json")
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise config.unsupported(f"has the activation {activation!r}; the supported ones are {', '.join(_ACTIVATIONS)}")
    if config.flag("use_residual", False):
        raise config.unsupported("adds its input to its output, which is not supported")
    file = directory / "model.safetensors"
    if not file.is_file():
        raise ArtifactNotFoundError("has no model.safetensors; pickles are never loaded: convert it", path=directory)
    tensors = read_safetensors(file)
    shape = (config.integer("out_features"), config.integer("in_features"))
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.shape != shape:
        raise CorruptArtifactError(f"has no linear.weight of shape {list(shape)}", path=file)
    if config.flag("bias", True) != (bias is not None) or (bias is not None and bias.shape != shape[:1]):
        raise CorruptArtifactError(f"has no linear.bias of {shape[0]} values, or one that is not declared", path=file)
    return DenseLayer(weight, bias, _ACTIVATIONS[activation])
