"""Integrity of recording folders: compares files with their manifests to find changed, cut, missing and added ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from lockstep.cluster.plan_recorder import PLAN_SUFFIX
from lockstep.cluster.route_recorder import ROUTE_SUFFIX
from lockstep.errors import TraceError
from lockstep.replay.trace_integrity import Finding, Kind
from lockstep.worker.flight.entries import SUFFIX
from lockstep.worker.flight.folder import (
    DIGEST_BYTES,
    MANIFEST_SUFFIX,
    TEXT_SUFFIX,
    Listed,
    State,
    manifest_files,
    read_manifest,
)

SUFFIXES = (SUFFIX, PLAN_SUFFIX, ROUTE_SUFFIX, TEXT_SUFFIX)
"""Suffixes of the files that a manifest lists. Other files in a folder are ignored."""
_PIECE_BYTES = 1 << 20


def folder_findings(path: Path, noted: Sequence[Finding] = (), simulated: Collection[str] = ()) -> tuple[Finding, ...]:
    """Files of a recording that differ from what its manifests list.

    Args:
        path: a folder or one file. For one file, only it and its text files are checked, and only if a manifest lists
            them.
        noted: known faults; their files are not reported again.
        simulated: names of files that need no manifest: written by a replay, or empty.

    Raises:
        TraceError: a manifest was changed, is of another version, or cannot be read.
    """
    is_alone = not path.is_dir()
    found = tuple(_alone(path) if is_alone else _in_folder(path, simulated))
    known = [each for each in noted if each.kind.is_fault]
    return tuple([each for each in found if not any(other.covers(each.file) for other in known)])


def _in_folder(folder: Path, simulated: Collection[str]) -> Iterator[Finding]:
    listed = _listed(folder)
    present = [path.name for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    if not listed and not manifest_files(folder):
        if any(name not in simulated for name in present):
            what = f"the manifest of the recording (*{MANIFEST_SUFFIX}) is missing; put it back beside the files"
            yield Finding(Kind.MISSING, MANIFEST_SUFFIX, what)
        return
    for name in present:
        if name in listed:
            yield from _difference(folder / name, listed[name])
        else:
            yield Finding(Kind.ADDED, name, f"{name} was added: no manifest of the folder lists it")
    missing = [name for name, lines in listed.items() if name not in present and _is_expected(lines)]
    if missing:
        listed = _listed(folder)  # a recording server may have deleted the file meanwhile
    for name in missing:
        if _is_expected(listed.get(name, ())):
            yield Finding(Kind.MISSING, name, f"{name} is missing: the folder's manifest lists it")


def _alone(path: Path) -> Iterator[Finding]:
    folder = path.parent
    listed = _listed(folder)
    if path.name not in listed:
        return
    texts = sorted(each for each in folder.glob(f"*{TEXT_SUFFIX}") if each.name in listed)
    for each in (path, *texts):
        yield from _difference(each, listed[each.name])


def _listed(folder: Path) -> dict[str, list[Listed]]:
    """Manifest entries of the folder by file name."""
    listed: dict[str, list[Listed]] = {}
    for path in manifest_files(folder):
        for name, line in read_manifest(path).files.items():
            listed.setdefault(name, []).append(line)
    return listed


def _is_expected(lines: Sequence[Listed]) -> bool:
    """True if a file with bytes must exist: its entries list some, and no recorder deleted it."""
    return any(line.num_bytes for line in lines) and all(line.state is not State.DELETED for line in lines)


def _difference(path: Path, lines: Sequence[Listed]) -> Iterator[Finding]:
    """Finding about a file that matches none of its manifest entries."""
    try:
        size = path.stat().st_size
        if any(_matches(path, size, line) for line in lines):
            return
    except FileNotFoundError:  # deleted by a recording server
        return
    except OSError as error:
        raise TraceError(f"{path}: cannot read the file: {error.strerror}") from error
    num_bytes = lines[-1].num_bytes
    if size < num_bytes:
        kind = Kind.CUT if size else Kind.EMPTY
        what = f"{path.name} was cut: it has {size:,} bytes of the {num_bytes:,} that the folder's manifest lists"
        yield Finding(kind, path.name, what, byte=size)
    else:
        what = f"{path.name} was changed: it differs from the file in the folder's manifest"
        yield Finding(Kind.CHANGED, path.name, what)


def _matches(path: Path, size: int, line: Listed) -> bool:
    if size < line.num_bytes or (line.state is State.CLOSED and size != line.num_bytes):
        return False
    if not line.num_bytes:
        return True
    digest, left = blake2b(digest_size=DIGEST_BYTES), line.num_bytes
    with path.open("rb") as file:
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest() == line.digest
