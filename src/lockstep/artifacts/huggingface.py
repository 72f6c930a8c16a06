"""Hugging Face artifacts: read a directory with config.json, safetensors (sharded or not), tokenizer and defaults.

`huggingface_config` reads the configuration, `safetensors_file` the tensors, and `embedding` how vectors are made.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.charsmap import charsmap_fault, charsmaps_of
from lockstep.artifacts.embedding import (
    DENSE_WEIGHTS,
    embedding_of,
    files_of,
    max_tokens_of,
    read_sentence_transformers,
    scores_are_raw,
    task_of,
    with_dense_modules,
)
from lockstep.artifacts.encoders import canonical_tensors
from lockstep.artifacts.fingerprint import files_fingerprint
from lockstep.artifacts.generation_config import end_token_ids, from_generation_config
from lockstep.artifacts.huggingface_config import has_head, read_config, text_part
from lockstep.artifacts.hybrids import huggingface_tensors
from lockstep.artifacts.layout import HEAD, LM_HEAD, MappedWeights, check_config, check_tensors, split_fused
from lockstep.artifacts.metadata import Metadata, read_bytes, read_json, read_optional_json
from lockstep.artifacts.model import Artifact, DenseModule, EmbeddingConfig, Tensor, TokenizerParts
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, MissingTokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INDEX = "model.safetensors.index.json"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files other than the weights that are read here and affect the model's behavior."""
_PREFIX = "model."
_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": _PREFIX}
"""Beginnings of the names of a language model's tensors beside other towers, and those of a model of its own."""
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def open_huggingface(path: Path, source: str, cache_dir: Path) -> Artifact:
    """Open and check a directory that contains a config.json.

    Raises:
        ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError: the error names the invalid file.
    """
    declared = text_part(read_json(path / "config.json"))
    config = read_config(declared)
    row = ARCHITECTURES[config.architecture]
    embedding = read_sentence_transformers(path)
    if embedding is None and not has_head(declared):
        embedding = EmbeddingConfig(max_tokens=max_tokens_of(path))
    modules = () if embedding is None or config.num_labels else embedding.dense
    config = with_dense_modules(config, modules, path)
    check_config(config, declared.path)
    is_raw = task_of(config, embedding) == "rerank" and config.num_labels <= 1 and scores_are_raw(path, declared)
    generation = read_optional_json(path / "generation_config.json")
    defaults = from_generation_config(generation.values, generation.path)
    files = weight_files(path)
    tensors = _read_all(path, files)
    if any(name.startswith(tuple(_TEXT_PREFIXES)) for name in tensors):
        tensors = _text_tensors(tensors)
        # Both configurations may have the flag, with different defaults. A head that is stored is used.
        config = replace(config, tied_embeddings=LM_HEAD not in tensors)
    if config.bidirectional:
        tensors = canonical_tensors(config, tensors) | _dense_tensors(path, modules)
    elif embedding is not None and embedding.answer_ids is None:
        tensors = _without_head(tensors)
        config = replace(config, tied_embeddings=config.tied_embeddings or LM_HEAD not in tensors)
    if row.recurrent:
        tensors = huggingface_tensors(config, tensors)
    tensors = split_fused(config, tensors, path)
    check_tensors(config, tensors, path)
    small = [name for name in SMALL_FILES if (path / name).is_file()]
    return Artifact(
        source=source,
        name=path.absolute().name,
        path=path,
        format="safetensors",
        fingerprint=files_fingerprint(path, [*small, *files_of(path), *files], cache_dir),
        num_bytes=sum(
            (path / name).stat().st_size
            for name in [*files, *(f"{module.folder}/{DENSE_WEIGHTS}" for module in modules)]
        ),
        config=config,
        weights=MappedWeights(path, tensors),
        load_tokenizer=functools.partial(
            read_tokenizer, path, config.vocab_size, (declared, generation), embedding, has_raw_scores=is_raw
        ),
        sampling_defaults=defaults,
        task=task_of(config, embedding),
        embedding=embedding_of(config, embedding, max_tokens_of(path)),
    )


def _text_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the language model of a model that also takes images or sound, in the spelling of any version."""
    text: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for prefix, own in {**_TEXT_PREFIXES, LM_HEAD: LM_HEAD}.items():
            if name.startswith(prefix):
                renamed = own + name.removeprefix(prefix)
                text[renamed] = replace(tensor, name=renamed)
    return text


def _without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a decoder that only makes vectors. It may be stored without its head, and then its names lack their
    beginning, as those of Qwen3-Embedding do."""
    if any(name.startswith(_PREFIX) for name in tensors):
        return tensors
    names = {name: name if name == LM_HEAD else _PREFIX + name for name in tensors}
    return {new: replace(tensors[name], name=new) for name, new in names.items()}


def _dense_names(module: DenseModule, index: int) -> dict[str, str]:
    """Canonical names of a dense module's tensors as the layer ``index`` of a head, by their names in its file."""
    kinds = ("weight", "bias") if module.layer.bias else ("weight",)
    return {f"linear.{kind}": f"{HEAD}{index}.{kind}" for kind in kinds}


def _dense_tensors(path: Path, modules: Sequence[DenseModule]) -> dict[str, Tensor]:
    """Tensors of the dense modules under their canonical names."""
    tensors: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        file = path / module.folder / DENSE_WEIGHTS
        found = read_safetensors(file)
        for name, canonical in _dense_names(module, index).items():
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


def read_tokenizer(
    directory: Path,
    vocab_size: int,
    declared: Sequence[Metadata],
    embedding: EmbeddingConfig | None = None,
    *,
    has_raw_scores: bool = False,
) -> TokenizerParts:
    """Read a directory's tokenizer. The post-processor in tokenizer.json determines whether it adds BOS.

    Args:
        directory: directory with tokenizer.json.
        vocab_size: number of rows of the embedding. All token ids must be smaller.
        declared: config.json and generation_config.json, for their ``eos_token_id``.
        embedding: the model's prompts for texts to embed.
        has_raw_scores: whether the scores of a reranker are its logits.

    Raises:
        MissingTokenizerError: there is no tokenizer.json.
        CorruptArtifactError: the tokenizer cannot be parsed or does not match the weights.
    """
    tokenizer = _load(directory, vocab_size)
    if embedding is not None and embedding.lowercase:
        _lower(tokenizer)
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
        prompts={} if embedding is None else embedding.prompts,
        default_prompt=None if embedding is None else embedding.default_prompt,
        answer_ids=None if embedding is None else embedding.answer_ids,
        has_raw_scores=has_raw_scores,
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
    for charsmap in charsmaps_of(tokenizer):
        fault = charsmap_fault(charsmap)
        if fault is not None:
            raise CorruptArtifactError(f"has a precompiled character map that {fault}", path=path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise CorruptArtifactError(
            f"the largest token id is {largest} and the embedding has {vocab_size} rows", path=path
        )
    return tokenizer


def _lower(tokenizer: Tokenizer) -> None:
    """Put texts into lower case before the tokenizer's other steps."""
    from tokenizers import normalizers

    own = tokenizer.normalizer
    lower = normalizers.Lowercase()
    tokenizer.normalizer = lower if own is None else normalizers.Sequence([lower, own])


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
