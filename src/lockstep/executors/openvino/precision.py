"""Precision of each matrix: a table from what the artifact stores and what the user asked for.

Knows no OpenVINO, so that `lockstep models info` can say what a load would do; apart from the options, so that
reading those imports no artifacts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lockstep.artifacts.layout import EMBEDDING, LM_HEAD
from lockstep.artifacts.model import Encoding, Weights
from lockstep.artifacts.tensors import FLOAT_TYPES, GROUP_SIZE


class Precision(Enum):
    """Format in which the graph holds a matrix; the value is what the user reads."""

    F32 = "f32"
    INT8_CHANNELS = "int8 per channel"
    INT8_GROUPS = "int8 in groups of 32"
    INT4_GROUPS = "int4 in groups of 32"
    INT4_OFFSETS = "int4 in groups of 32 with offsets"


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """A matrix's precision."""

    precision: Precision
    is_requantised: bool = False
    """True if weights are rounded anew; else each is what the file says (a product of scales may be rounded to f16)."""


_BLOCKS: Mapping[Encoding, PrecisionChoice] = {
    Encoding.Q8_0: PrecisionChoice(Precision.INT8_GROUPS),
    Encoding.Q5_0: PrecisionChoice(Precision.INT8_GROUPS),
    Encoding.Q4_0: PrecisionChoice(Precision.INT4_GROUPS),
    Encoding.Q4_1: PrecisionChoice(Precision.INT4_OFFSETS),
    Encoding.Q4_K: PrecisionChoice(Precision.INT4_OFFSETS),
    Encoding.Q5_1: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
    Encoding.Q5_K: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
    Encoding.Q6_K: PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True),
}


def precision_of(name: str, encoding: Encoding, num_columns: int, quantize: str | None) -> PrecisionChoice:
    """The precision of one matrix.

    Args:
        name: its canonical name: the embedding and the head are tables, which stay at 8 bits at least unless the file
            itself has them in Q4_0.
        num_columns: length of a row; one that is not whole groups is quantised per channel.
        quantize: ``int8``, ``int4`` or None; float weights only, blocks stay as they are.
    """
    is_table = name in (EMBEDDING, LM_HEAD)
    if encoding not in FLOAT_TYPES:
        choice = _BLOCKS[encoding]
        if is_table and choice.precision is Precision.INT4_OFFSETS:
            return PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True)
        return choice
    if quantize is None:
        return PrecisionChoice(Precision.F32)
    if quantize == "int8" or is_table or num_columns % GROUP_SIZE:
        return PrecisionChoice(Precision.INT8_CHANNELS, is_requantised=True)
    return PrecisionChoice(Precision.INT4_GROUPS, is_requantised=True)


def precision_summary(weights: Weights, quantize: str | None) -> dict[str, int]:
    """Changes that loading makes to matrices: ``Q6_K -> int8 in groups of 32 (requantised)`` and how many."""
    count: Counter[str] = Counter()
    for name in weights.names():
        tensor = weights[name]
        if len(tensor.shape) == 2:
            choice = precision_of(name, tensor.encoding, tensor.shape[-1], quantize)
            note = " (requantised)" if choice.is_requantised else ""
            count[f"{tensor.encoding.value} -> {choice.precision.value}{note}"] += 1
    return dict(sorted(count.items()))


def has_floats(weights: Weights) -> bool:
    """True if there is a matrix that `quantize` would change."""
    return any(len(weights[name].shape) == 2 and weights[name].encoding in FLOAT_TYPES for name in weights.names())
