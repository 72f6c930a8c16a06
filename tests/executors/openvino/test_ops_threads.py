"""The attention operator on 1 to 32 threads, in contexts to 8,000: however they share its rows, each has its bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hatch_build import openvino_package
from tests.executors.openvino import attention_step
from tests.executors.openvino.attention_step import Heads, attend, random_chunk, table_for
from tests.executors.openvino.support import needs_operator

pytestmark = [needs_operator, pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")]
THREADS = (1, 2, 3, 4, 8, 16, 32)
"""Where the processor has fewer cores, threads take turns on them."""
LONG = 8000
CONTEXTS = (1, 31, 127, 128, 129, 500, 1023, 1024, 4097, 6500, LONG - 8)
"""Tokens before those that are computed: on both sides of the borders of blocks and segments."""


class InArena:
    """The operator's library, called from an arena of so many of TBB's threads, as OpenVINO's stream calls it."""

    def __init__(self, arena: ctypes.CDLL, inner: ctypes.CDLL, num_threads: int) -> None:
        self._arena, self._inner, self._num_threads = arena, inner, num_threads

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def lockstep_attention(self, step: object, kernel: bytes) -> bytes | None:
        function = ctypes.cast(self._inner.lockstep_attention, ctypes.c_void_p)
        seen = ctypes.c_int(0)
        wrong: bytes | None = self._arena.in_arena(self._num_threads, function, step, kernel, ctypes.byref(seen))
        assert seen.value == self._num_threads, "by this number the operator shares its work"
        return wrong


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    package, target = openvino_package(), tmp_path_factory.mktemp("arena") / "arena.so"
    [tbb] = (package / "libs").glob("libtbb.so.*")
    source = Path(__file__).with_name("arena.cpp")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-isystem", str(package / "include"), str(source)]
    subprocess.run([*command, str(tbb), "-o", str(target)], check=True)
    attention_step.library()  # after the library of TBB that both need
    loaded = ctypes.CDLL(str(target))
    loaded.in_arena.restype = ctypes.c_char_p
    return loaded


@contextmanager
def on_threads(arena: ctypes.CDLL, num_threads: int) -> Iterator[None]:
    caller = InArena(arena, attention_step.library(), num_threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_step, "library", lambda: caller)
        yield


@pytest.mark.parametrize("window", [0, 1100])
@pytest.mark.parametrize("storage", ["f16", "int8"])
def test_a_row_has_its_bits_on_any_number_of_threads(storage: str, window: int, arena: ctypes.CDLL) -> None:
    """A few rows are split at their segments among the threads; beside sixty others they are not."""
    heads, rng = Heads(3, 1, 64, storage, window), np.random.default_rng(6)
    whole = random_chunk(rng, heads, LONG, table_for(LONG))
    others = [random_chunk(rng, heads, 1, (300 + index,)) for index in range(60)]
    cache = heads.cache(400)
    with on_threads(arena, 1):
        expected = attend(heads, cache, whole)
    for num_threads in THREADS:
        with on_threads(arena, num_threads):
            for past in CONTEXTS:
                one, several = whole.part(past, past + 1), whole.part(past, past + 8)
                assert np.array_equal(attend(heads, cache, one), expected[past : past + 1]), (num_threads, past)
                assert np.array_equal(attend(heads, cache, several), expected[past : past + 8]), (num_threads, past)
            beside = attend(heads, cache, *others, several)[-8:]
            assert np.array_equal(beside, expected[-8:]), num_threads


def test_a_prompt_has_its_bits_on_any_number_of_threads(arena: ctypes.CDLL) -> None:
    """Its blocks too, which several threads write."""
    heads = Heads(9, 3, 64, "int8")
    chunks = [random_chunk(np.random.default_rng(7), heads, 200, table_for(200, 1 + 7 * index)) for index in range(3)]
    answers, caches = [], []
    for num_threads in THREADS:
        caches.append(heads.cache(30))
        with on_threads(arena, num_threads):
            answers.append(attend(heads, caches[-1], *chunks))
    for answer, cache in zip(answers, caches, strict=True):
        assert np.array_equal(answer, answers[0])
        assert np.array_equal(cache, caches[0])
