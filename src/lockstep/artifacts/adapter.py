"""LoRA adapters: opens PEFT directories and GGUF files, and checks them against the model that they adapt.

An adapter changes products of a model's layers: y = x W^T becomes y + scale * (x A^T) B^T. Names, shapes, layers and
ranks are compared with those of the model, and all numbers must be finite, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.adapter_files import MAX_RANK, PEFT_CONFIG, AdapterFiles, read_gguf_adapter, read_peft
from lockstep.artifacts.architectures import ARCHITECTURES
from lockstep.artifacts.fingerprint import MappedFile, file_fingerprint, files_fingerprint, merged_fingerprint
from lockstep.artifacts.gguf import canonical_tensors
from lockstep.artifacts.hub.source import SCHEME, DownloadProgress, HubSource, parse_hub_source
from lockstep.artifacts.hybrids import KERNELS, huggingface_tensors
from lockstep.artifacts.layout import expected_tensors, rotate_half_rows, split_fused
from lockstep.artifacts.model import Adapter, AdapterTarget, Artifact, Encoding, ModelConfig, Tensor
from lockstep.artifacts.tensors import FLOAT_TYPES
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from lockstep.pocket import SCHEME as EMBEDDED
from lockstep.pocket import adapter_path

_LAYERS = "model.layers."
_TILED = ".linear_attn."
_BRAIN_INFINITY = 0x7F80
"""Exponent bits of a bfloat16; all of them are set in infinity and NaN."""
MERGED_ENCODINGS = (*FLOAT_TYPES, Encoding.Q8_0)
"""Encodings of weights that adapters can be merged into."""


def open_adapter(
    source: str | Path, base: Artifact, *, cache_dir: Path | None = None, progress: DownloadProgress | None = None
) -> Adapter:
    """Open an adapter and check it against the model that it adapts.

    Args:
        source: a PEFT directory, a GGUF file, ``hf://org/name[@revision][#file]``, or ``pocket://NAME``.
        base: the model.
        cache_dir: directory of cached fingerprints; default: the user's cache directory.
        progress: called during the download of an adapter from the hub.

    Raises:
        ArtifactNotFoundError: the source does not exist, or is not an adapter.
        DownloadError: the hub cannot be reached or rejects the request.
        CorruptArtifactError: the adapter is truncated or inconsistent, or belongs to another model.
        UnsupportedArtifactError: the adapter is valid, but of an unsupported kind; the error names the setting.
    """
    hub = parse_hub_source(str(source)) if str(source).startswith(SCHEME) else None
    path = _local_path(source) if hub is None else _downloaded(hub, progress)
    files = _read(path)
    _check_base(files, base)
    targets = dict(_targets(files, base))
    expected = [name for name in expected_tensors(base.config) if name in targets]
    cache = _default_cache_dir() if cache_dir is None else cache_dir
    return Adapter(
        name=path.stem if path.is_file() else path.absolute().name if hub is None else hub.name,
        path=path,
        fingerprint=(
            file_fingerprint(path, cache)
            if len(files.files) == 1
            else files_fingerprint(path, [each.name for each in files.files], cache)
        ),
        rank=files.rank,
        scale=files.scale,
        targets={name: targets[name] for name in expected},
        num_bytes=sum(2 * (each.a.data.size + each.b.data.size) for each in targets.values()),
        invocation_ids=files.invocation_ids,
        weights_file=MappedFile.of(files.weights_path, cache),
    )


def merged(base: Artifact, adapter: Adapter) -> Artifact:
    """Return the model whose load adds an adapter to the weights. Its fingerprint is that of neither part.

    Raises:
        UnsupportedArtifactError: the adapter applies to some tokens only, or the weights have too few bits.
    """
    if adapter.invocation_ids:
        raise UnsupportedArtifactError(
            "has invocation tokens (aLoRA), so tokens before them have the weights of the base, and it cannot be "
            "merged; load it beside its base, with --lora-modules or `adapter:`",
            path=adapter.path,
        )
    for name in adapter.targets:
        encoding = base.weights[name].encoding
        if encoding not in MERGED_ENCODINGS:
            raise UnsupportedArtifactError(
                f"adapts {name!r}, which is {encoding.value} in {base.name!r} and would be quantised a second time; "
                f"adapters are merged into {', '.join(each.value for each in MERGED_ENCODINGS)}. Load it beside its "
                "base, with --lora-modules or `adapter:`, or merge it into a 16-bit model and add --quantize int4",
                path=adapter.path,
            )
    return replace(
        base,
        name=f"{base.name}+{adapter.name}",
        fingerprint=merged_fingerprint(base.fingerprint, adapter.fingerprint),
        adapters=(*base.adapters, adapter),
    )


def _local_path(source: str | Path) -> Path:
    return adapter_path(str(source)) if str(source).startswith(EMBEDDED) else Path(source).expanduser()


def _downloaded(source: HubSource, progress: DownloadProgress | None) -> Path:
    from lockstep.artifacts.hub.download import adapter_path as downloaded_path

    return downloaded_path(source, progress or (lambda name, have, total: None))


def _default_cache_dir() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("lockstep")


def _read(path: Path) -> AdapterFiles:
    try:
        if path.is_dir():
            if not (path / PEFT_CONFIG).is_file():
                raise ArtifactNotFoundError(f"has no {PEFT_CONFIG}; a PEFT directory is expected", path=path)
            return read_peft(path)
        if path.is_file():
            return read_gguf_adapter(path)
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror or error})", path=path) from error
    raise ArtifactNotFoundError(
        "no such file or directory; an adapter is a PEFT directory (adapter_config.json, adapter_model.safetensors) or "
        "a .gguf file",
        path=path,
    )


def _check_base(files: AdapterFiles, base: Artifact) -> None:
    config = base.config
    if config.bidirectional:
        raise UnsupportedArtifactError(
            f"the base {base.name!r} is an encoder ({config.architecture}); adapters of decoders are supported",
            path=files.path,
        )
    is_known_to_gguf = ARCHITECTURES[config.architecture].in_gguf
    if files.architecture is not None and is_known_to_gguf and files.architecture != config.architecture:
        raise CorruptArtifactError(
            f"general.architecture is {files.architecture!r}; the base {base.name!r} is {config.architecture!r}",
            path=files.path,
        )
    for token in files.invocation_ids:
        if token >= config.vocab_size:
            raise CorruptArtifactError(
                f"invocation token {token} is not in the vocabulary of {config.vocab_size} of the base {base.name!r}",
                path=files.path,
            )


def _targets(files: AdapterFiles, base: Artifact) -> Iterator[tuple[str, AdapterTarget]]:
    """The changes by canonical name, with the parts of fused products side by side as the base has them."""
    config, seen = base.config, set[str]()
    expected = expected_tensors(config)
    for stored, (a, b) in files.pairs.items():
        rank, scale = files.ranks[stored], files.scales[stored]
        _check_rank(files, stored, rank, a, b)
        canonical = _canonical(files, config, replace(b, name=stored))
        for name, part in split_fused(config, {canonical.name: canonical}, files.weights_path).items():
            if name in seen:
                raise CorruptArtifactError(f"{stored!r} adapts {name!r}, which is adapted twice", path=files.path)
            seen.add(name)
            _check_target(files, base, name, expected.get(name), a, part)
            yield name, AdapterTarget(replace(a, name=f"{name} (A)"), _in_order(files, config, name, part), scale)


def _canonical(files: AdapterFiles, config: ModelConfig, tensor: Tensor) -> Tensor:
    """A tensor under its canonical name; an unknown name stays and is refused."""
    if files.architecture is not None:
        renamed = canonical_tensors({tensor.name: tensor}, files.architecture)
    elif ARCHITECTURES[config.architecture].recurrent:
        renamed = huggingface_tensors(config, {tensor.name: tensor})
    else:
        return tensor
    return next(iter(renamed.values()), tensor)


def _check_rank(files: AdapterFiles, name: str, rank: int, a: Tensor, b: Tensor) -> None:
    for part, tensor in (("A", a), ("B", b)):
        if tensor.encoding not in FLOAT_TYPES:
            raise UnsupportedArtifactError(
                f"{part} of {name!r} is {tensor.encoding.value}; F32, F16 and BF16 are supported",
                path=files.weights_path,
            )
        if len(tensor.shape) != 2:
            raise CorruptArtifactError(
                f"{part} of {name!r} has shape {list(tensor.shape)}; a matrix is expected", path=files.weights_path
            )
    if not a.shape[0] == b.shape[1] == rank or rank > MAX_RANK:
        raise CorruptArtifactError(
            f"A of {name!r} has {a.shape[0]} rows and B {b.shape[1]} columns; the rank is {rank}, and at most "
            f"{MAX_RANK}",
            path=files.weights_path,
        )


def _check_target(
    files: AdapterFiles, base: Artifact, name: str, shape: tuple[int, ...] | None, a: Tensor, b: Tensor
) -> None:
    """Check that the base has a product of that name and shape, and that all numbers are finite."""
    where, config = files.weights_path, base.config
    base_text = f"the base {base.name!r} ({config.architecture}, {config.num_layers} layers)"
    if shape is None or not name.startswith(_LAYERS):
        raise UnsupportedArtifactError(f"adapts {name!r}, which is not a product of a layer of {base_text}", path=where)
    if len(shape) != 2 or name.endswith(KERNELS):
        raise UnsupportedArtifactError(f"adapts {name!r}; products of layers are supported", path=where)
    if (b.shape[0], a.shape[1]) != shape:
        raise CorruptArtifactError(
            f"adapts {name!r} as a matrix of shape {[b.shape[0], a.shape[1]]}; that of {base_text} has {list(shape)}",
            path=where,
        )
    is_gguf = files.architecture is not None
    if _TILED in name and is_gguf != (base.format == "gguf"):
        raise UnsupportedArtifactError(
            f"adapts {name!r}, whose heads have another order in {base.format}; convert the adapter to that format",
            path=where,
        )
    for part, tensor in (("A", a), ("B", b)):
        if not _is_finite(tensor):
            raise CorruptArtifactError(f"{part} of {name!r} holds NaN or infinity", path=where)


def _is_finite(tensor: Tensor) -> bool:
    if tensor.encoding is Encoding.BF16:
        return bool(((tensor.data.view(np.uint16) & _BRAIN_INFINITY) != _BRAIN_INFINITY).all())
    return bool(np.isfinite(tensor.data.astype(np.float32, copy=False)).all())


def _in_order(files: AdapterFiles, config: ModelConfig, name: str, b: Tensor) -> Tensor:
    """B with rows in the order of the base's features: GGUF permutes queries and keys as it does in models."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    row = ARCHITECTURES.get(files.architecture or "")
    named = replace(b, name=f"{name} (B)")
    if heads is None or row is None or not row.interleaved:
        return named
    return replace(named, data=rotate_half_rows(b.data, heads))
