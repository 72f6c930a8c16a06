"""Hugging Face artifacts: read a directory with config.json, safetensors (sharded or not), tokenizer and defaults.

`huggingface_config` reads the configuration. The safetensors format is described in the README of
huggingface/safetensors: a length, a JSON header and the data, which are memory-mapped. The `safetensors` package is not
used, because its numpy interface copies every tensor and does not support bfloat16. The tests compare with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.dense_modules import MODULES, DenseModule, dense_modules
from lockstep.artifacts.encoders import canonical_tensors
from lockstep.artifacts.fingerprint import files_fingerprint
from lockstep.artifacts.generation_config import end_token_ids, from_generation_config
from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.layout import MappedWeights, check_config, check_tensors, split_fused
from lockstep.artifacts.metadata import Metadata, parse_object, read_bytes, read_json, read_optional_json
from lockstep.artifacts.model import Artifact, Encoding, Tensor, TokenizerParts
from lockstep.artifacts.tensors import FLOAT_TYPES, MappedTensors, num_stored_bytes
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, MissingTokenizerError, UnsupportedArtifactError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INDEX = "model.safetensors.index.json"
DENSE_WEIGHTS = "model.safetensors"
"""File with the tensors of a dense module, in its folder."""
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files other than the weights that are read here and affect the model's behavior."""
_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size, defined by the format."""
_MAX_DIMENSIONS = 4
_ENCODINGS: Mapping[str, Encoding] = {encoding.value: encoding for encoding in FLOAT_TYPES}
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def open_huggingface(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a directory that contains a config.json.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: the error names the invalid file.
    """
    declared = read_json(path / "config.json")
    config = read_config(declared)
    modules = dense_modules(path) if config.bidirectional and not config.num_labels else []
    config = replace(config, head=config.head + tuple(module.layer for module in modules))
    check_config(config, declared.path)
    generation = read_optional_json(path / "generation_config.json")
    defaults = from_generation_config(generation.values, generation.path)
    files = weight_files(path)
    tensors = _read_all(path, files)
    if config.bidirectional:
        tensors = canonical_tensors(config, tensors) | _dense_tensors(path, modules)
    tensors = split_fused(config, tensors, path)
    check_tensors(config, tensors, path)
    small = [name for name in SMALL_FILES if (path / name).is_file()]
    if config.bidirectional:
        small += [MODULES] if (path / MODULES).is_file() else []
        small += [f"{module.folder}/config.json" for module in modules]
        files = [*files, *(f"{module.folder}/{DENSE_WEIGHTS}" for module in modules)]
    return Artifact(
        source=source,
        name=path.absolute().name,
        path=path,
        format="safetensors",
        fingerprint=files_fingerprint(path, [*small, *files], cache_dir),
        num_bytes=sum((path / name).stat().st_size for name in files),
        config=config,
        weights=MappedWeights(path, tensors),
        load_tokenizer=functools.partial(read_tokenizer, path, config.vocab_size, (declared, generation)),
        sampling_defaults=defaults,
    )


def _dense_tensors(path: Path, modules: Sequence[DenseModule]) -> dict[str, Tensor]:
    """Tensors of the dense modules under their canonical names."""
    tensors: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        file = path / module.folder / DENSE_WEIGHTS
        found = read_safetensors(file)
        for name, canonical in module.names(index).items():
            if name not in found:
                raise CorruptArtifactError(f"has no tensor {name!r}", path=file)
            tensors[canonical] = replace(found[name], name=canonical)
    return tensors


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files of the model: those in the index, or the only one.

    Raises:
        ArtifactNotFoundError: there are none.
        CorruptArtifactError: the index has entries that are not plain file names.
    """
    if (path / _INDEX).is_file():
        shards = read_json(path / _INDEX).section("weight_map").values
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CorruptArtifactError(f"has a shard {name!r}; plain .safetensors names are expected", path=path)
        if names:
            return names
    single = [entry.name for entry in sorted(path.glob("*.safetensors"))]
    if "model.safetensors" in single:
        return ["model.safetensors"]
    if len(single) == 1:
        return single
    if single:
        raise ArtifactNotFoundError(f"{len(single)} .safetensors files but no {_INDEX} to select them", path=path)
    others = [entry.name for entry in sorted(path.iterdir()) if entry.suffix in (".bin", ".pt", ".pth")]
    hint = f" ({others[0]} is a pickle, which is never loaded: convert it)" if others else ""
    raise ArtifactNotFoundError(f"has no *.safetensors{hint}", path=path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file in header order, as views that keep the memory map open.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: the file is truncated or inconsistent.
        UnsupportedArtifactError: a dtype is not supported.
    """
    file = MappedTensors(path, 8, "a safetensors header")
    header_bytes = int.from_bytes(file.buffer[:8], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(file.buffer) - 8):
        raise CorruptArtifactError(
            f"declares a header of {header_bytes} bytes in a file of {len(file.buffer)}; is the download complete?",
            path=path,
        )
    header = parse_object(file.buffer[8 : 8 + header_bytes], path)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        encoding, shape, begin = _entry(name, entry, path)
        file.add(name, encoding, shape, 8 + header_bytes + begin)
    return file.tensors()


def read_tokenizer(directory: Path, vocab_size: int, declared: Sequence[Metadata]) -> TokenizerParts:
    """Read a directory's tokenizer. The post-processor in tokenizer.json determines whether it adds BOS.

    Args:
        directory: directory with tokenizer.json.
        vocab_size: number of rows of the embedding. All token ids must be smaller.
        declared: config.json and generation_config.json, for their ``eos_token_id``.

    Raises:
        MissingTokenizerError: there is no tokenizer.json.
        CorruptArtifactError: the tokenizer cannot be parsed or does not match the weights.
    """
    tokenizer = _load(directory, vocab_size)
    settings = read_optional_json(directory / "tokenizer_config.json")
    bos, eos = _token_text(settings, "bos_token"), _token_text(settings, "eos_token")
    named = [index for source in declared for index in _end_ids(source) if 0 <= index < vocab_size]
    eos_id = None if eos is None else tokenizer.token_to_id(eos)
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: index for index, token in added.items() if token.special}
    return TokenizerParts(
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, settings),
        bos_token=bos,
        eos_token=eos,
        end_token_ids=end_token_ids(named if eos_id is None else [*named, eos_id], special),
    )


def _read_all(path: Path, files: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in files:
        found = read_safetensors(path / name)
        twice = tensors.keys() & found.keys()
        if twice:
            raise CorruptArtifactError(f"tensor {min(twice)!r} is also in an earlier shard", path=path / name)
        tensors |= found
    return tensors


def _entry(name: str, entry: object, path: Path) -> tuple[Encoding, tuple[int, ...], int]:
    """Encoding, shape and offset in the data part. The size is checked against the shape."""
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CorruptArtifactError(f"the header entry of tensor {name!r} is malformed", path=path)
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and length > 0 for length in shape):
        raise CorruptArtifactError(f"tensor {name!r} has shape {shape}", path=path)
    if dtype_name not in _ENCODINGS:
        raise UnsupportedArtifactError(
            f"tensor {name!r} is {dtype_name}; the types that are read are {', '.join(_ENCODINGS)}", path=path
        )
    encoding = _ENCODINGS[dtype_name]
    num_bytes = num_stored_bytes(encoding, tuple(shape))
    if begin < 0 or end - begin != num_bytes:
        raise CorruptArtifactError(
            f"tensor {name!r} of shape {shape} lies at {begin}..{end}; {num_bytes} bytes are expected", path=path
        )
    return encoding, tuple(shape), begin


def _load(directory: Path, vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in _OTHER_VOCABULARIES if (directory / name).is_file()]
        hint = f"; {others[0]} is not sufficient; save a fast tokenizer with transformers" if others else ""
        raise MissingTokenizerError(f"has no tokenizer.json{hint}", path=directory)
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path))
    except Exception as error:  # the library raises nothing more specific
        raise CorruptArtifactError(f"is not a tokenizer ({error})", path=path) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise CorruptArtifactError(
            f"the largest token id is {largest} and the embedding has {vocab_size} rows", path=path
        )
    return tokenizer


def _token_text(settings: Metadata, key: str) -> str | None:
    """Text of a token setting: a string, or an object with its content."""
    if isinstance(settings.values.get(key), dict):
        return settings.section(key).text("content")
    return settings.text(key, "") or None


def _end_ids(source: Metadata) -> Iterator[int]:
    value = source.values.get("eos_token_id", [])
    for index in value if isinstance(value, list) else [value]:
        if type(index) is not int:
            raise source.corrupt(f"'eos_token_id' has {index!r}; token ids are expected")
        yield index


def _chat_template(directory: Path, settings: Metadata) -> str | None:
    """chat_template.jinja, otherwise the template in tokenizer_config.json: a string, or a list's entry `default`."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise CorruptArtifactError("is not UTF-8", path=path) from error
    listed = settings.values.get("chat_template")
    if isinstance(listed, list):
        for entry in listed:
            match entry:
                case {"name": "default", "template": str(template)}:
                    return template
        return None
    return settings.text("chat_template", "") or None
