"""Files of one revision into the hub's own cache: resumed where they stopped, checked when they are whole.

The library's downloads begin anew after an interruption (each writes to a file of its own and removes it), which for
gigabytes on a slow line is no answer. So the bytes are fetched here, into the documented layout of the cache:
``blobs/<digest>``, a link to it under ``snapshots/<commit>/``, and ``refs/<revision>`` with the commit, written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.artifacts.hub.cache import CachedRepo
from lockstep.artifacts.hub.choice import Listing, RemoteFile, human_size
from lockstep.artifacts.hub.source import HubSource
from lockstep.errors import CorruptArtifactError, DownloadError
from lockstep.version import __version__

Told = Callable[[str, int, int], None]
"""Called with a file's name, the bytes that are there of all files, and of how many."""

API_TIMEOUT_S = 10.0
MAX_ATTEMPTS = 5
"""In a row without a single new byte."""
RETRY_WAIT_S = 1.0

_LIBRARY = "lockstep"
_SHA256_DIGITS = 64


class Revision:
    """One commit of a repository: what it holds, and its way into the cache. Made by `look_up`."""

    def __init__(self, source: HubSource, commit: str, listing: Listing) -> None:
        self.source = source
        self.commit = commit
        self.listing = listing
        self.cached = CachedRepo.of(source.repo)
        self.snapshot = self.cached.snapshot(commit)

    def fetch(self, names: Sequence[str], told: Told) -> None:
        """Bring these files into the snapshot.

        Raises:
            DownloadError: a file is not in the repository, or there is no room for them.
            CorruptArtifactError: what came is not what the hub's digest says.
            Exception: of the HTTP library; see `reported`.
        """
        absent = [name for name in names if name not in self.listing]
        if absent:
            raise DownloadError(f"the repository has no {absent[0]}, which belongs to the model", path=str(self.source))
        files = [self.listing[name] for name in names]
        total = sum(file.num_bytes for file in files)
        here = {file.path: self._num_present(file) for file in files}
        self._check_room(total - sum(here.values()))
        done = 0
        for file in files:
            self._fill(file, lambda have, name=file.path, before=done: told(name, before + have, total))  # type: ignore[misc]  # mypy types no defaults of lambdas
            self._link(file)
            done += file.num_bytes
            told(file.path, done, total)

    def remember(self) -> None:
        """Let the revision's name mean this commit from now on; called when all its files are there."""
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
                f"{human_size(missing_bytes)} are to come and the disk of {self.cached.path.parent} has "
                f"{human_size(free)} free; free some (lockstep list, lockstep rm) or set HF_HOME to another disk",
                path=str(self.source),
            )

    def _fill(self, file: RemoteFile, told: Callable[[int], None]) -> None:
        """Make the blob, under the lock that other programs of the hub's cache take as well."""
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
            self._complete(file, partial, told)
            if _digest(partial, file.digest) != file.digest:
                partial.unlink()
                raise CorruptArtifactError(
                    f"{file.path} did not arrive as the hub describes it, and was thrown away; pull again",
                    path=str(self.source),
                )
            os.replace(partial, blob)

    def _complete(self, file: RemoteFile, partial: Path, told: Callable[[int], None]) -> None:
        """Append what is missing, and go on after a broken connection as long as each attempt brings something."""
        from httpx2 import TransportError

        attempts = 0
        before = -1
        while True:
            try:
                self._append(file, partial, told)
            except TransportError:
                have = partial.stat().st_size if partial.exists() else 0
                attempts = 1 if have > before else attempts + 1
                before = max(before, have)
                if attempts >= MAX_ATTEMPTS:
                    raise
                time.sleep(RETRY_WAIT_S)
            else:
                return

    def _append(self, file: RemoteFile, partial: Path, told: Callable[[int], None]) -> None:
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
                    have = out.truncate(0)  # the server sends the whole
                told(have)
                for chunk in response.iter_bytes():
                    have += out.write(chunk)
                    told(have)
        if have != file.num_bytes:
            raise RemoteProtocolError(f"{file.path} ended after {have} of {file.num_bytes} bytes")

    def _link(self, file: RemoteFile) -> None:
        blob, pointer = self.cached.blob(file.digest), self.snapshot / file.path
        if pointer.exists():
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            pointer.unlink()  # a link to a blob that is gone
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:
            return  # another program was faster
        except OSError:
            shutil.copyfile(blob, pointer)  # a file system without links


def look_up(source: HubSource) -> Revision:
    """Ask the hub what a revision is and holds: one request.

    Raises:
        Exception: of the HTTP library; see `reported`.
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
        raise DownloadError("what answers at HF_ENDPOINT is not a hub: it names no commit", path=str(source))
    return Revision(source, info.sha, listing)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _digest(path: Path, expected: str) -> str:
    """The content's digest of the kind that is expected: SHA-256, or git's SHA-1 of a blob."""
    if len(expected) == _SHA256_DIGITS:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
