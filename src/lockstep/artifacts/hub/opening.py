"""From a name on the hub to files on this disk: the cache where it holds the model, else the hub."""

from __future__ import annotations

from pathlib import Path

from lockstep.artifacts.hub.cache import find_cached
from lockstep.artifacts.hub.choice import INDEX, gguf_file, is_gguf, text_files, weight_files_without_index
from lockstep.artifacts.hub.download import Revision, Told, look_up
from lockstep.artifacts.hub.reports import reported
from lockstep.artifacts.hub.source import HubSource
from lockstep.errors import HubUnreachableError, MissingTokenizerError


def local_path(source: HubSource, told: Told) -> Path:
    """A model's directory or GGUF file. What the cache holds is used as it is, and the hub is not asked: the same
    model answers tomorrow, and with no network. `pull` looks for a newer one.

    Raises:
        ArtifactError: it is not there and cannot be fetched; one line says why.
    """
    path = find_cached(source)
    if path is not None:
        return path
    try:
        return pull(source, told)
    except HubUnreachableError:
        path = find_cached(source, asking=False)
        if path is None:
            raise
        return path


def pull(source: HubSource, told: Told) -> Path:
    """Bring a revision into the cache as the hub has it now; only what is missing is fetched.

    Raises:
        ArtifactNotFoundError: no such repository, revision or file.
        UnsupportedArtifactError, MissingTokenizerError: cannot be served; known before its weights are fetched.
        CorruptArtifactError: what came is not what the hub describes.
        DownloadError: the hub cannot be reached or refuses.
    """
    with reported(source):
        revision = look_up(source)
        if is_gguf(source, revision.listing):
            name = gguf_file(source, revision.listing)
            revision.fetch([name], told)
            path = revision.snapshot / name
        else:
            _fetch_directory(revision, told)
            path = revision.snapshot
        revision.remember()
    return path


def _fetch_directory(revision: Revision, told: Told) -> None:
    from lockstep.artifacts.huggingface import weight_files
    from lockstep.artifacts.huggingface_config import read_config
    from lockstep.artifacts.json_file import read_json

    if "tokenizer.json" not in revision.listing:
        raise MissingTokenizerError(
            "the repository has no tokenizer.json; one that was saved with a fast tokenizer is needed",
            path=str(revision.source),
        )
    small = text_files(revision.listing)
    revision.fetch(small, lambda name, have, total: None)  # kilobytes: the bar is for the weights
    read_config(read_json(revision.snapshot / "config.json"))
    has_index = INDEX in revision.listing
    weights = (
        weight_files(revision.snapshot) if has_index else weight_files_without_index(revision.source, revision.listing)
    )
    revision.fetch(weights, told)
