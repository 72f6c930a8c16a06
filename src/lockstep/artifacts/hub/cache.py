"""Hub cache: finds, lists and removes cached models on the local disk.

The layout is that of the hub (``models--org--name/{blobs,refs,snapshots}``, documented in "Understand caching"), so the
cache is shared with other programs.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.hub.source import ADAPTER_FILES, DEFAULT_REVISION, HubSource, cached_gguf, is_whole_gguf
from lockstep.errors import ArtifactError, ArtifactNotFoundError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo
    from huggingface_hub.utils import DeleteCacheStrategy

    from lockstep.artifacts.task import Task

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = 12


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """Paths of one repository in the cache. The paths need not exist."""

    path: Path

    @classmethod
    def of(cls, repo: str) -> CachedRepo:
        return cls(cache_directory() / f"models--{repo.replace('/', '--')}")

    def blob(self, digest: str) -> Path:
        return self.path / "blobs" / digest

    def ref(self, revision: str) -> Path:
        return self.path / "refs" / revision

    def snapshot(self, commit: str) -> Path:
        return self.path / "snapshots" / commit

    def lock(self, digest: str) -> Path:
        return self.path.parent / ".locks" / self.path.name / f"{digest}.lock"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A cached model that can be served."""

    source: str
    """Source name for `lockstep run`."""
    revision: str
    """Names of the revision, such as ``main``, or the first digits of the commit."""
    commit: str
    format: str
    """``gguf`` or ``safetensors``."""
    num_bytes: int
    last_used_s: float
    """Time of the last access in seconds since the epoch, as recorded by the file system."""
    task: Task | None = None
    """Task of the model; None: a GGUF file that is damaged or not supported."""


def cache_directory() -> Path:
    """Directory of the hub cache: HF_HUB_CACHE, a directory below HF_HOME, or one in the user's cache directory."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def find_cached(source: HubSource, *, is_online: bool = True) -> Path | None:
    """Return the directory or GGUF file of a source if it is complete and unambiguous in the cache, otherwise None.

    Args:
        is_online: the hub can be reached, so an ambiguous source returns None. Otherwise the only cached GGUF file is
            used.
    """
    snapshot = _snapshot(source)
    if snapshot is None:
        return None
    if source.file is None and _is_whole(snapshot):
        return snapshot
    if source.file is None and is_online:
        return None
    name = cached_gguf(source, _gguf_names(snapshot))
    return None if name is None else snapshot / name


def find_cached_adapter(source: HubSource) -> Path | None:
    """Return the directory or GGUF file of an adapter if it is complete in the cache, otherwise None."""
    snapshot = _snapshot(source)
    if snapshot is None:
        return None
    if source.file is None:
        return snapshot if all((snapshot / name).is_file() for name in ADAPTER_FILES) else None
    name = cached_gguf(source, _gguf_names(snapshot))
    return None if name is None else snapshot / name


def _snapshot(source: HubSource) -> Path | None:
    """Directory of a source's revision; None if the cache has no such revision. It need not exist."""
    repo = CachedRepo.of(source.repo)
    commit = source.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = repo.ref(commit).read_text().strip()
        except (OSError, ValueError):
            return None
    return repo.snapshot(commit) if _COMMIT.fullmatch(commit) else None


def cached_models() -> list[CachedModel]:
    """All cached models that can be served, sorted by name and revision."""
    models = [
        model
        for repo in _scan()
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash)
        for model in _served(repo, revision)
    ]
    return sorted(models, key=lambda model: (model.source.lower(), model.commit))


def plan_removal(source: HubSource) -> DeleteCacheStrategy:
    """Plan the removal of a file, a revision or a whole repository.

    Raises:
        ArtifactNotFoundError: it is not in the cache.
    """
    info = _cache()
    repo = next((repo for repo in _scan(info) if repo.repo_id == source.repo), None)
    if info is None or repo is None:
        raise ArtifactNotFoundError("not in the cache; `lockstep list` shows cached models", path=str(source))
    named = [r for r in repo.revisions if source.revision in (r.commit_hash, *r.refs)]
    if source.revision != DEFAULT_REVISION and not named:
        raise ArtifactNotFoundError(f"revision {source.revision!r} is not in the cache", path=str(source))
    if source.file is None:
        every = repo.revisions if source.revision == DEFAULT_REVISION else named
        return info.delete_revisions(*sorted(revision.commit_hash for revision in every))
    files = [file for revision in named for file in revision.files]
    names = {file.file_path: _name_in(revision, file.file_path) for revision in named for file in revision.files}
    chosen = cached_gguf(source, sorted(name for name in names.values() if name.endswith(".gguf")))
    if chosen is None:
        raise ArtifactNotFoundError(f"the cache does not have exactly one file {source.file!r}", path=str(source))
    return info.delete_files(*(file for file in files if names[file.file_path] == chosen))


def remove_leftovers(source: HubSource) -> int:
    """Remove incomplete downloads of a repository after a removal, unless models remain. Return the number of bytes."""
    repo = CachedRepo.of(source.repo)
    if any((repo.path / "snapshots").glob("*/*")):
        return 0
    freed = sum(path.lstat().st_size for path in repo.path.glob("blobs/*"))
    shutil.rmtree(repo.path, ignore_errors=True)
    shutil.rmtree(repo.lock("").parent, ignore_errors=True)
    return freed


def _is_whole(snapshot: Path) -> bool:
    from lockstep.artifacts.huggingface import weight_files

    if not (snapshot / "config.json").is_file() or not (snapshot / "tokenizer.json").is_file():
        return False
    try:
        return all((snapshot / name).is_file() for name in weight_files(snapshot))
    except ArtifactError:
        return False


def _gguf_names(snapshot: Path) -> list[str]:
    names = (path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*.gguf")) if path.is_file())
    return [name for name in names if is_whole_gguf(name)]


def _cache() -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(cache_directory())
    except (CacheNotFound, ValueError):  # missing, or not a directory: the cache is empty
        return None


def _scan(info: HFCacheInfo | None = None) -> list[CachedRepoInfo]:
    info = _cache() if info is None else info
    repos = [] if info is None else [repo for repo in info.repos if repo.repo_type == "model"]
    return sorted(repos, key=lambda repo: repo.repo_id)


def _served(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> Iterator[CachedModel]:
    main = DEFAULT_REVISION in revision.refs
    names = ", ".join(sorted(revision.refs)) or revision.commit_hash[:_SHORT_COMMIT]
    source = HubSource(repo.repo_id, DEFAULT_REVISION if main else min(revision.refs, default=revision.commit_hash))
    task = _directory_task(revision.snapshot_path) if _is_whole(revision.snapshot_path) else None
    if task is not None:
        used = max((file.blob_last_accessed for file in revision.files), default=0.0)
        size = sum(file.size_on_disk for file in revision.files if not file.file_name.endswith(".gguf"))
        yield CachedModel(str(source), names, revision.commit_hash, "safetensors", size, used, task)
    for file in sorted(revision.files, key=lambda file: str(file.file_path)):
        name = _name_in(revision, file.file_path)
        if is_whole_gguf(name):
            yield CachedModel(
                str(source.with_file(name)),
                names,
                revision.commit_hash,
                "gguf",
                file.size_on_disk,
                file.blob_last_accessed,
                _gguf_task(file.file_path),
            )


def _name_in(revision: CachedRevisionInfo, path: Path) -> str:
    return path.relative_to(revision.snapshot_path).as_posix()


def _gguf_task(file: Path) -> Task | None:
    """Task of a GGUF file; None: it is damaged or not supported. Only the header is read."""
    from lockstep.artifacts.gguf import read_task

    try:
        return read_task(file)
    except ArtifactError:
        return None


def _directory_task(snapshot: Path) -> Task | None:
    """Task of a directory; None: its configuration is not supported. The weights are not checked."""
    from lockstep.artifacts.embedding import read_sentence_transformers, task_of
    from lockstep.artifacts.huggingface_config import read_config
    from lockstep.artifacts.metadata import read_json

    try:
        return task_of(read_config(read_json(snapshot / "config.json")), read_sentence_transformers(snapshot))
    except ArtifactError:
        return None
