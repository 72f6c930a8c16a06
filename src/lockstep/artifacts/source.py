"""Model sources: open a model given as a path, a scheme, or a name on the hub, and merge adapters into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.artifacts.adapter import merged, open_adapter
from lockstep.artifacts.gguf import open_gguf
from lockstep.artifacts.hub.source import SCHEME as _HUB
from lockstep.artifacts.hub.source import DownloadProgress, HubSource, match_hub_source, parse_hub_source
from lockstep.artifacts.huggingface import open_huggingface
from lockstep.artifacts.model import ADAPTER_AS_MODEL, Artifact
from lockstep.artifacts.task import MERGE
from lockstep.errors import ArtifactNotFoundError
from lockstep.pocket import SCHEME as EMBEDDED
from lockstep.spelling import nearest

_MAX_LISTED = 8
_EXPECTED = (
    "a model is a .gguf file, a Hugging Face directory (config.json, *.safetensors, tokenizer.json), hf://org/name or "
    "pocket://"
)


def open_artifact(source: str, *, cache_dir: Path | None = None, progress: DownloadProgress | None = None) -> Artifact:
    """Detect the kind of a source, open it and check it. Large data is read only for the fingerprint.

    Args:
        source: a path, ``pocket://``, ``hf://org/name[@revision][#file]``, or ``org/name`` if no such path exists. Each
            ``+lora=ADAPTER`` after it names an adapter that a load merges into the weights; see `open_adapter`.
        cache_dir: directory of cached fingerprints; default: the user's cache directory.
        progress: called during the download of a model from the hub.

    Raises:
        ArtifactNotFoundError: the source does not exist, or is not a model.
        CorruptArtifactError: the model is truncated or inconsistent, or has non-finite values.
        UnsupportedArtifactError: the model is valid, but of an unsupported kind.
        DownloadError: the hub cannot be reached or rejects the request.
    """
    cache = _default_cache_dir() if cache_dir is None else cache_dir
    base, *adapters = source.split(MERGE)
    artifact = _open(base, cache, progress)
    for adapter in adapters:
        artifact = merged(artifact, open_adapter(adapter, artifact, cache_dir=cache, progress=progress))
    return replace(artifact, source=source) if adapters else artifact


def _open(source: str, cache: Path, progress: DownloadProgress | None) -> Artifact:
    if source.startswith(_HUB):
        return _open_hub(parse_hub_source(source), source, cache, progress)
    if "://" in source:
        return _open_scheme(source, cache)
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return _open_directory(path, source, cache)
        if path.is_file():
            return _open_file(path, source, cache)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~user" with an unknown user
        reason = getattr(error, "strerror", None) or error
        raise ArtifactNotFoundError(f"cannot be read ({reason}); {_EXPECTED}", path=source) from error
    named = match_hub_source(source)
    if named is not None and not path.parent.exists() and not source.endswith((".gguf", ".safetensors")):
        return _open_hub(named, source, cache, progress)
    raise ArtifactNotFoundError(f"no such file or directory{_close_names(path)}; {_EXPECTED}", path=source)


def _default_cache_dir() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("lockstep")


def _open_scheme(source: str, cache_dir: Path) -> Artifact:
    scheme = source.partition("://")[0]
    if scheme == "pocket":
        return _open_pocket(source, cache_dir)
    if scheme == "stub":
        raise ArtifactNotFoundError("a stub is a fake model without files; only an engine can load it", path=source)
    raise ArtifactNotFoundError(f"unknown scheme {scheme!r}; {_EXPECTED}", path=source)


def _open_hub(named: HubSource, source: str, cache_dir: Path, progress: DownloadProgress | None) -> Artifact:
    from lockstep.artifacts.hub.download import local_path

    path = local_path(named, progress or (lambda name, have, total: None))
    if path.is_dir():
        return replace(open_huggingface(path, source, cache_dir), name=named.name)
    return open_gguf(path, source, cache_dir)


def _open_pocket(source: str, cache_dir: Path) -> Artifact:
    if source != EMBEDDED:
        raise ArtifactNotFoundError(f"the embedded model is called {EMBEDDED}", path=source)
    from lockstep.pocket import pocket_path

    embedded = pocket_path()
    if not embedded.is_file():
        raise ArtifactNotFoundError("this installation of lockstep has no embedded model", path=source)
    return replace(open_gguf(embedded, source, cache_dir), name="pocket")


def _open_directory(path: Path, source: str, cache_dir: Path) -> Artifact:
    if (path / "config.json").is_file():
        return open_huggingface(path, source, cache_dir)
    names = sorted(entry.name for entry in path.iterdir())
    gguf_files = [name for name in names if name.endswith(".gguf")]
    if "adapter_config.json" in names:
        raise ArtifactNotFoundError(ADAPTER_AS_MODEL, path=source)
    if gguf_files:
        raise ArtifactNotFoundError(f"a directory of GGUF files; specify one of them: {_some(gguf_files)}", path=source)
    found = _some(names) if names else "nothing"
    raise ArtifactNotFoundError(f"the directory has no config.json, but {found}; {_EXPECTED}", path=source)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_LISTED]) + (", …" if len(names) > _MAX_LISTED else "")


def _open_file(path: Path, source: str, cache_dir: Path) -> Artifact:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        return open_gguf(path, source, cache_dir)
    if path.suffix in (".safetensors", ".json"):
        raise ArtifactNotFoundError("a file of a Hugging Face model; specify its directory", path=source)
    raise ArtifactNotFoundError(f"a file that is not GGUF; {_EXPECTED}", path=source)


def _close_names(path: Path) -> str:
    try:
        names = sorted(entry.name for entry in path.absolute().parent.iterdir())
    except OSError:
        return f"; the directory {str(path.parent)!r} does not exist either"
    close = nearest(path.name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
