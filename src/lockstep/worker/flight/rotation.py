"""Rotation of recordings: deletes the oldest files of a folder so that the newest fits, and texts that no file
needs."""

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
    """Delete the oldest files until the rest has at most ``max_bytes``; each deletion is listed before it happens.

    Args:
        has_texts: True if files of this suffix need texts: their sizes are included, and each text is deleted after
            the last file that needs it.
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
            each.path.unlink(missing_ok=True)  # all files of this other machine are deleted


def _sizes(folder: Path, suffix: str) -> list[tuple[Path, int]]:
    """Files and their sizes, the last written file at the end."""
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
        with suppress(TraceError):  # readers reject it, but its files count against the limit
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
    """Texts that no file needs and that were written before the oldest remaining file was begun.

    A text that was written later may belong to a model that has not made its first step yet.
    """
    needed = {name: True for each in manifests for listed in each.live for name in listed.needs}
    for path in texts:
        if path.name not in needed and all(_is_old(each.live, suffix, path.name) for each in manifests):
            yield path


def _is_old(live: Sequence[Listed], suffix: str, text: str) -> bool:
    names = [listed.file for listed in live if listed.file == text or listed.file.endswith(suffix)]
    return text not in names or names[0] == text
