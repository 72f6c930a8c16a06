"""Rotation: the oldest files of a folder are deleted so that the newest fits, and texts that no other file needs."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from lockstep.errors import TraceError
from lockstep.worker.flight.folder import (
    TEXT_SUFFIX,
    FolderManifest,
    Listed,
    Manifest,
    State,
    lock,
    manifest_files,
    read_manifest,
)


def make_room(
    manifest: FolderManifest, suffix: str, max_bytes: int, *, has_texts: bool, needs: Collection[str] = ()
) -> None:
    """Delete the oldest files until the rest has at most so many bytes; each deletion is listed before it is done.

    Args:
        has_texts: texts belong to files of this suffix: they count with them, and go with the last that needs them.
        needs: names of texts that the next file needs.

    Raises:
        OSError: the folder or a manifest cannot be written.
    """
    manifests = _readable(manifest.folder)
    texts = dict(_sizes(manifest.folder, TEXT_SUFFIX)) if has_texts else {}
    files = _sizes(manifest.folder, suffix)
    total = sum(texts.values()) + sum(size for _, size in files)
    for path, size in files:
        if total <= max_bytes:
            break
        if _is_in_use(path):
            continue
        _delete(manifest, manifests, path)
        total -= size
        for text in _unneeded(manifests, suffix, [each for each in texts if each.name not in needs]):
            _delete(manifest, manifests, text)
            total -= texts.pop(text)
    for each in manifests:
        if not each.live and each.path != manifest.path:
            each.path.unlink(missing_ok=True)  # another machine's, of which nothing is left


def _sizes(folder: Path, suffix: str) -> list[tuple[Path, int]]:
    """Files and their sizes, the one that was written last at the end."""
    found: list[tuple[int, Path, int]] = []
    for path in folder.glob(f"*{suffix}"):
        with suppress(FileNotFoundError):  # another process has deleted it
            stat = path.stat()
            found.append((stat.st_mtime_ns, path, stat.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def _is_in_use(path: Path) -> bool:
    """True if a recorder has the file open."""
    try:
        with path.open("rb") as file:
            return not lock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False


def _readable(folder: Path) -> list[Manifest]:
    found = []
    for path in manifest_files(folder):
        with suppress(TraceError):  # readers refuse it; the bound is kept all the same
            found.append(read_manifest(path))
    return found


def _delete(own: FolderManifest, manifests: Sequence[Manifest], path: Path) -> None:
    for each in manifests:
        listed = each.files.get(path.name)
        if listed is not None and listed.state is not State.DELETED:
            deleted = replace(listed, state=State.DELETED, needs=())
            each.take(deleted)
            own.put(deleted, path=each.path)
    path.unlink(missing_ok=True)


def _unneeded(manifests: Sequence[Manifest], suffix: str, texts: Sequence[Path]) -> Iterator[Path]:
    """Texts that were kept before the oldest file that is left was begun, and that no file needs.

    What was kept later may be of a model whose first steps are still to come.
    """
    needed = {name: True for each in manifests for listed in each.live for name in listed.needs}
    for path in texts:
        if path.name not in needed and all(_is_old(each.live, suffix, path.name) for each in manifests):
            yield path


def _is_old(live: Sequence[Listed], suffix: str, text: str) -> bool:
    names = [listed.file for listed in live if listed.file == text or listed.file.endswith(suffix)]
    return text not in names or names[0] == text
