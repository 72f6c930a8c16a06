"""The bits of a token with a LoRA adapter do not depend on other tokens, their adapters, steps, threads or processors.

What a token has alone is the truth here. Models have weights in panels and in floats, columns and features that are no
multiples of 32, and adapters of several ranks, types and products.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as struct_with

from lockstep.artifacts.model import Adapter
from lockstep.executors.base import Logits
from lockstep.executors.native import program
from lockstep.executors.native.assembly import Assembly
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.native.operations import NONE, Action
from tests.executors.native.adapter_models import random_adapter, run_with
from tests.executors.native.loading import EACH_ISA, USABLE, loaded, threads_with
from tests.executors.native.support import TINY, Item, batch_of, random_artifact, regions_of, run
from tools.random_models import Shape

LLAMA = TINY["tiny-llama"]
UNEVEN = replace(LLAMA, hidden_size=80, intermediate_size=112, num_heads=5, num_kv_heads=1, head_dim=24)
MODELS: dict[str, tuple[Shape, str]] = {
    "Q8_0": (LLAMA, "Q8_0"),
    "Q4_0": (TINY["tiny-qwen3"], "Q4_0"),
    "BF16, uneven": (UNEVEN, "BF16"),
    "F32, hybrid": (TINY["tiny-qwen35"], "F32"),
}
LENGTH = 40


def adapters_of(shape: Shape) -> list[Adapter]:
    """Eight adapters: ranks 1 to 17, all types, some of a few products only."""
    kinds: list[tuple[int, str, tuple[str, ...] | None]] = [
        (1, "F16", None), (2, "BF16", None), (3, "F32", None), (4, "F16", ("down_proj",)), (8, "F16", None),
        (16, "BF16", ("q_proj", "up_proj")), (17, "F16", None), (8, "F32", ("gate_proj", "v_proj", "o_proj")),
    ]  # fmt: skip
    return [random_adapter(shape, *kind[:2], seed=seed, modules=kind[2]) for seed, kind in enumerate(kinds)]


def tokens_of(shape: Shape, number: int, length: int = LENGTH) -> list[int]:
    drawn: list[int] = np.random.default_rng([9, number]).integers(0, shape.vocab_size, length).tolist()
    return drawn


def table_of(number: int) -> tuple[int, ...]:
    return tuple(range(1 + number * 4, 5 + number * 4))


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("name", MODELS)
def test_32_sequences_over_8_adapters_have_the_bits_of_each_alone(name: str, isa: str) -> None:
    shape, encoding = MODELS[name]
    length = LENGTH if isa != "portable" else 9
    prompts = [tokens_of(shape, number, length) for number in range(32)]
    slots = [(number * 5) % 9 for number in range(32)]  # 0: none
    with loaded(random_artifact(shape, encoding), 300, isa=isa, threads=threads_with(isa)) as executor:
        assert [executor.load_adapter(each) for each in adapters_of(shape)] == list(range(1, 9))
        prefills: list[Item] = [(prompt[:-1], 0, table_of(number)) for number, prompt in enumerate(prompts)]
        decodes: list[Item] = [(p[-1:], len(p) - 1, table_of(number)) for number, p in enumerate(prompts)]
        together = [run_with(executor, slots, *prefills), run_with(executor, slots, *decodes)]
        kept = np.split(together[0], 32)
        for number, slot in enumerate(slots):
            place = table_of(40)
            alone = run_with(executor, [slot], (prompts[number][:-1], 0, place))
            last = run_with(executor, [slot], (prompts[number][-1:], len(prompts[number]) - 1, place))
            assert np.array_equal(kept[number], alone), (number, slot)
            assert np.array_equal(together[1][number : number + 1], last), (number, slot)
            if slot == 0:
                assert np.array_equal(run(executor, (prompts[number][:-1], 0, place), all_rows=True), alone)
    same_prompt = len({kept[number].tobytes() for number in range(9)})
    assert same_prompt == 9


def rows_of(executor: NativeExecutor, shape: Shape, chunks: Sequence[int], slots: Sequence[int]) -> Logits:
    """Logits of 150 tokens, whose adapters repeat, in these chunks."""
    tokens, at, rows = tokens_of(shape, 3, 150), 0, []
    for length in chunks:
        item: Item = (tokens[at : at + length], at, (1, 2, 3, 4, 5))
        batch = batch_of(item, regions=regions_of(executor), all_rows=True)
        of_tokens = np.array([slots[position % len(slots)] for position in range(at, at + length)], np.int32)
        rows.append(executor.execute(struct_with(batch, adapters=of_tokens)).copy())
        at += length
    return np.concatenate(rows)


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("slots", [(1,), (0, 1, 2, 2, 0, 5, 7)], ids=["one", "mixed"])
@pytest.mark.parametrize("name", ["Q8_0", "BF16, uneven"])
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(name: str, slots: tuple[int, ...], isa: str) -> None:
    shape, encoding = MODELS[name]
    with loaded(random_artifact(shape, encoding), 20, isa=isa, threads=threads_with(isa)) as executor:
        for each in adapters_of(shape):
            executor.load_adapter(each)
        decoded = rows_of(executor, shape, (1,) * 150, slots)
        for chunks in [(150,), (1, 149), (32, 1, 94, 1, 1, 21), (48, 49, 53), (97, 53)]:
            assert np.array_equal(rows_of(executor, shape, chunks, slots), decoded), chunks


@pytest.mark.parametrize("name", MODELS)
def test_threads_and_instruction_sets_change_no_bit(name: str) -> None:
    shape, encoding = MODELS[name]
    seen = set()
    for isa, threads in [*((USABLE[0], number) for number in (1, 2, 3, 20)), *((isa, 3) for isa in USABLE[1:])]:
        with loaded(random_artifact(shape, encoding), 20, isa=isa, threads=threads) as executor:
            for each in adapters_of(shape):
                executor.load_adapter(each)
            seen.add(rows_of(executor, shape, (7, 143), (0, 1, 2, 3, 4, 5, 6, 7, 8)).tobytes())
    assert len(seen) == 1


class _Unfused(Assembly):
    """Gates and up projections as two products, and their activation as an operation of its own."""

    def gate(self, x: int, names: list[str], out: int, activation: str) -> None:
        size = self.matrices[names[0]].features
        gates, ups = (self.buffer(f"unfused {index}", size) for index in range(2))
        self.product(x, names[:1], gates)
        self.product(x, names[1:], ups)
        self.multiply(gates, ups, size, function=activation)
        action = Action.QUANTISE if self.program.buffers[out].is_groups else Action.COPY
        self.add(action, out, in_=ups, columns=size)

    def product(self, x: int, names: list[str], out: int, **settings: Any) -> None:
        """Each weight by itself."""
        if len(names) == 1:
            super().product(x, names, out, **settings)
            return
        operands, at = self._operands(x, names), 0
        for name in names:
            self.add(Action.PRODUCT, out, out_at=at, vector=NONE, **operands, **self.weights([name]))
            at += self.matrices[name].features


@pytest.mark.parametrize("encoding", ["Q8_0", "F32"])
def test_fused_and_unfused_products_have_the_same_bits(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for assembly in (Assembly, _Unfused):
        monkeypatch.setattr(program, "Assembly", assembly)
        with loaded(random_artifact(LLAMA, encoding), 20) as executor:
            for each in adapters_of(LLAMA):
                executor.load_adapter(each)
            found.append(rows_of(executor, LLAMA, (7, 143), (0, 1, 2, 5, 7)))
    assert np.array_equal(found[0], found[1])


def test_loading_and_unloading_changes_no_other_sequence() -> None:
    """Also adapters of a higher rank than all before them, which move the executor's own memory."""
    seed = 20261128
    rng = random.Random(seed)
    shape = LLAMA
    adapters = [random_adapter(shape, rank, seed=rank) for rank in (1, 4, 5, 16, 40)]
    with loaded(random_artifact(shape, "Q8_0"), 300) as executor:
        expected, base = [], run(executor, (tokens_of(shape, 0), 0, table_of(0)), all_rows=True)
        for adapter in adapters:
            slot = executor.load_adapter(adapter)
            expected.append(run_with(executor, [slot], (tokens_of(shape, 0), 0, table_of(0))))
            executor.unload_adapter(slot)
        assert executor.adapter_bytes == 0
        slot_of: dict[int, int] = {}
        for turn in range(120):
            number = rng.randrange(len(adapters))
            if number in slot_of:
                executor.unload_adapter(slot_of.pop(number))
            else:
                slot_of[number] = executor.load_adapter(adapters[number])
            loaded_now = sorted(slot_of)
            slots = [0, *(slot_of[each] for each in loaded_now)]
            items: list[Item] = [(tokens_of(shape, 0), 0, table_of(index)) for index in range(len(slots))]
            found = np.split(run_with(executor, slots, *items), len(slots))
            assert np.array_equal(found[0], base), (seed, turn)
            for each, logits in zip(loaded_now, found[1:], strict=True):
                assert np.array_equal(logits, expected[each]), (seed, turn)


def test_digest_of_results_is_the_same_on_every_machine() -> None:
    with loaded(random_artifact(LLAMA, "Q8_0"), 20) as executor:
        for each in adapters_of(LLAMA):
            executor.load_adapter(each)
        found = rows_of(executor, LLAMA, (150,), (0, 1, 2, 3, 4, 5, 6, 7, 8))
    assert hashlib.blake2b(found.tobytes(), digest_size=12).hexdigest() == DIGEST


DIGEST = "d378a692ff0d2820182b77cc"
