"""The native library: how it is built, and which instruction set is chosen."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from hatch_build import NATIVE_LIBRARY, X86, build_native
from lockstep.executors.native.library import BITS_VERSION, INTERFACE_VERSION, ISA_VARIABLE, native_library
from lockstep.executors.options import ISAS

ROOT = Path(__file__).parents[3]


def test_the_fastest_instruction_set_is_chosen_unless_one_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    best = native_library()
    if isinstance(best, str):
        pytest.skip(best)
    assert best.bits_version == BITS_VERSION
    assert best.handle.native_interface_version() == INTERFACE_VERSION
    assert best.usable[-1] == "portable"
    assert set(best.usable) <= set(best.built)
    assert best.built == (ISAS if platform.machine().lower() in X86 else ("portable",))
    assert best.isa == best.usable[0]
    forced = native_library("portable")
    assert not isinstance(forced, str)
    assert forced.isa == "portable"


@pytest.mark.skipif(isinstance(native_library("portable"), str), reason="the library was not built")
def test_the_environment_forces_one_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    by_environment = native_library()
    assert not isinstance(by_environment, str)
    assert by_environment.isa == "portable"
    monkeypatch.setenv(ISA_VARIABLE, "avx3")
    wrong, option = native_library(), native_library("portable")
    assert isinstance(wrong, str)
    assert "'avx3'" in wrong
    assert ISA_VARIABLE in wrong
    assert not isinstance(option, str)


def test_an_unknown_instruction_set_is_refused() -> None:
    if isinstance(native_library(), str):
        pytest.skip("the native library is not built")
    assert native_library("avx1024") == (
        "there is no instruction set 'avx1024'; the known ones are avx512, avx2, portable"
    )


def test_a_missing_or_broken_library_is_described_in_a_sentence(tmp_path: Path) -> None:
    assert "was not built" in str(native_library(library=tmp_path / "none.so"))
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert "cannot be loaded" in str(native_library(library=tmp_path / "broken.so"))


def test_a_machine_without_a_compiler_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setenv("CXX", "no-compiler-here")
    assert not build_native(ROOT, tmp_path / NATIVE_LIBRARY, warnings.append)
    monkeypatch.setenv("LOCKSTEP_PURE", "1")
    assert not build_native(ROOT, tmp_path / NATIVE_LIBRARY, warnings.append)
    assert warnings == [
        "the native library is not built (there is no C++ compiler 'no-compiler-here'; on Debian: apt install g++, "
        "or pip install ziglang), without which no model but a stub can be loaded",
        "the native library is not built (LOCKSTEP_PURE is set), without which no model but a stub can be loaded",
    ]
