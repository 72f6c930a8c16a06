"""Adapters and steps that no caller of ours would give: the library refuses them, and nothing is changed."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ExecutorError
from lockstep.executors.native.adapters import PackedAdapter, PackedTarget, pack_adapter
from lockstep.executors.native.forward import _ADAPTER_WEIGHTS, Forward
from lockstep.executors.native.operations import Program
from lockstep.executors.native.products import ThreadPool
from tests.executors.native.adapter_models import random_adapter
from tests.executors.native.support import TINY, config_of
from tests.executors.native.test_packs import library
from tests.executors.native.test_program import program_of

SHAPE = replace(TINY["tiny-qwen3"], num_layers=1)
CONFIG = config_of(SHAPE)
HOSTILE = (-(2**31), -2, -1, 0, 1, 2, 3, 7, 513, 2**16, 2**31 - 1)


@pytest.fixture
def program() -> Program:
    return program_of(SHAPE, "Q8_0")


@pytest.fixture
def forward(program: Program) -> Iterator[Forward]:
    with ThreadPool(library(), 2) as pool:
        found = Forward(library(), pool, program, CONFIG, "f16")
        yield found
        found.close()


def packed(program: Program, rank: int = 8) -> PackedAdapter:
    weights_of: dict[str, list[int]] = {}
    for index, name in enumerate(program.weight_names):
        weights_of.setdefault(name, []).append(index)
    return pack_adapter(random_adapter(SHAPE, rank), weights_of)


def step(forward: Forward, program: Program, slots: list[int]) -> bytes:
    """Hidden states of two tokens."""
    cache = np.zeros((2, program.layout.block_bytes), np.uint8)
    plan = np.array([1, 0, 0, 2, 0, 1, 1], np.int32)
    return forward.step(np.array([1, 2]), plan, cache, np.array([0, 1]), adapters=np.array(slots, np.int32)).tobytes()


def test_a_slot_is_filled_once_and_emptied_once(forward: Forward, program: Program) -> None:
    adapter, base = packed(program), step(forward, program, [0, 0])
    for slot in (-1, 0, 4097, 2**40):
        with pytest.raises(ExecutorError, match="slot"):
            forward.load_adapter(slot, adapter)
    forward.load_adapter(4096, adapter)
    with pytest.raises(ExecutorError, match="slot"):
        forward.load_adapter(4096, adapter)
    adapted = step(forward, program, [4096, 4096])
    assert adapted != base
    for slot in (-1, 0, 1, 4097, 2**40):
        with pytest.raises(ExecutorError, match="slot"):
            forward.unload_adapter(slot)
    for slots in ([4096, 1], [-1, 0], [0, 4097], [2**31 - 1, 0], [-(2**31), 0]):
        with pytest.raises(ExecutorError, match="not loaded"):
            step(forward, program, slots)
    assert step(forward, program, [4096, 4096]) == adapted
    forward.unload_adapter(4096)
    with pytest.raises(ExecutorError, match="slot"):
        forward.unload_adapter(4096)
    with pytest.raises(ExecutorError, match="not loaded"):
        step(forward, program, [4096, 0])
    assert step(forward, program, [0, 0]) == base


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rank": 0}, "rank"), ({"rank": -1}, "rank"), ({"rank": 513}, "rank"), ({"rank": 9}, "cut"),
    ({"a_type": 0}, "16 bits"), ({"b_type": 3}, "16 bits"), ({"a_type": -1}, "16 bits"),
    ({"weight": -1}, "no weight"), ({"weight": 2**31 - 1}, "no weight"), ({"weight": 0}, "no weight"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_wrong_fields_are_refused(forward: Forward, program: Program, changes: dict[str, Any], reason: str) -> None:
    adapter = packed(program)
    assert program.weight_names[0] == "model.embed_tokens.weight", "a table is not a product"
    wrong = [*adapter.targets[:-1], adapter.targets[-1]._replace(**changes)]
    with pytest.raises(ExecutorError, match=reason):
        forward.load_adapter(1, PackedAdapter(tuple(wrong), adapter.memory))
    forward.load_adapter(1, adapter)


def test_cut_misplaced_and_repeated_numbers_are_refused(forward: Forward, program: Program) -> None:
    adapter = packed(program)
    last = adapter.targets[-1]

    def load(*targets: PackedTarget) -> None:
        forward.load_adapter(1, PackedAdapter((*adapter.targets[:-1], *targets), adapter.memory))

    for field in ("a", "b"):
        whole = getattr(last, field)
        for part, reason in ((whole[:-1], "cut"), (whole[:0], "cut"), (np.resize(whole, len(whole) + 2)[2:], "line")):
            changes: dict[str, Any] = {field: part}
            wrong = last._replace(**changes)
            with pytest.raises(ExecutorError, match=reason):
                load(wrong)
    with pytest.raises(ExecutorError, match="twice"):
        load(last, last)
    with pytest.raises(ExecutorError, match="no weights"):
        forward.load_adapter(1, PackedAdapter((), adapter.memory))
    with pytest.raises(ExecutorError, match="no weights"):
        load(*[last] * 1000)


def test_the_head_and_null_pointers_are_refused(forward: Forward, program: Program) -> None:
    target = packed(program).targets[0]
    head = len(program.weights) - 1
    with pytest.raises(ExecutorError, match="no weight"):
        forward.load_adapter(1, PackedAdapter((target._replace(weight=head),), target.a))
    fields = np.array([(*target[:5], 0, 0, 0, 1 << 40, 1 << 40)], _ADAPTER_WEIGHTS)
    with pytest.raises(ExecutorError, match="cut"):
        forward._call(
            "load_adapter",
            forward._handle,
            ctypes.c_int64(1),
            fields.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(1),
        )
    with pytest.raises(ExecutorError, match="no weights"):
        forward._call("load_adapter", forward._handle, ctypes.c_int64(1), None, ctypes.c_int64(1))


def test_random_fields_are_refused_or_harmless(forward: Forward, program: Program) -> None:
    """Harmless: they read the adapter's own memory only. Scales may be anything."""
    seed = 20261128
    rng = random.Random(seed)
    adapter = packed(program)
    for _ in range(300):
        index = rng.randrange(len(adapter.targets))
        changes: dict[str, Any] = {
            rng.choice(("weight", "rank", "a_type", "b_type", "scale")): rng.choice(HOSTILE)
            for _ in range(rng.choice((1, 2)))
        }
        targets = list(adapter.targets)
        targets[index] = targets[index]._replace(**changes)
        with suppress(ExecutorError):
            forward.load_adapter(1, PackedAdapter(tuple(targets), adapter.memory))
            step(forward, program, [0, 1])
            forward.unload_adapter(1)


def test_the_memory_of_an_adapter_stays_until_it_is_unloaded(forward: Forward, program: Program) -> None:
    adapter = packed(program)
    memory = weakref.ref(adapter.memory)
    forward.load_adapter(1, adapter)
    del adapter
    assert memory() is not None
    forward.unload_adapter(1)
    assert memory() is None
