"""Packed weights in files: mapped again, refused where damaged, made anew, and in memory where no file can be."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact, Encoding
from lockstep.artifacts.tensors import bytes_by_encoding
from lockstep.errors import ExecutorError
from lockstep.executors.native import packs
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.packs import DATA, TABLE, FileCheck, ModelWeights, load_weights, packed_encoding
from lockstep.executors.native.weights import packed_growth
from tests.disks import mounted
from tests.executors.native.loading import loaded
from tests.executors.native.support import SMALL_LLAMA, TINY_LLAMA, random_artifact, run
from tools.random_blocks import BLOCKS, has_long_blocks
from tools.random_models import ENCODINGS, Shape

IDS = np.random.default_rng(2).integers(0, 512, 40).tolist()


def library() -> NativeLibrary:
    found = native_library()
    assert isinstance(found, NativeLibrary)
    return found


def load(artifact: Artifact, folder: Path | None, quantize: str | None = None, limit: int = 1 << 30) -> ModelWeights:
    return load_weights(artifact, library(), quantize, folder, limit, lambda stage, share: None)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "packed").glob("*/"))


def contents(weights: ModelWeights) -> dict[str, bytes]:
    return {name: each.data.tobytes() for name, each in weights.matrices.items()}


def shape_for(encoding: str) -> Shape:
    return SMALL_LLAMA if has_long_blocks(encoding) else TINY_LLAMA


@pytest.mark.parametrize("encoding", [*ENCODINGS, "Q4_K_M"])
def test_packed_file_equals_packed_memory_and_the_next_load_maps_it(encoding: str, tmp_path: Path) -> None:
    artifact = random_artifact(shape_for(encoding), encoding)
    in_memory = contents(load(artifact, None))
    first = load(artifact, tmp_path)
    assert contents(first) == in_memory
    if encoding in ("F32", "F16", "BF16"):
        assert not entries(tmp_path), "float weights are read where they are"
        return
    [entry] = entries(tmp_path)
    written = (entry / DATA).stat().st_mtime_ns
    second = load(artifact, tmp_path)
    assert contents(second) == in_memory
    assert (entry / DATA).stat().st_mtime_ns == written
    second.close()
    first.close()


LAYOUT = ("1", "d676ddcec7ea1bb884e76231")
"""Version of the layout, and the digest of what it makes of every encoding."""


def test_a_layout_has_its_version() -> None:
    """A file of the same version is mapped as it is: other bytes need another version."""
    digest = hashlib.blake2b(digest_size=12)
    for encoding in (*BLOCKS, "Q4_K_M"):
        weights = load(random_artifact(shape_for(encoding), encoding), None)
        for name, data in sorted(contents(weights).items()):
            digest.update(name.encode() + data)
    assert (packs.LAYOUT_VERSION, digest.hexdigest()) == LAYOUT


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_rounded_weights_have_files_of_their_own(quantize: str, tmp_path: Path) -> None:
    artifact = random_artifact(TINY_LLAMA, "BF16")
    weights = load(artifact, tmp_path, quantize)
    assert contents(weights) == contents(load(artifact, None, quantize))
    other = load(artifact, tmp_path, "int4" if quantize == "int8" else "int8")
    assert len(entries(tmp_path)) == 2
    assert contents(other) != contents(weights)


def test_tables_are_never_rounded_to_four_bits() -> None:
    artifact = random_artifact(TINY_LLAMA, "F32")
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight")
    found = [packed_encoding(name, artifact.weights[name], "int4") for name in names]
    assert found == [Encoding.Q8_0, Encoding.Q8_0, Encoding.Q4_0]


def cut(entry: Path) -> None:
    os.truncate(entry / DATA, 1000)


def cut_table(entry: Path) -> None:
    os.truncate(entry / TABLE, 20)


def lose(entry: Path) -> None:
    (entry / DATA).unlink()


def flip_in_the_table(entry: Path) -> None:
    table = bytearray((entry / TABLE).read_bytes())
    table[len(table) // 2] ^= 1
    (entry / TABLE).write_bytes(table)


def another_key(entry: Path) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["key"]["layout"] = "0"
    (entry / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", [cut, cut_table, flip_in_the_table, lose, another_key])
def test_damaged_pack_is_packed_again(damage: object, tmp_path: Path) -> None:
    artifact = random_artifact(encoding="Q8_0")
    first = load(artifact, tmp_path)
    expected = contents(first)
    first.close()
    [entry] = entries(tmp_path)
    damage(entry)  # type: ignore[operator]  # one of the functions above
    assert contents(load(artifact, tmp_path)) == expected
    [entry] = entries(tmp_path)
    assert (entry / DATA).stat().st_size > 1000


def test_a_flipped_bit_ends_the_executor_and_the_file(tmp_path: Path) -> None:
    artifact = random_artifact(encoding="Q8_0")
    with loaded(artifact, cache_dir=tmp_path) as executor:
        expected = run(executor, (IDS, 0, (1, 2)))
    [entry] = entries(tmp_path)
    with (entry / DATA).open("r+b") as file:
        file.seek(70_001)
        flipped = bytes([file.read(1)[0] ^ 4])
        file.seek(70_001)
        file.write(flipped)
    with loaded(artifact, cache_dir=tmp_path) as executor:
        assert executor._weights._check is not None
        executor._weights._check.join()
        with pytest.raises(ExecutorError, match=f"damaged at byte 0 of {entry / DATA}"):
            run(executor, (IDS, 0, (1, 2)))
    assert not entries(tmp_path)
    with loaded(artifact, cache_dir=tmp_path) as executor:
        assert np.array_equal(run(executor, (IDS, 0, (1, 2))), expected)


def test_a_file_that_took_the_place_of_a_damaged_one_stays(tmp_path: Path) -> None:
    """Another process may have removed and packed it again while this one still reads the old one."""
    artifact = random_artifact(encoding="Q8_0")
    weights = load(artifact, tmp_path)
    expected, [entry] = contents(weights), entries(tmp_path)
    weights.close()
    panels = np.fromfile(entry / DATA, np.uint8)
    written = (entry / DATA).stat()
    facts = json.loads((entry / TABLE).read_text())
    shutil.rmtree(entry)
    load(artifact, tmp_path).close()
    panels[1_000] ^= 1
    check = FileCheck(entry / DATA, written, panels, facts["part"], facts["crc32"])
    check.join()
    assert check.fault is not None
    assert contents(load(artifact, tmp_path)) == expected
    assert entries(tmp_path) == [entry]


def test_weights_stay_readable_when_their_file_is_removed(tmp_path: Path) -> None:
    artifact = random_artifact(encoding="Q4_0")
    with loaded(artifact, cache_dir=tmp_path) as executor:
        expected = run(executor, (IDS, 0, (1, 2)))
        shutil.rmtree(tmp_path / "packed")
        assert np.array_equal(run(executor, (IDS, 0, (1, 2))), expected)


def test_a_full_disk_costs_memory_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = random_artifact(encoding="Q8_0")
    with mounted(tmp_path / "disk", "256k") as disk, caplog.at_level(logging.WARNING):
        weights = load(artifact, disk)
        assert contents(weights) == contents(load(artifact, None))
        assert "packed weights are kept in memory instead of a file" in caplog.text
        assert os.strerror(errno.ENOSPC) in caplog.text
        assert not entries(disk)


def test_a_folder_that_cannot_be_made_costs_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "packed").write_text("a file")
    artifact = random_artifact(encoding="Q4_0")
    assert contents(load(artifact, tmp_path)) == contents(load(artifact, None))
    assert "in memory" in caplog.text


def test_least_recently_used_pack_is_removed_and_mapped_weights_stay_readable(tmp_path: Path) -> None:
    first, second = random_artifact(encoding="Q8_0"), random_artifact(encoding="Q8_0", seed=1)
    weights = load(first, tmp_path)
    expected, [old] = contents(weights), entries(tmp_path)
    load(second, tmp_path, limit=weights.num_bytes + 4096)
    assert old not in entries(tmp_path)
    assert contents(weights) == expected


def test_two_processes_that_pack_at_once_both_work(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.executors.native.test_packs import contents, load\n"
        "from tests.executors.native.support import random_artifact\n"
        "import hashlib\n"
        "found = contents(load(random_artifact(encoding='Q8_0'), Path(sys.argv[1])))\n"
        "print(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest())\n"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert outputs[0] == outputs[1] != ""
    assert len(entries(tmp_path)) == 1


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    """What a cluster's budget counts: blocks as the file has them and what panels add to some, at most 3 % more."""
    encodings = (*dict.fromkeys(("Q8_0", "Q4_0", "Q6_K", "F16", "IQ4_NL"), 1.0).items(), ("Q4_K", 1.03))
    for encoding, most in (*encodings, ("Q3_K", 1.001), ("IQ4_XS", 1.001)):
        artifact = random_artifact(SMALL_LLAMA, encoding)
        tensors = [artifact.weights[name] for name in artifact.weights.names()]
        matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
        stored = sum(tensor.data.nbytes for tensor in matrices) + packed_growth(bytes_by_encoding(matrices))
        assert stored <= load(artifact, None).num_bytes <= most * stored, encoding
    assert packs.LAYOUT_VERSION


def test_packs_of_models_that_are_gone_are_removed(tmp_path: Path) -> None:
    kept, gone = tmp_path / "kept.gguf", tmp_path / "gone.gguf"
    for number, path in enumerate((kept, gone)):
        path.touch()
        load(replace(random_artifact(encoding="Q8_0", seed=number), path=path), tmp_path).close()
    assert [pack.source for pack in packs.stored_packs(tmp_path)] == [gone, kept]
    assert packs.remove_orphans(tmp_path, tmp_path) == 0
    gone.unlink()
    [of_gone, of_kept] = packs.stored_packs(tmp_path)
    assert packs.remove_orphans(tmp_path, tmp_path / "elsewhere") == 0
    assert packs.remove_orphans(tmp_path, tmp_path) == of_gone.num_bytes
    assert packs.stored_packs(tmp_path) == [of_kept]
