"""A directory in Hugging Face layout as an artifact: config.json, safetensors (sharded or not), generation_config.json.

Field names: transformers' configuration classes; both the older `rope_theta` and `rope_scaling` and the newer
`rope_parameters` are read. Knows no tokenizer (`tokenizer_json`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from lockstep.artifacts.fingerprint import files_fingerprint
from lockstep.artifacts.json_file import read_json, read_optional_json
from lockstep.artifacts.layout import check_config, check_tensors
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Artifact, ModelConfig, RopeScaling, Tensor, TokenizerParts
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.artifacts.sampling_defaults import from_generation_config
from lockstep.artifacts.weights import MappedWeights
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError

ARCHITECTURES: Mapping[str, str] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Class name in config.json: our architecture."""
_INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What changes a model's behaviour beside its weights, as far as it is read here."""
_LLAMA3_PARAMETERS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def open_huggingface(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a directory that holds a config.json.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: naming the file at fault.
    """
    declared = read_json(path / "config.json")
    config = read_config(declared)
    check_config(config, declared.path)
    generation = read_optional_json(path / "generation_config.json")
    defaults = from_generation_config(generation.values, generation.path)
    files = weight_files(path)
    tensors = _read_all(path, files)
    check_tensors(config, tensors, path)
    small = [name for name in SMALL_FILES if (path / name).is_file()]
    return Artifact(
        source=source,
        name=path.absolute().name,
        path=path,
        format="safetensors",
        fingerprint=files_fingerprint(path, [*small, *files], cache_dir),
        num_bytes=sum((path / name).stat().st_size for name in files),
        config=config,
        weights=MappedWeights(path, tensors),
        load_tokenizer=functools.partial(load_tokenizer, path, config.vocab_size, (declared, generation)),
        sampling_defaults=defaults,
    )


def read_config(declared: Metadata) -> ModelConfig:
    """config.json as data.

    Raises:
        UnsupportedArtifactError: an architecture or a variant that we do not know, by name.
        CorruptArtifactError: a value is missing or of the wrong kind.
    """
    architecture = _architecture(declared)
    _refuse_variants(declared, architecture)
    hidden_size = declared.integer("hidden_size")
    num_heads = declared.integer("num_attention_heads")
    head_dim = 128 if architecture == "qwen3" else hidden_size // max(num_heads, 1)
    rope = declared.section("rope_parameters") if "rope_parameters" in declared.values else None
    rope = declared.section("rope_scaling") if rope is None else rope
    return ModelConfig(
        architecture=architecture,
        num_layers=declared.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=declared.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=declared.integer("num_key_value_heads", num_heads),
        head_dim=declared.integer("head_dim", head_dim),
        vocab_size=declared.integer("vocab_size"),
        max_model_len=declared.integer("max_position_embeddings"),
        rms_norm_eps=declared.real("rms_norm_eps", 1e-6),
        rope_theta=rope.real("rope_theta", declared.real("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, declared),
        tied_embeddings=declared.flag("tie_word_embeddings", False),
        attention_bias=declared.flag("attention_bias", False),
        qk_norm=architecture == "qwen3",
    )


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files that make up the model: the index's, or the only one.

    Raises:
        ArtifactNotFoundError: there are none.
        CorruptArtifactError: the index names files that are not plain names.
    """
    if (path / _INDEX).is_file():
        shards = read_json(path / _INDEX).section("weight_map").values
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CorruptArtifactError(f"names a shard {name!r}; plain .safetensors names are expected", path=path)
        if names:
            return names
    single = [entry.name for entry in sorted(path.glob("*.safetensors"))]
    if "model.safetensors" in single:
        return ["model.safetensors"]
    if len(single) == 1:
        return single
    if single:
        raise ArtifactNotFoundError(f"{len(single)} .safetensors files and no {_INDEX} to say which belong", path=path)
    others = [entry.name for entry in sorted(path.iterdir()) if entry.suffix in (".bin", ".pt", ".pth")]
    hint = f" ({others[0]} is a pickle, which is never loaded: convert it)" if others else ""
    raise ArtifactNotFoundError(f"holds no *.safetensors{hint}", path=path)


def _read_all(path: Path, files: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in files:
        found = read_safetensors(path / name)
        twice = tensors.keys() & found.keys()
        if twice:
            raise CorruptArtifactError(f"tensor {min(twice)!r} is in an earlier shard too", path=path / name)
        tensors |= found
    return tensors


def _architecture(declared: Metadata) -> str:
    """By class name where config.json has one (a model type is shared by classifiers and the like)."""
    known = ", ".join(ARCHITECTURES)
    if "architectures" in declared.values:
        names = declared.strings("architectures")
        for name in names:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        raise UnsupportedArtifactError(
            f"architecture {' or '.join(names) or 'of no name'}; the known ones are {known}", path=declared.path
        )
    model_type = declared.text("model_type")
    if model_type not in ARCHITECTURES.values():
        raise UnsupportedArtifactError(f"model type {model_type!r}; the known ones are {known}", path=declared.path)
    return model_type


def _refuse_variants(declared: Metadata, architecture: str) -> None:
    """What would change the forward pass and is not computed."""
    problem = None
    activation = declared.text("hidden_act", "silu")
    if activation != "silu":
        problem = f"activation {activation!r}; silu is supported"
    elif declared.flag("mlp_bias", False):
        problem = "mlp_bias; feed-forward layers without biases are supported"
    elif "quantization_config" in declared.values:
        method = declared.section("quantization_config").values.get("quant_method", "unknown")
        problem = f"weights quantised by {method!r}; float safetensors, or a GGUF file, are supported"
    elif architecture == "qwen3" and (
        declared.flag("use_sliding_window", False) or "sliding_attention" in str(declared.values.get("layer_types"))
    ):
        problem = "sliding window attention; full attention is supported"
    if problem is not None:
        raise UnsupportedArtifactError(problem, path=declared.path)


def _rope_scaling(rope: Metadata, declared: Metadata) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    for section in (rope, declared):
        if section.real("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedArtifactError("rope on a part of each head; on the whole is supported", path=rope.path)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UnsupportedArtifactError("rope parameters that differ by layer; equal ones are supported", path=rope.path)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, rope.real("factor"))
    if kind != "llama3":
        raise UnsupportedArtifactError(f"rope type {kind!r}; default, linear and llama3 are known", path=rope.path)
    trained = declared.integer("original_max_position_embeddings", declared.integer("max_position_embeddings"))
    parameters = {name: rope.real(name) for name in _LLAMA3_PARAMETERS[:2]}
    parameters[_LLAMA3_PARAMETERS[2]] = rope.real(_LLAMA3_PARAMETERS[2], trained)
    if parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise CorruptArtifactError("low_freq_factor is not below high_freq_factor", path=rope.path)
    return RopeScaling(kind, rope.real("factor"), parameters)


def load_tokenizer(path: Path, vocab_size: int, declared: tuple[Metadata, ...]) -> TokenizerParts:
    """The tokenizer of a directory; its library is imported here and not before."""
    from lockstep.artifacts.tokenizer_json import read_tokenizer

    return read_tokenizer(path, vocab_size, declared)
