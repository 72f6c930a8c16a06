"""Adapters in memory: packs the numbers of LoRA adapters for the native library (``adapters.hpp``), and assigns slots.

Numbers have 16 bits. F16 and BF16 stay as they are stored. F32 is rounded to F16 after a multiplication by a power of
two that brings a matrix's largest number below 2^15; the adapter's factor is divided by it, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Adapter, AdapterTarget, Encoding, Tensor
from lockstep.errors import ExecutorError
from lockstep.executors.native.products import FLOAT_TYPES
from lockstep.executors.native.weights import Bytes, aligned_bytes

Halves = npt.NDArray[np.uint16]
MAX_ADAPTERS = 1 << 12
_PANEL, _LANES, _GROUP, _RANK_UNIT = 32, 16, 32, 4
_LARGEST_EXPONENT = 15
_LINE = 64


class PackedTarget(NamedTuple):
    """The change of one weight, with the fields of ``AdapterWeight``."""

    weight: int
    """Index of the weight in the program."""
    rank: int
    a_type: int
    b_type: int
    scale: float
    a: Bytes
    b: Bytes


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as the library reads it. The memory must stay until the adapter is unloaded."""

    targets: tuple[PackedTarget, ...]
    memory: Bytes
    """The numbers of all targets."""


def pack_adapter(adapter: Adapter, weights_of: Mapping[str, Sequence[int]]) -> PackedAdapter:
    """Pack an adapter.

    Args:
        weights_of: indices of the program's weights by canonical name.

    Raises:
        ExecutorError: the program does not multiply by a weight that the adapter changes.
    """
    parts: list[tuple[int, int, float, _Numbers, _Numbers]] = []
    for name, target in adapter.targets.items():
        if name not in weights_of:
            raise ExecutorError(f"adapter {adapter.name!r} changes {name!r}, by which the model does not multiply")
        a, b = _a_blocks(target), _b_panels(target)
        scale = float(np.float32(target.scale) * np.float32(2.0 ** -(a.exponent + b.exponent)))
        parts += [(weight, target.b.shape[1], scale, a, b) for weight in weights_of[name]]
    memory = aligned_bytes(sum(_aligned(each.data.nbytes) for part in parts for each in part[3:]))
    targets, begin = [], 0
    for weight, rank, scale, *both in parts:
        views = []
        for each in both:
            views.append(memory[begin : begin + each.data.nbytes])
            views[-1][:] = each.data.reshape(-1).view(np.uint8)
            begin += _aligned(each.data.nbytes)
        targets.append(PackedTarget(weight, rank, both[0].type, both[1].type, scale, *views))
    return PackedAdapter(tuple(targets), memory)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


class _Numbers(NamedTuple):
    data: Halves
    type: int
    """Number of the encoding in `FLOAT_TYPES`."""
    exponent: int
    """The numbers were multiplied by 2 to this power."""


def _a_blocks(target: AdapterTarget) -> _Numbers:
    """[rank, columns] as [rank / 4, columns / 16, 4, 16], filled with zeros."""
    halves = _halves(target.a)
    rank, columns = target.a.shape
    padded = np.zeros((-(-rank // _RANK_UNIT) * _RANK_UNIT, -(-columns // _GROUP) * _GROUP), np.uint16)
    padded[:rank, :columns] = halves.data
    blocks = padded.reshape(-1, _RANK_UNIT, padded.shape[1] // _LANES, _LANES).swapaxes(1, 2)
    return halves._replace(data=np.ascontiguousarray(blocks))


def _b_panels(target: AdapterTarget) -> _Numbers:
    """[features, rank] as [panels, rank, 32], filled with zeros."""
    halves = _halves(target.b)
    features, rank = target.b.shape
    padded = np.zeros((-(-features // _PANEL) * _PANEL, rank), np.uint16)
    padded[:features] = halves.data
    return halves._replace(data=np.ascontiguousarray(padded.reshape(-1, _PANEL, rank).swapaxes(1, 2)))


def _halves(tensor: Tensor) -> _Numbers:
    if tensor.encoding is not Encoding.F32:
        return _Numbers(tensor.data.view(np.uint16), FLOAT_TYPES.index(tensor.encoding), 0)
    values = tensor.data.astype(np.float32, copy=False)
    _, exponent = np.frexp(np.abs(values).max(initial=0))
    shift = _LARGEST_EXPONENT - int(exponent)
    return _Numbers(np.ldexp(values, shift).astype(np.float16).view(np.uint16), FLOAT_TYPES.index(Encoding.F16), shift)


class AdapterSlots:
    """The loaded adapters of an executor. Slots are numbers from 1 on; the lowest empty one is filled next."""

    def __init__(self) -> None:
        self._loaded: dict[int, PackedAdapter] = {}

    @property
    def num_bytes(self) -> int:
        return sum(each.memory.nbytes for each in self._loaded.values())

    def next_empty(self) -> int:
        """The lowest empty slot.

        Raises:
            ExecutorError: all slots are filled.
        """
        slot = next(slot for slot in range(1, MAX_ADAPTERS + 2) if slot not in self._loaded)
        if slot > MAX_ADAPTERS:
            raise ExecutorError(f"{MAX_ADAPTERS} adapters are loaded; unload one of them first")
        return slot

    def fill(self, slot: int, adapter: PackedAdapter) -> None:
        self._loaded[slot] = adapter

    def empty(self, slot: int) -> None:
        del self._loaded[slot]

    def __contains__(self, slot: int) -> bool:
        return slot in self._loaded

    def clear(self) -> None:
        self._loaded.clear()
