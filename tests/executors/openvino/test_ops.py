"""The attention operator by itself: right, the same bits in every tile, company and instruction set, and unharmed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.artifacts.source import open_artifact
from lockstep.errors import UsageError
from lockstep.executors.machine import InstructionSet, instruction_set
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.ops import STORAGES, kernel_for, own_attention
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.attention_step import (
    KERNELS,
    Heads,
    attend,
    has_kernel,
    random_chunk,
    reference,
    table_for,
)
from tests.executors.openvino.support import TINY_LLAMA, Item, needs_operator, random_artifact, run

pytestmark = needs_operator
ERRORS = {"f32": 2e-6, "f16": 2e-3, "int8": 3e-2}
"""Largest difference from float64 that rounding keys and values explains, for values around one."""
SHAPES = (
    *(Heads(9, 3, 64, storage, rotary_dim=64) for storage in STORAGES),
    Heads(4, 4, 16, rotary_dim=16),
    Heads(16, 8, 128, window=40, rotary_dim=128, is_normed=True),
    Heads(32, 2, 80, "int8", rotary_dim=24),
    Heads(6, 2, 64, "f32", is_normed=True),
    Heads(8, 1, 256, window=1),
)


def name_of(heads: Heads) -> str:
    norm = "-normed" if heads.is_normed else ""
    shape = f"{heads.heads}x{heads.kv_heads}x{heads.head_dim}"
    return f"{shape}-{heads.storage}-{heads.window}-{heads.rotary_dim}{norm}"


@pytest.mark.parametrize("heads", SHAPES, ids=name_of)
def test_it_is_attention(heads: Heads) -> None:
    whole = random_chunk(np.random.default_rng(0), heads, 300, table_for(300))
    difference = np.abs(attend(heads, heads.cache(12), whole) - reference(heads, whole)).max()
    assert difference < ERRORS[heads.storage]


@pytest.mark.parametrize("heads", SHAPES, ids=name_of)
def test_every_instruction_set_gives_the_same_bits(heads: Heads) -> None:
    whole = random_chunk(np.random.default_rng(1), heads, 150, table_for(150))
    kernels = [kernel for kernel in KERNELS if has_kernel(kernel)]
    answers, caches = [], []
    for kernel in kernels:
        caches.append(heads.cache(6))
        answers.append(attend(heads, caches[-1], whole, kernel=kernel))
    for answer, cache in zip(answers, caches, strict=True):
        assert np.array_equal(answer, answers[0])
        assert np.array_equal(cache, caches[0])
    assert "portable" in kernels


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_has_its_bits_in_every_tile_and_company(data: st.DataObject) -> None:
    """A sequence whole, against the same in random chunks beside others, of lengths around every border there is."""
    heads = data.draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    length = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 300])))
    whole = random_chunk(rng, heads, length, table_for(length))
    expected = attend(heads, heads.cache(11), whole)
    cache = heads.cache(200)
    moved = replace(whole, table=tuple(rng.permutation(np.arange(1, 100))[: len(whole.table)].tolist()))
    done, found = 0, []
    while done < length:
        end = min(length, done + data.draw(st.sampled_from([1, 1, 2, 3, 5, 8, 33, 64, 200])))
        others = []
        for index in range(data.draw(st.sampled_from([0, 1, 2, 7, 31]))):
            size = int(rng.integers(1, 40))
            others.append(random_chunk(rng, heads, size, table_for(size, 100 + 2 * index)))
        place = data.draw(st.integers(0, len(others)))
        begin = sum(len(other.queries) for other in others[:place])
        answer = attend(heads, cache, *others[:place], moved.part(done, end), *others[place:])
        found.append(answer[begin : begin + end - done])
        done = end
    assert np.array_equal(np.concatenate(found), expected)


def test_a_long_row_that_is_split_among_threads_has_the_bits_of_one_that_is_not() -> None:
    """Alone its segments are shares of several threads; beside sixty others no row is split."""
    heads, length = Heads(3, 1, 64), 8000
    rng = np.random.default_rng(2)
    whole = random_chunk(rng, heads, length, table_for(length))
    cache = heads.cache(400)
    expected = attend(heads, cache, whole)[-1]
    last = whole.part(length - 1, length)
    others = [random_chunk(rng, heads, 1, (300 + index,)) for index in range(60)]
    assert np.array_equal(attend(heads, cache, last)[0], expected)
    assert np.array_equal(attend(heads, cache, *others, last)[-1], expected)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sequence_that_is_not_a_number_spoils_no_other(storage: str) -> None:
    heads, rng = Heads(storage=storage), np.random.default_rng(3)
    good, bad = random_chunk(rng, heads, 50, (1, 2)), random_chunk(rng, heads, 50, (3, 4))
    expected = attend(heads, heads.cache(5), good, bad)
    bad.keys[20] = np.nan
    bad.values[30] = np.inf
    found = attend(heads, heads.cache(5), good, bad)
    assert np.array_equal(found[:70], expected[:70]), "neither the other nor what came before"
    assert np.isnan(found[70:]).all()


FAULTS: dict[str, dict[str, Any]] = {
    "a block is not of this pool": {"blocks": [1, 5]},
    "a block is not of this pool ": {"blocks": [1, -1]},
    "a block table is too short": {"table_begins": [0, 1]},
    "a past length is negative": {"past": [-1]},
    "a block table is too short ": {"past": [2**31 - 1]},
    "the sequences' beginnings do not cover the tokens": {"begins": [0, 39]},
    "the sequences' beginnings do not cover the tokens ": {"begins": [1, 40]},
    "the tables' beginnings do not cover the tables": {"table_begins": [0, 3]},
    "descend": {"num_sequences": [2], "past": [0, 0], "begins": [0, 50, 40], "table_begins": [0, 2, 2]},
    "the plan is too short for its sequences": {"num_sequences": [-1]},
    "the plan is too short for its sequences ": {"num_sequences": [2**31 - 1]},
    "the plan is too short for its sequences  ": {"plan_size": 5},
    "the plan is too short for its sequences   ": {"plan_size": 0},
    "no multiple of the KV heads": {"heads": 5},
    "not a multiple of 16": {"head_dim": 72},
    "no even number up to a head's size": {"rotary_dim": 66},
    "no even number up to a head's size ": {"rotary_dim": 3},
    "window is negative": {"window": -1},
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_step_that_would_leave_its_memory_is_refused_untouched(message: str) -> None:
    heads = Heads()
    cache = heads.cache(5)
    chunk = random_chunk(np.random.default_rng(4), heads, 40, (1, 2))
    with pytest.raises(ValueError, match=message.strip()):
        attend(heads, cache, chunk, **FAULTS[message])
    assert (cache == 0xFF).all()


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no such kernel"):
        attend(Heads(), Heads().cache(3), random_chunk(np.random.default_rng(5), Heads(), 4, (1,)), kernel="sse9")


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        (("avx2", "avx512f", "f16c", "fma"), "avx512"),
        (("avx2", "f16c", "fma"), "avx2"),
        (("avx2", "fma"), "portable"),
        (("asimd",), "portable"),
    ],
)
def test_the_kernel_follows_what_the_environment_leaves_of_the_processor(flags: tuple[str, ...], kernel: str) -> None:
    assert kernel_for(InstructionSet("any", (), flags)) == kernel


def test_what_cannot_be_had_says_why(tmp_path: Path) -> None:
    config = random_artifact(TINY_LLAMA).config
    isa = instruction_set()
    assert "its library was not built" in str(own_attention(config, "f16", isa, tmp_path / "none.so"))
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert "its library does not load" in str(own_attention(config, "f16", isa, tmp_path / "broken.so"))
    assert "these have 24" in str(own_attention(replace(config, head_dim=24), "f16", isa))
    assert "it has no u8 KV cache" in str(own_attention(config, "u8", isa))


def test_one_openvino_and_one_tbb_are_in_the_process() -> None:
    """The library brings neither, and two of one would each have their own threads and graphs."""
    code = (
        "from lockstep.executors.openvino.executor import load_executor\n"
        "from lockstep.artifacts.source import open_artifact\n"
        "load_executor(open_artifact('pocket://')).allocate(4, 0)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "for name in ('libopenvino.so', 'libtbb.so', 'liblockstep_ops.so'):\n"
        "    assert sum(name in path for path in maps) == 1, (name, maps)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_two_models_a_reload_and_other_precisions_share_a_process() -> None:
    """Each has a pool of its own: what one is told, no other sees."""
    artifact = open_artifact("pocket://")
    prompt: Item = (list(range(60)), 0, (1, 2))
    first, second = load_executor(artifact), load_executor(artifact, ExecutorOptions(kv_cache_precision="int8"))
    for executor in (first, second):
        executor.allocate(8, 0)
    alone = run(first, prompt), run(second, prompt)
    assert not np.array_equal(*alone)
    third = load_executor(artifact)
    third.allocate(8, 0)
    for executor, expected in ((first, alone[0]), (third, alone[0]), (second, alone[1])):
        assert np.array_equal(run(executor, prompt), expected)
    first.close()
    assert np.array_equal(run(third, prompt), alone[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "openvino", "kv_cache_precision": "int8"}, "which OpenVINO's attention has not"),
        ({"attention": "lockstep", "kv_cache_precision": "u8"}, "which only OpenVINO's attention has"),
        ({"attention": "flash"}, "attention is 'flash'; it must be one of auto, lockstep, openvino"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExecutorOptions(**options)  # type: ignore[arg-type]  # fields by name
