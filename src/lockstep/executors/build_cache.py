"""Build cache: stores files that loading builds from artifacts, as entries with manifests in a folder of limited size.

An entry is published atomically (written to a temporary folder, flushed, renamed) and used only if it matches its
manifest. Any other entry is removed and built again. Entries that another process uses may be removed, since its
mappings keep the files alive. The builders define the content of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.executors.base import environment_digest

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_ABANDONED_S = 3600.0
"""Age in seconds at which a temporary directory counts as left by a process that died."""


class BuildCache:
    """Folder ``root`` with one subfolder per key, at most ``max_bytes`` in total.

    Args:
        files: names of the files of an entry. The first one is small, and `find` checks its digest; of the others,
            `find` checks the size.
    """

    def __init__(self, root: Path, max_bytes: int, files: tuple[str, ...]) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._files = files

    def find(self, key: Mapping[str, str]) -> Path | None:
        """Path of the first file for ``key``, or None. An entry that does not match its manifest is removed."""
        entry = self._entry(key)
        if not entry.exists():
            return None
        if not self._is_intact(entry, key):
            self.remove(key)
            return None
        with suppress(OSError):  # a cache of another user can still be read
            os.utime(entry / MANIFEST)
        return entry / self._files[0]

    def store(self, key: Mapping[str, str], save: Callable[[Path], None]) -> Path:
        """Have ``save`` write the first file and the others next to it, publish them, and evict entries beyond the
        limit.

        Returns:
            Path of the first file.
        """
        entry = self._entry(key)
        with self._temporary() as directory:
            save(directory / self._files[0])
            manifest = {
                "key": dict(key),
                "sizes": {name: (directory / name).stat().st_size for name in self._files},
                "digest": _digest_of(directory / self._files[0]),
            }
            (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
            for name in (*self._files, MANIFEST):
                _flush(directory / name)
            if not self._is_intact(entry, key):  # else another process published the same content meanwhile
                self.remove(key)
                try:
                    directory.rename(entry)
                except OSError:
                    if not self._is_intact(entry, key):
                        raise
        _flush(self._root)
        self._evict(keep=entry)
        return entry / self._files[0]

    def remove(self, key: Mapping[str, str]) -> None:
        """Remove an entry, if there is one."""
        shutil.rmtree(self._entry(key), ignore_errors=True)

    def _entry(self, key: Mapping[str, str]) -> Path:
        return self._root / environment_digest(key)

    def _is_intact(self, entry: Path, key: Mapping[str, str]) -> bool:
        """True if the manifest has this key, the files have its sizes, and the first one has its digest."""
        try:
            manifest = json.loads((entry / MANIFEST).read_text())
            return (
                isinstance(manifest, dict)
                and manifest.get("key") == dict(key)
                and manifest.get("sizes") == {name: (entry / name).stat().st_size for name in self._files}
                and manifest.get("digest") == _digest_of(entry / self._files[0])
            )
        except (OSError, ValueError):
            return False

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        self._root.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._root))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _evict(self, keep: Path) -> None:
        """Remove abandoned temporary directories, then the least recently used entries until the rest fits."""
        entries = []
        for path in self._root.iterdir():
            if path.name.startswith(_TEMPORARY):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                used = (path / MANIFEST).stat().st_mtime
            except OSError:
                used = 0.0
            entries.append((path == keep, used, path.name, path))
        sizes = {path: _size_of(path) for *_, path in entries}
        total = sum(sizes.values())
        for is_kept, _, _, path in sorted(entries):
            if total <= self._max_bytes or is_kept:
                return
            shutil.rmtree(path, ignore_errors=True)
            total -= sizes[path]


def _digest_of(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file())


def _flush(path: Path) -> None:
    """Flush a file or directory to disk, so that a rename never outlives its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
