"""Hub downloads: fetch models that are not in the cache, with resumed transfers and digest checks.

The downloads of the hub's library restart after an interruption (each writes to its own file and removes it), which is
not practical for gigabytes on a slow connection. Files are therefore downloaded here into the documented cache layout:
``blobs/<digest>``, a link to it under ``snapshots/<commit>/``, and ``refs/<revision>`` with the commit, which is
written last. Errors of the hub and the network are converted to one-line errors with a hint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.artifacts.hub.cache import CachedRepo, find_cached, find_cached_adapter
from lockstep.artifacts.hub.source import (
    ADAPTER_FILES,
    EXPECTED_FORM,
    INDEX,
    DownloadProgress,
    HubSource,
    Listing,
    RemoteFile,
    gguf_file,
    is_gguf,
    text_files,
    weight_files_without_index,
)
from lockstep.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    CorruptArtifactError,
    DownloadError,
    HubUnreachableError,
    MissingTokenizerError,
)
from lockstep.shown import size
from lockstep.version import __version__

API_TIMEOUT_S = 10.0
MAX_ATTEMPTS = 5
"""Maximum number of consecutive attempts without new data."""
RETRY_WAIT_S = 1.0
"""Pause in seconds between two attempts."""
_LIBRARY = "lockstep"
_SHA256_DIGITS = 64
_UNAUTHORISED, _FORBIDDEN, _TOO_MANY = 401, 403, 429


def local_path(source: HubSource, progress: DownloadProgress) -> Path:
    """Return a model's directory or GGUF file, and download it if necessary.

    A cached model is used without a request to the hub, so that the same model is served every time, even without a
    network. `pull` checks for a newer one.

    Raises:
        ArtifactError: the model is not cached and cannot be downloaded; the message gives the reason in one line.
    """
    path = find_cached(source)
    if path is not None:
        return path
    try:
        return pull(source, progress)
    except HubUnreachableError:
        path = find_cached(source, is_online=False)
        if path is None:
            raise
        return path


def pull(source: HubSource, progress: DownloadProgress, retry_wait_s: float = RETRY_WAIT_S) -> Path:
    """Download the current state of a revision to the cache. Only missing files are downloaded.

    Args:
        retry_wait_s: pause before a broken transfer is continued.

    Raises:
        ArtifactNotFoundError: the repository, revision or file does not exist.
        UnsupportedArtifactError, MissingTokenizerError: the model cannot be served (detected before the download).
        CorruptArtifactError: downloaded data does not match the hub's description.
        DownloadError: the hub cannot be reached or rejects the request.
    """
    with reported(source):
        revision = look_up(source, retry_wait_s)
        if is_gguf(source, revision.listing):
            name = gguf_file(source, revision.listing)
            revision.fetch([name], progress)
            path = revision.snapshot / name
        else:
            _fetch_directory(revision, progress)
            path = revision.snapshot
        revision.remember()
    return path


def adapter_path(source: HubSource, progress: DownloadProgress) -> Path:
    """Return the PEFT directory or GGUF file of an adapter, and download it if it is not cached.

    Raises:
        ArtifactError: the adapter is not cached and cannot be downloaded; the message gives the reason in one line.
    """
    path = find_cached_adapter(source)
    if path is not None:
        return path
    with reported(source):
        revision = look_up(source)
        if source.file is None:
            absent = [name for name in ADAPTER_FILES if name not in revision.listing]
            if absent:
                raise ArtifactNotFoundError(
                    f"the repository has no {absent[0]}; a PEFT adapter, or a GGUF file named with '#', is expected",
                    path=str(source),
                )
            revision.fetch(ADAPTER_FILES, progress)
            path = revision.snapshot
        else:
            name = gguf_file(source, revision.listing)
            revision.fetch([name], progress)
            path = revision.snapshot / name
        revision.remember()
    return path


def look_up(source: HubSource, retry_wait_s: float = RETRY_WAIT_S) -> Revision:
    """Query the commit and the files of a revision with one request to the hub.

    Raises:
        Exception: an error of the HTTP library; see `reported`.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name=_LIBRARY, library_version=__version__)
    info = api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=API_TIMEOUT_S)
    listing = {}
    for sibling in info.siblings or ():
        digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        size = sibling.size if sibling.lfs is None else sibling.lfs.size
        if digest is not None and size is not None and digest.isalnum():
            listing[sibling.rfilename] = RemoteFile(sibling.rfilename, size, digest)
    if info.sha is None or not info.sha.isalnum():
        raise DownloadError("the server at HF_ENDPOINT is not a hub: its response has no commit", path=str(source))
    return Revision(source, info.sha, listing, retry_wait_s)


class Revision:
    """One commit of a repository: its files, and their download to the cache. Created by `look_up`."""

    def __init__(self, source: HubSource, commit: str, listing: Listing, retry_wait_s: float = RETRY_WAIT_S) -> None:
        self.source = source
        self.commit = commit
        self.listing = listing
        self.retry_wait_s = retry_wait_s
        self.cached = CachedRepo.of(source.repo)
        self.snapshot = self.cached.snapshot(commit)

    def fetch(self, names: Sequence[str], progress: DownloadProgress) -> None:
        """Download files to the snapshot.

        Raises:
            DownloadError: a file is not in the repository, or there is not enough disk space.
            CorruptArtifactError: the received bytes do not match the hub's digest.
            Exception: an error of the HTTP library; see `reported`.
        """
        absent = [name for name in names if name not in self.listing]
        if absent:
            raise DownloadError(f"the repository has no {absent[0]}, which the model requires", path=str(self.source))
        files = [self.listing[name] for name in names]
        total = sum(file.num_bytes for file in files)
        here = {file.path: self._num_present(file) for file in files}
        self._check_room(total - sum(here.values()))
        done = 0
        for file in files:
            self._fill(file, lambda have, name=file.path, before=done: progress(name, before + have, total))  # type: ignore[misc]  # mypy does not infer lambda defaults
            self._link(file)
            done += file.num_bytes
            progress(file.path, done, total)

    def remember(self) -> None:
        """Point the revision's name to this commit. Called when all files are complete."""
        if self.source.revision != self.commit:
            path = self.cached.ref(self.source.revision)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{os.getpid()}")
            new.write_text(self.commit)
            os.replace(new, path)

    def _num_present(self, file: RemoteFile) -> int:
        blob = self.cached.blob(file.digest)
        for path in (blob, _partial(blob)):
            if path.is_file():
                return min(path.stat().st_size, file.num_bytes)
        return 0

    def _check_room(self, missing_bytes: int) -> None:
        self.cached.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.cached.path).free
        if missing_bytes > free:
            raise DownloadError(
                f"{size(missing_bytes)} are needed, but the disk of {self.cached.path.parent} has only "
                f"{size(free)} free; free some (lockstep list, lockstep rm) or set HF_HOME to another disk",
                path=str(self.source),
            )

    def _fill(self, file: RemoteFile, progress: Callable[[int], None]) -> None:
        """Create the blob, under the lock that other programs with access to the hub cache use as well."""
        from huggingface_hub.utils import WeakFileLock

        blob = self.cached.blob(file.digest)
        if blob.exists():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        lock = self.cached.lock(file.digest)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                return
            partial = _partial(blob)
            self._complete(file, partial, progress)
            if _digest(partial, file.digest) != file.digest:
                partial.unlink()
                raise CorruptArtifactError(
                    f"the downloaded {file.path} does not match the hub's digest and was deleted; pull again",
                    path=str(self.source),
                )
            os.replace(partial, blob)

    def _complete(self, file: RemoteFile, partial: Path, progress: Callable[[int], None]) -> None:
        """Append the missing data. Retry after connection errors as long as the attempts bring new data."""
        from httpx2 import TransportError

        attempts = 0
        before = -1
        while True:
            try:
                self._append(file, partial, progress)
            except TransportError:
                have = partial.stat().st_size if partial.exists() else 0
                attempts = 1 if have > before else attempts + 1
                before = max(before, have)
                if attempts >= MAX_ATTEMPTS:
                    raise
                time.sleep(self.retry_wait_s)
            else:
                return

    def _append(self, file: RemoteFile, partial: Path, progress: Callable[[int], None]) -> None:
        from httpx2 import RemoteProtocolError
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        with partial.open("ab") as out:
            have = out.tell()
            if have > file.num_bytes:
                have = out.truncate(0)
            if have == file.num_bytes:
                return
            headers = {
                **build_hf_headers(library_name=_LIBRARY, library_version=__version__),
                "Accept-Encoding": "identity",
            }
            if have:
                headers["Range"] = f"bytes={have}-"
            url = hf_hub_url(self.source.repo, file.path, revision=self.commit)
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                hf_raise_for_status(response)
                if have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    have = out.truncate(0)  # the server sends the whole file
                progress(have)
                for chunk in response.iter_bytes():
                    have += out.write(chunk)
                    progress(have)
        if have != file.num_bytes:
            raise RemoteProtocolError(f"{file.path} ended after {have} of {file.num_bytes} bytes")

    def _link(self, file: RemoteFile) -> None:
        blob, pointer = self.cached.blob(file.digest), self.snapshot / file.path
        if pointer.exists():
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            pointer.unlink()  # a link to a deleted blob
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:
            return  # another program has created it
        except OSError:
            shutil.copyfile(blob, pointer)  # the file system does not support links


@contextmanager
def reported(source: HubSource) -> Iterator[None]:
    """Convert errors in the block to download errors.

    Raises:
        HubUnreachableError: there is no network, or the hub fails; a cached copy can be used instead.
        ArtifactNotFoundError: the repository, revision or file does not exist.
        DownloadError: the hub rejected the request, or the disk is full.
    """
    from httpx2 import HTTPError, InvalidURL
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise HubUnreachableError(
            "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or use a cached model",
            path=str(source),
        ) from None
    except HfHubHTTPError as error:
        raise _refused(source, error) from error
    except (HTTPError, InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachableError(
            f"the hub cannot be reached ({reason}); cached models can be used without it; other models require a "
            "network connection, or HF_ENDPOINT set to a mirror",
            path=str(source),
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise DownloadError(f"the cache cannot be written ({error})", path=str(source)) from error
        raise DownloadError(
            "the disk is full; free some space (lockstep list, lockstep rm) or set HF_HOME to another disk",
            path=str(source),
        ) from error


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _digest(path: Path, expected: str) -> str:
    """Digest of a file's content, of the same kind as ``expected``: SHA-256, or git's SHA-1 of a blob."""
    if len(expected) == _SHA256_DIGITS:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _refused(source: HubSource, error: Exception) -> ArtifactError:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    assert isinstance(error, HfHubHTTPError)
    status, where = error.response.status_code, str(source)
    if isinstance(error, GatedRepoError):
        place = f"{_endpoint()}/{source.repo}"
        hint = (
            "the account of the token in use has no access yet; request it there"
            if _has_token()
            else "request access there and set HF_TOKEN to a token of the account"
        )
        return DownloadError(f"gated: {place} requires approval first; {hint}", path=where)
    if isinstance(error, RevisionNotFoundError):
        return ArtifactNotFoundError(
            f"the repository has no revision {source.revision!r}; '@' must be followed by a branch, tag or commit",
            path=where,
        )
    if isinstance(error, EntryNotFoundError):
        return ArtifactNotFoundError("a file of the repository no longer exists; pull again", path=where)
    if isinstance(error, RepositoryNotFoundError):
        hint = "the token in use cannot see it" if _has_token() else "HF_TOKEN is not set"
        return ArtifactNotFoundError(
            f"the hub has no such model, or it is private and {hint}; {EXPECTED_FORM}", path=where
        )
    if status in (_UNAUTHORISED, _FORBIDDEN):
        return DownloadError(
            f"the hub rejected the token ({status}); set HF_TOKEN to one with read access, or unset it",
            path=where,
        )
    if status == _TOO_MANY:
        return HubUnreachableError("the hub's rate limit is reached (429); try later, or set HF_TOKEN", path=where)
    if status >= 500:
        return HubUnreachableError(f"the hub failed ({status}); try again later", path=where)
    return DownloadError(f"request rejected ({status}): {error.server_message or 'no reason given'}", path=where)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _fetch_directory(revision: Revision, progress: DownloadProgress) -> None:
    from lockstep.artifacts.huggingface import weight_files
    from lockstep.artifacts.huggingface_config import read_config
    from lockstep.artifacts.metadata import read_json

    if "tokenizer.json" not in revision.listing:
        raise MissingTokenizerError(
            "the repository has no tokenizer.json; a model saved with a fast tokenizer is required",
            path=str(revision.source),
        )
    small = text_files(revision.listing)
    revision.fetch(small, lambda name, have, total: None)  # a few kilobytes: progress is shown for the weights only
    read_config(read_json(revision.snapshot / "config.json"))
    has_index = INDEX in revision.listing
    weights = (
        weight_files(revision.snapshot) if has_index else weight_files_without_index(revision.source, revision.listing)
    )
    revision.fetch(weights, progress)
