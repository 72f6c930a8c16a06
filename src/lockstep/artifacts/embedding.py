"""Vectors of models: reads how they are made, from the files of sentence-transformers and the metadata of GGUF.

sentence-transformers writes a list of modules (``modules.json``), each with its directory. The modules that are read
here are Transformer, Pooling (one mode), Dense (a layer on the pooled vector) and Normalize; a model with another one
is refused, because its vectors would be wrong without it. ``config_sentence_transformers.json`` has the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lockstep.artifacts.metadata import Metadata, read_bytes, read_json, read_optional_json
from lockstep.artifacts.model import DenseModule, EmbeddingConfig, HeadLayer, ModelConfig
from lockstep.artifacts.task import Pooling, Task
from lockstep.errors import ConfigError, CorruptArtifactError, UnsupportedArtifactError

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the maximum length of a text; the first one that exists is read. Later versions write only the first."""
_MAX_LENGTH = 1 << 31
"""A tokenizer without a limit declares one of 10^30."""
DENSE_WEIGHTS = "model.safetensors"
"""File with the tensors of a dense module, in its folder."""
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
_ACTIVATIONS: Mapping[str, str] = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu_erf", "SiLU": "silu"}
"""Names of `HeadLayer` by class of torch."""
_GGUF_POOLINGS: Mapping[int, Pooling] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
"""By ``pooling_type``; 0 is none and 4 is the score of a classifier."""


def read_sentence_transformers(path: Path) -> EmbeddingConfig | None:
    """Read a directory's modules; None: it has no ``modules.json``, or one without a pooling.

    Raises:
        CorruptArtifactError: a file is malformed, or a dense layer does not fit the vector before it.
        UnsupportedArtifactError: the model needs a module, a pooling mode or an activation that is not supported.
    """
    modules = _modules(path)
    prompts = read_optional_json(path / PROMPTS)
    pooling: Pooling | None = None
    answer_ids: tuple[int, int] | None = None
    dense: list[DenseModule] = []
    normalizes = False
    for kind, directory in modules:
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(read_json(path / directory / "config.json"))
            case "Dense":
                dense.append(_dense(path, directory))
            case "Normalize":
                normalizes = True
            case "LogitScore":
                answer_ids = _answer_ids(read_json(path / directory / "config.json"))
            case _:
                raise UnsupportedArtifactError(
                    f"uses the module {kind!r}; the supported ones are Transformer, Pooling, Dense, Normalize and "
                    "LogitScore",
                    path=path / MODULES,
                )
    if pooling is None and answer_ids is None:
        return None
    named = prompts.section("prompts")
    texts = {name: named.text(name) for name in named.values}
    default = prompts.text("default_prompt_name", "") or None
    if default is not None and default not in texts:
        raise prompts.corrupt(f"'default_prompt_name' is {default!r}, which is not among its prompts")
    return EmbeddingConfig(
        pooling=pooling or "last",
        normalize=normalizes,
        dense=tuple(dense),
        answer_ids=answer_ids,
        prompts=MappingProxyType(texts),
        default_prompt=default,
        max_tokens=max_tokens_of(path),
        lowercase=_lengths(path).flag("do_lower_case", False),
    )


def max_tokens_of(path: Path) -> int | None:
    """Maximum tokens of a text by the files of a directory: that of sentence-transformers, otherwise the tokenizer's.

    Raises:
        CorruptArtifactError: the number is negative, or a file is malformed.
    """
    lengths = _lengths(path)
    longest = lengths.integer("max_seq_length", 0)
    if longest < 0:
        raise lengths.corrupt(f"'max_seq_length' is {longest}; a number of tokens is expected")
    if longest:
        return longest
    declared = read_optional_json(path / "tokenizer_config.json").values.get("model_max_length")
    return declared if type(declared) is int and 1 <= declared < _MAX_LENGTH else None


def task_of(config: ModelConfig, embedding: EmbeddingConfig | None) -> Task:
    """Return the task of a model, by its configuration and by the files that describe its vectors."""
    if config.num_labels or (embedding is not None and embedding.answer_ids is not None):
        return "rerank"
    return "embed" if config.bidirectional or embedding is not None else "generate"


def check_encoder_task(config: ModelConfig, task: Task) -> None:
    """Check that an encoder can have a task that was requested in place of its own.

    Raises:
        ConfigError: it generates no text, or has no classifier for scores.
    """
    if task == "generate":
        raise ConfigError(
            f"task is 'generate', but {config.architecture} is an encoder and generates no text; leave the task out"
        )
    if task == "rerank" and not config.num_labels:
        raise ConfigError(
            "task is 'rerank', but this encoder has no classifier for pairs of texts; leave the task out: an embedding "
            "model scores documents by the cosines of their vectors"
        )


def embedding_of(
    config: ModelConfig, embedding: EmbeddingConfig | None, max_tokens: int | None = None
) -> EmbeddingConfig | None:
    """Return how a model makes vectors; None: its files do not describe it.

    An encoder without a description pools the mean, as sentence-transformers does. A classifier has its own pooling.

    Args:
        max_tokens: maximum tokens of a text, for a model without a description.
    """
    if config.num_labels:
        pooling: Pooling = "mean" if config.classifier_pooling == "mean" else "cls"
        return EmbeddingConfig(pooling, normalize=False, max_tokens=max_tokens)
    return EmbeddingConfig(max_tokens=max_tokens) if embedding is None and config.bidirectional else embedding


def with_dense_modules(config: ModelConfig, modules: Sequence[DenseModule], path: Path) -> ModelConfig:
    """Add the layers of dense modules to the head of an encoder.

    Raises:
        UnsupportedArtifactError: the model is a decoder.
    """
    if modules and not config.bidirectional:
        raise UnsupportedArtifactError(
            "has dense modules behind a decoder, which is not supported", path=path / MODULES
        )
    return replace(config, head=config.head + tuple(module.layer for module in modules))


def files_of(path: Path) -> tuple[str, ...]:
    """Names of the files in a directory that decide how vectors are made, for the model's fingerprint."""
    if not (path / MODULES).is_file():
        return ()
    names = [name for name in (MODULES, PROMPTS, *LENGTHS) if (path / name).is_file()]
    for _, directory in _modules(path):
        if directory:
            inner = [f"{directory}/{name}" for name in ("config.json", DENSE_WEIGHTS)]
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


def _lengths(path: Path) -> Metadata:
    """Length and case of texts; empty without modules."""
    names = [name for name in LENGTHS if (path / name).is_file()] if (path / MODULES).is_file() else []
    return read_json(path / names[0]) if names else Metadata(path / LENGTHS[0], {})


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


def _answer_ids(declared: Metadata) -> tuple[int, int]:
    ids = (declared.integer("true_token_id"), declared.integer("false_token_id", -1))
    if ids[1] < 0:
        raise declared.unsupported("scores by the logit of one token; two tokens are supported")
    if ids[0] < 0:
        raise declared.corrupt(f"'true_token_id' is {ids[0]}; a token id is expected")
    return ids


def _dense(path: Path, folder: str) -> DenseModule:
    if not folder:
        raise CorruptArtifactError("has a dense module without a folder", path=path / MODULES)
    declared = read_json(path / folder / "config.json")
    activation = declared.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise declared.unsupported(f"has the activation {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    if declared.flag("use_residual", False):
        raise declared.unsupported("adds its input to its output, which is not supported")
    size = declared.integer("out_features")
    if size < 1:
        raise declared.corrupt(f"'out_features' is {size}; at least 1 is expected")
    return DenseModule(folder, HeadLayer(size, _ACTIVATIONS[activation], declared.flag("bias", True)))
