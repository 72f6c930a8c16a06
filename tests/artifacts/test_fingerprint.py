"""Content alone decides on a fingerprint; the cache is a shortcut that may be damaged or deleted."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lockstep.artifacts.fingerprint import MappedFile, file_fingerprint, files_fingerprint
from lockstep.errors import ArtifactNotFoundError

LARGE = 1 << 20
OLD_NS = 1_600_000_000_000_000_000


def settled(path: Path, content: bytes) -> Path:
    """A file that was last changed long ago."""
    path.write_bytes(content)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def records(cache: Path) -> list[Path]:
    return sorted((cache / "fingerprints").glob("*")) if (cache / "fingerprints").exists() else []


def test_it_is_blake2b_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    expected = hashlib.blake2b(b"content", digest_size=16).hexdigest()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"content")
        assert file_fingerprint(tmp_path / name, tmp_path / "cache") == expected


def test_a_settled_large_file_is_hashed_once(tmp_path: Path) -> None:
    """Another content that nothing but a read reveals is not noticed."""
    path, cache = settled(tmp_path / "a", b"x" * LARGE), tmp_path / "cache"
    first = file_fingerprint(path, cache)
    assert len(records(cache)) == 1
    status = path.stat()
    path.write_bytes(b"y" * LARGE)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_fingerprint(path, cache) == first


@pytest.mark.parametrize("how", ["content", "time", "inode", "size"])
def test_a_changed_file_is_hashed_anew(how: str, tmp_path: Path) -> None:
    path, cache = settled(tmp_path / "a", b"x" * LARGE), tmp_path / "cache"
    before = file_fingerprint(path, cache)
    if how == "content":  # and time: nothing else can tell, with equal size and inode
        path.write_bytes(b"y" * LARGE)
    elif how == "time":
        path.write_bytes(b"y" * LARGE)
        os.utime(path, ns=(OLD_NS + 1, OLD_NS + 1))
    elif how == "inode":
        settled(tmp_path / "b", b"y" * LARGE).replace(path)
    else:
        settled(path, b"x" * (LARGE + 1))
    assert file_fingerprint(path, cache) != before


def test_a_file_that_may_still_change_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * LARGE)
    file_fingerprint(tmp_path / "a", tmp_path / "cache")
    assert records(tmp_path / "cache") == []


def test_small_files_leave_no_record(tmp_path: Path) -> None:
    file_fingerprint(settled(tmp_path / "a", b"x"), tmp_path / "cache")
    assert records(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"1 2 3 " + b"0" * 32 + b" " + b"0" * 32, None])
def test_a_damaged_record_is_ignored_and_repaired(damage: bytes | None, tmp_path: Path) -> None:
    """None: one digit of the digest is flipped, everything else is right."""
    path, cache = settled(tmp_path / "a", b"x" * LARGE), tmp_path / "cache"
    expected = file_fingerprint(path, cache)
    (record,) = records(cache)
    content = record.read_bytes()
    position = content.index(expected.encode())
    flipped = (
        content[:position] + (b"1" if content[position : position + 1] == b"0" else b"0") + content[position + 1 :]
    )
    record.write_bytes(flipped if damage is None else damage)
    assert file_fingerprint(path, cache) == expected
    assert record.read_bytes() == content


def test_a_record_of_another_file_is_not_believed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one, other = settled(tmp_path / "a", b"x" * LARGE), settled(tmp_path / "b", b"y" * LARGE)
    first = file_fingerprint(one, cache)
    (record_of_one,) = records(cache)
    second = file_fingerprint(other, cache)
    (record_of_other,) = set(records(cache)) - {record_of_one}
    record_of_other.write_bytes(record_of_one.read_bytes())
    assert file_fingerprint(other, cache) == second != first


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    path = settled(tmp_path / "a", b"x" * LARGE)
    assert file_fingerprint(path, tmp_path / "cache") == hashlib.blake2b(b"x" * LARGE, digest_size=16).hexdigest()


def test_a_full_cache_starts_anew(tmp_path: Path) -> None:
    for index in range(5):
        file_fingerprint(settled(tmp_path / str(index), b"x" * LARGE), tmp_path / "cache", max_records=3)
        assert 1 <= len(records(tmp_path / "cache")) <= 3
    assert len(records(tmp_path / "cache")) == 2


def test_several_files_count_by_relative_name_and_content(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            (tmp_path / folder / name).write_bytes(name.encode())
    cache = tmp_path / "cache"
    assert files_fingerprint(tmp_path / "one", ["a", "b"], cache) == files_fingerprint(
        tmp_path / "two", ["b", "a"], cache
    )
    before = files_fingerprint(tmp_path / "one", ["a", "b"], cache)
    assert files_fingerprint(tmp_path / "one", ["a"], cache) != before
    (tmp_path / "one" / "a").write_bytes(b"b")
    (tmp_path / "one" / "b").write_bytes(b"a")
    assert files_fingerprint(tmp_path / "one", ["a", "b"], cache) != before


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="No such file"):
        file_fingerprint(tmp_path / "none", tmp_path)


# -- files that stay mapped -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"other ones", b"shorter", b"a longer content"])
def test_a_mapped_file_that_is_overwritten_has_changed(tmp_path: Path, content: bytes) -> None:
    path = settled(tmp_path / "a", b"ten bytes.")
    file = MappedFile.of(path, tmp_path / "cache")
    assert not file.is_changed
    path.write_bytes(content)
    assert file.is_changed


def test_a_mapped_file_that_is_written_again_or_replaced_or_removed_has_its_content(tmp_path: Path) -> None:
    path = settled(tmp_path / "a", b"content")
    file = MappedFile.of(path, tmp_path / "cache")
    path.write_bytes(b"content")
    assert not file.is_changed
    settled(tmp_path / "b", b"another").replace(path)
    assert not file.is_changed, "a map shows the file that it was made of"
    path.unlink()
    assert not file.is_changed


def test_a_file_that_is_missing_is_not_mapped(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError):
        MappedFile.of(tmp_path / "none", tmp_path / "cache")
