"""Files of KV blocks: what comes back is what was written, or nothing, whatever happened to the files."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import owned_folders
from lockstep.engine import kv_files
from lockstep.engine.kv_files import BlockError, BlockFiles, BlockKey, claim_host_folder
from lockstep.engine.kv_records import SessionRecord, SessionRecords
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks
from tests.disks import mounted
from tests.systems import WatchedSystem

SIZE = 5000
PAGES = 8192
"""Bytes of one block's file, in whole pages."""
ENVIRONMENT = b"e" * 16


def key_of(number: int, environment: bytes = ENVIRONMENT) -> BlockKey:
    return BlockKey(environment, number.to_bytes(16, "little"))


def content_of(number: int) -> Blocks:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def filled(folder: Path, count: int, budget: int = 1 << 20) -> BlockFiles:
    files = BlockFiles(folder, budget)
    for number in range(count):
        assert files.write(key_of(number), content_of(number), 0)
    return files


def read(files: BlockFiles, key: BlockKey) -> Blocks | None:
    content = np.zeros(SIZE, np.uint8)
    return content if files.read(key, content) else None


def paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_blocks_come_back_also_to_another_process(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    files = BlockFiles(tmp_path, 1 << 20)
    for number in range(3):
        content = read(files, key_of(number))
        assert content is not None
        assert (content == content_of(number)).all()
    assert read(files, key_of(3)) is None
    assert read(files, key_of(1, b"f" * 16)) is None, "other bits, other blocks"
    assert files.num_bytes == 3 * PAGES == sum(path.stat().st_blocks * 512 for path in paths(tmp_path))


def test_only_the_owner_may_read_them(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 1).close()
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "kv").rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_a_flipped_bit_anywhere_is_a_miss(tmp_path: Path) -> None:
    """A thousand random places, of header and content alike."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    files = filled(tmp_path, 1)
    [path] = paths(tmp_path)
    whole = path.read_bytes()
    for _ in range(1000):
        place = rng.choice([rng.randrange(kv_files.HEADER_BYTES), rng.randrange(len(whole))])
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(BlockError, match=r"checksum|another block|version"):
            read(files, key_of(0))
        assert not path.exists()
        assert key_of(0) not in files
        assert files.num_bytes == 0
        assert files.write(key_of(0), content_of(0), 0)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, SIZE, SIZE + 63, SIZE + 65, 3 * SIZE])
def test_a_file_of_another_length_is_a_miss(length: int, tmp_path: Path) -> None:
    files = filled(tmp_path, 1)
    [path] = paths(tmp_path)
    path.write_bytes((path.read_bytes() * 4)[:length])
    with pytest.raises(BlockError, match="a wrong length"):
        read(files, key_of(0))
    assert read(files, key_of(0)) is None


def test_swapped_files_are_misses(tmp_path: Path) -> None:
    files = filled(tmp_path, 2)
    first, second = paths(tmp_path)
    aside = tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    for number in range(2):
        with pytest.raises(BlockError, match="holds another block than its name states"):
            read(files, key_of(number))


def test_blocks_of_another_environment_under_this_one_s_name_are_misses(tmp_path: Path) -> None:
    filled(tmp_path, 1).close()
    (tmp_path / ENVIRONMENT.hex()).rename(tmp_path / (b"f" * 16).hex())
    files = BlockFiles(tmp_path, 1 << 20)
    with pytest.raises(BlockError, match="holds another block"):
        read(files, key_of(0, b"f" * 16))


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    files = filled(tmp_path, 1)
    paths(tmp_path)[0].unlink()
    with pytest.raises(BlockError, match="No such file"):
        read(files, key_of(0))


def test_what_else_lies_in_the_folder_stays_but_for_unfinished_blocks(tmp_path: Path) -> None:
    filled(tmp_path, 1).close()
    [path] = paths(tmp_path)
    unfinished, foreign = path.with_suffix(".part"), tmp_path / "notes.txt"
    unfinished.write_bytes(b"half")
    foreign.write_text("mine")
    files = BlockFiles(tmp_path, 1 << 20)
    assert not unfinished.exists()
    assert foreign.read_text() == "mine"
    assert list(files) == [key_of(0)]


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    files = filled(tmp_path, 0)
    with pytest.raises(UsageError, match="another process stores its KV blocks there"):
        BlockFiles(tmp_path, 1 << 20)
    files.close()
    BlockFiles(tmp_path, 1 << 20).close()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/kv: KV blocks cannot be stored there: Not a directory"):
        BlockFiles(tmp_path / "file" / "kv", 1 << 20)


def test_the_least_recently_used_of_the_worst_class_goes_first(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, 4 * PAGES)
    for number, class_ in enumerate((0, 1, 1, -2)):
        assert files.write(key_of(number), content_of(number), class_)
    assert read(files, key_of(1)) is not None
    assert files.write(key_of(4), content_of(4), 0)
    assert list(files) == [key_of(n) for n in (0, 1, 3, 4)], "2 was used before 1"
    assert files.write(key_of(5), content_of(5), 0)
    assert list(files) == [key_of(n) for n in (0, 3, 4, 5)]
    assert not files.write(key_of(6), content_of(6), 1), "only better ones are there"
    assert files.num_evicted == 2


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(0, 6 * PAGES),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 1), st.sampled_from("wwwrxs")), max_size=40),
)
def test_the_budget_is_never_exceeded(
    tmp_path_factory: pytest.TempPathFactory, budget: int, steps: list[tuple[int, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    files = BlockFiles(folder, budget)
    for number, class_, what in steps:
        key = key_of(number)
        if what == "w":
            files.write(key, content_of(number), class_)
        elif what == "r":
            content = read(files, key)
            assert content is None or (content == content_of(number)).all()
        elif what == "x":
            files.remove(key)
        else:
            files.budget_bytes = budget = budget * 2 // 3
            files.shrink()
        on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*.kv"))
        assert on_disk == files.num_bytes <= budget
        assert len(files) == len(list(folder.rglob("*.kv")))
    files.close()


def test_a_full_disk_loses_the_block_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on the size of files stands for it: the write ends in the middle."""
    files = filled(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        assert not files.write(key_of(1), content_of(1), 0)
        assert not files.write(key_of(2), content_of(2), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(caplog.records) == 1, "said once, not with every block"
    assert not list(tmp_path.rglob("*.part"))
    assert read(files, key_of(0)) is not None
    assert files.write(key_of(1), content_of(1), 0)


def test_a_full_disk_is_a_cache_of_its_size_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk of 20 blocks, and a budget of more: the least recently used block gives way, as within a budget."""
    caplog.set_level(logging.INFO)
    num_free = 20

    def refuse(call: str, path: str) -> None:
        if call == "write" and len(paths(tmp_path)) >= num_free:
            append_half(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = BlockFiles(tmp_path, 1 << 30, WatchedSystem(refuse))
    for number in range(60):
        assert files.write(key_of(number), content_of(number), 0)
    assert list(files) == [key_of(number) for number in range(40, 60)]
    assert files.num_bytes == 20 * PAGES
    assert not files.write(key_of(99), content_of(99), 1), "only better ones are there"
    assert not list(tmp_path.rglob("*.part"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert files.fault.startswith(f"{tmp_path}: KV blocks cannot be stored there now: No space left on device")
    num_free = 1000
    for number in range(60, 300):
        assert files.write(key_of(number), content_of(number), 0)
    assert files.fault == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_real_full_disk_keeps_what_fits_and_counts_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "disk", "400k") as disk:
        files = BlockFiles(disk, 1 << 30)
        records = SessionRecords(files)
        for number in range(100):
            files.write(key_of(number), content_of(number), 0)
            record = SessionRecord("m", str(number), ENVIRONMENT, (key_of(number).block_hash,), 0.0)
            for name in records.put(record):
                records.write(name)
        on_disk = sum(path.stat().st_blocks * 512 for path in disk.rglob("*") if path.is_file())
        assert files.num_bytes == on_disk > 300 << 10
        assert len(files) >= 10
        for key in files:
            assert read(files, key) is not None
        assert len(caplog.records) == 1, "one warning, neither for each block nor for each session"
        files.close()


WRITER = """
import itertools, sys
from pathlib import Path
from tests.engine.test_kv_files import BlockFiles, content_of, key_of
files = BlockFiles(Path(sys.argv[1]), 1 << 20)
print("ready", flush=True)
for number in itertools.count():
    files.write(key_of(number % 40), content_of(number % 40), 0)
    files.remove(key_of((number + 7) % 40))
"""


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.01, 0.2))
            process.kill()
        files = BlockFiles(tmp_path, 1 << 20)
        for key in files:
            content = read(files, key)
            assert content is not None
            assert (content == content_of(int.from_bytes(key.block_hash, "little"))).all()
        files.close()


def append_half(path: str) -> None:
    """Write a part of what is being written to a file."""
    with open(path, "ab") as file:
        file.write(bytes(SIZE // 2))


DYING_WRITER = """
import itertools, os, sys
from pathlib import Path
from tests.engine.test_kv_files import BlockFiles, append_half, content_of, key_of
from tests.systems import WatchedSystem
from lockstep.engine.kv_records import SessionRecord, SessionRecords

def save(folder, system):
    files = BlockFiles(folder, 1 << 20, system)
    records = SessionRecords(files)
    for number in range(3):
        files.write(key_of(number), content_of(number), 0)
        hashes = tuple(key_of(each).block_hash for each in range(number + 1))
        for name in records.put(SessionRecord("m", "s", key_of(0).environment, hashes, 0.0)):
            records.write(name)
    files.remove(key_of(0))

def dying_at(n):
    calls = itertools.count()
    def count(call, path):
        if next(calls) == n:
            if call == "write":
                append_half(path)
            os._exit(9)
    unlink = os.unlink
    def counted(path):
        count("unlink", path)
        unlink(path)
    os.unlink = counted
    return WatchedSystem(count)

for n in itertools.count():
    child = os.fork()
    if not child:
        save(Path(sys.argv[1]) / str(n), dying_at(n))
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_process_may_die_at_every_call_of_a_save(tmp_path: Path) -> None:
    """At the n-th call that opens, writes, names or removes a file, for each n; of a write, half is there."""
    command = [sys.executable, "-c", DYING_WRITER, str(tmp_path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    left = sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
    nums_present = []
    for folder in left:
        files = BlockFiles(folder, 1 << 20)
        records = SessionRecords(files)
        for key in files:
            content = read(files, key)
            assert content is not None
            assert (content == content_of(int.from_bytes(key.block_hash, "little"))).all()
        for record in records.of(ENVIRONMENT):
            assert record.hashes == tuple(key_of(each).block_hash for each in range(len(record.hashes)))
        assert not list(folder.rglob("*.part"))
        on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        assert files.num_bytes == on_disk, "nothing is there that is not counted"
        nums_present.append((len(files), sum(len(record.hashes) for record in records.of(ENVIRONMENT))))
        files.close()
    assert len(left) > 15
    assert nums_present[0] == (0, 0)
    assert (3, 3) in nums_present
    assert nums_present[-1] == (2, 3)


def test_host_folders_of_dead_servers_are_removed(tmp_path: Path) -> None:
    mine = claim_host_folder(tmp_path)
    dead = claim_host_folder(tmp_path)
    os.close(dead.folder.descriptor)  # as its process's end does
    other = claim_host_folder(tmp_path)
    assert mine.path.exists()
    assert not dead.path.exists()
    for folder in (mine, other):
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_server_whose_new_folder_is_taken_for_one_that_was_left_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start at one moment: one looks for what was left between the other's folder and its lock."""
    claimed: list[kv_files.HostFolder] = []
    paths_to_lock: list[Path] = []
    lock = owned_folders.lock_file

    def lock_late(path: Path) -> int:
        paths_to_lock.append(path)
        if len(paths_to_lock) == 1:
            claimed.append(claim_host_folder(tmp_path))
        return lock(path)

    monkeypatch.setattr(owned_folders, "lock_file", lock_late)
    claimed.append(claim_host_folder(tmp_path))
    assert len({folder.path for folder in claimed}) == 2
    for folder in claimed:
        assert folder.path.is_dir()
        folder.remove()


def test_a_link_that_looks_like_a_folder_of_a_dead_server_is_left_alone(tmp_path: Path) -> None:
    """Everybody may write to shared memory: what somebody else put there must not lead us elsewhere."""
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    (shared / "lockstep-kv-evil").symlink_to(elsewhere)
    claim_host_folder(shared).remove()
    assert not list(elsewhere.iterdir())


def test_a_folder_among_the_blocks_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path, 1).close()
    [path] = paths(tmp_path)
    (path.parent / "somebody's").mkdir()
    files = BlockFiles(tmp_path, 1 << 20)
    assert len(files) == 1
    files.close()


def test_a_folder_that_could_not_be_read_can_be_had_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: BlockFiles) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(BlockFiles, "_scan", scan)
        with pytest.raises(UsageError, match="Permission denied"):
            BlockFiles(tmp_path, 1 << 20)
    BlockFiles(tmp_path, 1 << 20).close()


def test_no_more_is_kept_in_host_memory_than_was_free_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often have 64 MiB of shared memory, whatever the machine has."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(total=64 << 20, free=60 << 20))
    folder = claim_host_folder(tmp_path)
    assert folder.usable_bytes == 54 << 20
    fault = kv_files.host_fault(tmp_path, 1 << 30, folder.usable_bytes)
    assert fault.startswith(f"{tmp_path} has room for only 54 of 1024 MiB of KV, ")
    assert kv_files.host_fault(tmp_path, 1 << 20, folder.usable_bytes) == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(total=0, free=0))
    assert claim_host_folder(tmp_path).usable_bytes > 1 << 50, "one without a bound says so"
    folder.remove()
