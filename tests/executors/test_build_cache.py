"""A cached build is used only when it is whole and the right one; anything else is built again, never a crash."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.executors.build_cache import MANIFEST, BuildCache

KEY = {"artifact": "a", "builder": "1"}
MODEL, WEIGHTS = FILES = ("model.xml", "model.bin")


def saver(num_bytes: int = 100) -> Callable[[Path], None]:
    def save(model: Path) -> None:
        model.write_bytes(b"graph")
        model.with_suffix(".bin").write_bytes(b"w" * num_bytes)

    return save


def test_stored_entry_is_found_only_by_its_key(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path / "ir", 10_000, FILES)
    assert cache.find(KEY) is None
    path = cache.store(KEY, saver())
    assert cache.find(KEY) == path
    assert path.read_bytes() == b"graph"
    assert cache.find(KEY | {"builder": "2"}) is None
    cache.remove(KEY)
    assert cache.find(KEY) is None


def truncate_weights(entry: Path) -> None:
    os.truncate(entry / WEIGHTS, 50)


def damage_graph(entry: Path) -> None:
    (entry / MODEL).write_bytes(b"grapf")


def lose_weights(entry: Path) -> None:
    (entry / WEIGHTS).unlink()


def lose_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def damage_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text("{")


def foreign_manifest(entry: Path) -> None:
    manifest = json.loads((entry / MANIFEST).read_text())
    manifest["key"]["artifact"] = "b"
    (entry / MANIFEST).write_text(json.dumps(manifest))


def manifest_of_another_shape(entry: Path) -> None:
    (entry / MANIFEST).write_text("[]")


DAMAGES = [
    truncate_weights,
    damage_graph,
    lose_weights,
    lose_manifest,
    damage_manifest,
    foreign_manifest,
    manifest_of_another_shape,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_removed(damage: Callable[[Path], None], tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, 10_000, FILES)
    entry = cache.store(KEY, saver()).parent
    damage(entry)
    assert cache.find(KEY) is None
    assert not entry.exists()
    assert cache.store(KEY, saver()) == entry / MODEL
    assert cache.find(KEY) is not None


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(model: Path) -> None:
        model.write_bytes(b"half")
        raise RuntimeError("disk full")

    cache = BuildCache(tmp_path, 10_000, FILES)
    with pytest.raises(RuntimeError, match="disk full"):
        cache.store(KEY, fail)
    assert list(tmp_path.iterdir()) == []


def test_another_process_may_publish_the_same_key_first(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, 10_000, FILES)

    published = []

    def save_while_another_does(model: Path) -> None:
        published.append(BuildCache(tmp_path, 10_000, FILES).store(KEY, saver()).stat())
        saver()(model)

    path = cache.store(KEY, save_while_another_does)
    assert path.stat().st_ino == published[0].st_ino, "the other process is about to map it"
    assert cache.find(KEY) == path
    assert len(list(tmp_path.iterdir())) == 1


def test_the_least_recently_used_go_when_it_is_too_much(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, 4_000, FILES)
    keys = [KEY | {"artifact": str(index)} for index in range(3)]
    for age, key in zip((30, 20), keys, strict=False):
        path = cache.store(key, saver(1_500))
        os.utime(path.with_name(MANIFEST), (time.time() - age,) * 2)
    assert cache.find(keys[0]) is not None, "using it makes it recent"
    cache.store(keys[2], saver(1_500))
    assert [cache.find(key) is not None for key in keys] == [True, False, True]


def test_newest_entry_stays_even_above_the_limit(tmp_path: Path) -> None:
    cache = BuildCache(tmp_path, 10, FILES)
    cache.store(KEY, saver())
    assert cache.find(KEY) is not None


def test_directories_of_processes_that_died_are_cleared(tmp_path: Path) -> None:
    for name, age in ((".tmp-old", 7200), (".tmp-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    BuildCache(tmp_path, 10_000, FILES).store(KEY, saver())
    assert not (tmp_path / ".tmp-old").exists()
    assert (tmp_path / ".tmp-new").exists()
