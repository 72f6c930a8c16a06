"""A directory in Hugging Face layout as an artifact: config.json, safetensors (sharded or not), generation_config.json.

Knows no configuration (`huggingface_config`) and no tokenizer (`tokenizer_json`).
"""

from __future__ import annotations

import functools
from pathlib import Path

from lockstep.artifacts.fingerprint import files_fingerprint
from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.json_file import read_json, read_optional_json
from lockstep.artifacts.layout import check_config, check_tensors
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Artifact, Tensor, TokenizerParts
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.artifacts.sampling_defaults import from_generation_config
from lockstep.artifacts.weights import MappedWeights, split_fused
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError

_INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""What changes a model's behaviour beside its weights, as far as it is read here."""


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
    tensors = split_fused(config, _read_all(path, files), path)
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


def load_tokenizer(path: Path, vocab_size: int, declared: tuple[Metadata, ...]) -> TokenizerParts:
    """The tokenizer of a directory; its library is imported here and not before."""
    from lockstep.artifacts.tokenizer_json import read_tokenizer

    return read_tokenizer(path, vocab_size, declared)
