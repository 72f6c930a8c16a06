"""The digests of whole models see a library that breaks the contract of bits, and do not see how it was compiled.

Minutes of compilation, so only among slow tests; kernels alone have their twins in test_products.py and
test_elements_bits.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from hatch_build import cpp_compiler, native_flags
from lockstep.executors.native import executor
from lockstep.executors.native.library import native_library
from tests.executors.native.native_elements import CPP
from tests.executors.native.test_products import TWINS as OF_PRODUCTS
from tools.golden.native_digests import DIGESTS, prompt_digest

CASE = "tiny-llama Q8_0 f16"
OF_NORMS = {
    "V squares = L::zero();": "V squares = L::zero(), odd = L::zero();",
    "squares = L::fma(each, each, squares);": "(i / LANES % 2 ? odd : squares) = "
    "L::fma(each, each, i / LANES % 2 ? odd : squares);",
    "L::store(sums, squares);": "L::store(sums, L::add(squares, odd));",
}
TWINS: Mapping[str, tuple[str, Mapping[str, str], tuple[str, ...]]] = {
    **{name: ("product_portable.cpp", changes, ()) for name, changes in OF_PRODUCTS.items()},
    "a norm of two accumulators": ("elementwise.hpp", OF_NORMS, ()),
    "contracted": ("", {}, ("-mfma", "-ffp-contract=fast")),
}
"""File, pieces of it that are replaced, and further flags."""
SAME = {"-O1": ("-O1",), "-O3": ("-O3",)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def build(folder: Path, flags: tuple[str, ...], file: str = "", changes: Mapping[str, str] | None = None) -> Path:
    """A whole library of changed sources."""
    sources, target = folder / "cpp", folder / "twin.so"
    shutil.copytree(CPP, sources)
    for old, new in (changes or {}).items():
        text = (sources / file).read_text()
        assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
        (sources / file).write_text(text.replace(old, new))
    jobs = {
        place.with_suffix(".o"): subprocess.Popen(
            [*cpp_compiler(), *native_flags(place), *flags, "-c", place, "-o", place.with_suffix(".o")]
        )
        for place in sorted(sources.glob("*.cpp"))
    }
    assert [job.wait() for job in jobs.values()] == [0] * len(jobs)
    subprocess.run([*cpp_compiler(), "-shared", "-s", "-pthread", *jobs, "-o", target], check=True)
    return target


def digest_by(library: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(executor, "native_library", lambda isa=None: native_library(isa, library))
    monkeypatch.setattr(executor, "_POOLS", {})
    monkeypatch.setattr(executor, "_check_bits", lambda found: None)  # it would refuse some of them
    return prompt_digest(CASE, "portable")


@pytest.mark.parametrize("name", TWINS)
def test_a_digest_sees_each_broken_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, changes, flags = TWINS[name]
    library = build(tmp_path, ("-O2", *flags), file, changes)
    assert digest_by(library, monkeypatch) != json.loads(DIGESTS.read_text())[CASE]


@pytest.mark.parametrize("name", SAME)
def test_a_digest_does_not_see_the_level_of_optimisation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest_by(build(tmp_path, SAME[name]), monkeypatch) == json.loads(DIGESTS.read_text())[CASE]
