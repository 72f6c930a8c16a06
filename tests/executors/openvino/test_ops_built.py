"""The attention operator built anew: under sanitizers, and with a fault that the comparison of bits must see."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hatch_build import FLAGS, KERNEL_FLAGS, OPS, build, openvino_package
from lockstep.executors.machine import instruction_set
from lockstep.executors.openvino.ops import VERSION, own_attention, own_library
from tests.executors.openvino import attention_step
from tests.executors.openvino.attention_step import Heads, attend, random_chunk, table_for
from tests.executors.openvino.support import needs_operator, random_artifact

pytestmark = [pytest.mark.slow, needs_operator]
ROOT = Path(__file__).parents[3]
NUM_STEPS = 20_000
SANITIZED = ("-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def test_nothing_is_read_or_written_outside(tmp_path: Path) -> None:
    """Valid and invalid steps on every kernel, under the sanitizers of addresses and of undefined behaviour."""
    package, ops = openvino_package(), ROOT / OPS
    include = ("-isystem", str(package / "include"), "-I", str(ops))
    sources = [ops / "attention.cpp", *sorted(ops.glob("kernel_*.cpp")), Path(__file__).parent / "fuzz_attention.cpp"]
    jobs = []
    for source in sources:
        flags = (*FLAGS, *KERNEL_FLAGS.get(source.name, ()), *SANITIZED, *include)
        jobs.append(subprocess.Popen(["g++", *flags, "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")]))
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    [tbb] = (package / "libs").glob("libtbb.so.*")
    program, objects = tmp_path / "fuzz", [str(tmp_path / f"{source.stem}.o") for source in sources]
    link = ["g++", *SANITIZED, *objects, str(tbb), f"-Wl,-rpath,{tbb.parent}", "-o", str(program)]
    subprocess.run(link, check=True)
    done = subprocess.run([program, str(NUM_STEPS), "1"], capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{NUM_STEPS} steps, "), done.stdout


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """As after an update of the sources alone: its operator would take other inputs than the graph gives."""
    shutil.copytree(ROOT / OPS, tmp_path / OPS, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    header = tmp_path / OPS / "attention.hpp"
    header.write_text(re.sub(r"int VERSION = \d+", "int VERSION = 1", header.read_text()))
    assert build(tmp_path, tmp_path / "old.so", pytest.fail)
    found = own_attention(random_artifact().config, "f16", instruction_set(), tmp_path / "old.so")
    assert f"built of other sources (version 1, not {VERSION})" in str(found)


def test_a_kernel_whose_tile_changes_the_order_of_a_sum_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / OPS, tmp_path / OPS, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    rows = tmp_path / OPS / "rows.hpp"
    text = rows.read_text()
    right = "for (int d = 0; d < dim; d++) {\n            const std::size_t index"
    assert text.count(right) == 1
    wrong = "for (int i = 0; i < dim; i++) {\n            const int d = R > 2 ? dim - 1 - i : i;\n"
    rows.write_text(text.replace(right, f"{wrong}            const std::size_t index"))
    assert build(tmp_path, tmp_path / "twin.so", pytest.fail)
    twin = own_library(tmp_path / "twin.so")
    assert not isinstance(twin, str), twin
    heads = Heads(2, 2, 64)
    whole = random_chunk(np.random.default_rng(0), heads, 40, table_for(40))
    for library, is_same in ((twin, False), (own_library(), True)):
        monkeypatch.setattr(attention_step, "library", lambda library=library: library)
        at_once, cache = attend(heads, heads.cache(4), whole), heads.cache(4)
        one_by_one = [attend(heads, cache, whole.part(at, at + 1)) for at in range(40)]
        assert np.array_equal(at_once, np.concatenate(one_by_one)) == is_same
