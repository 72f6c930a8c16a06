"""The native library for the tests of this folder: the installed one, or one that is built for them."""

from __future__ import annotations

import ctypes

import pytest

from tests.executors.native.native_elements import CPP, Elements, compile_library, isas_here


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    installed = CPP.parent / "liblockstep_native.so"
    if installed.exists():
        return ctypes.CDLL(str(installed))
    return compile_library(tmp_path_factory.mktemp("native") / "elements.so")


@pytest.fixture(scope="session")
def isas(library: ctypes.CDLL) -> list[Elements]:
    """Row operations of every instruction set of this processor, portable first."""
    return isas_here(library)


@pytest.fixture(scope="session")
def best(isas: list[Elements]) -> Elements:
    """Row operations of the best instruction set of this processor."""
    return isas[-1]
