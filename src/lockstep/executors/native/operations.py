"""Operations of a program and their data, as ``program.hpp`` describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import DeltaNet
from lockstep.executors.kv_layout import KVLayout, Place
from lockstep.executors.native.packs import Matrix

Floats = npt.NDArray[np.float32]
NONE = -1


class Action(IntEnum):
    """Operations, which ``program.hpp`` describes."""

    EMBED, NORM, QUANTISE, PRODUCT, GATE, ADD, ATTENTION, LOAD, SAVE, MULTIPLY, COPY = range(11)
    RATES, CONVOLVE, DELTA, SCALE, CAP, SCALE_PARTS = range(11, 17)


class AttentionPart(IntEnum):
    """Parts of attention, which ``program.hpp`` describes."""

    WHOLE, STORE, ATTEND, READ = range(4)


GATES = {"silu": 0, "gelu_tanh": 1, "gelu_erf": 2, "relu": 3, "tanh": 4, "sigmoid": 5, "identity": 6}


class Op(NamedTuple):
    """One operation, with the fields of ``program.hpp`` in its order."""

    action: Action
    in_: int = NONE
    in_groups: int = NONE
    out: int = NONE
    in_at: int = 0
    out_at: int = 0
    columns: int = 0
    first_weight: int = 0
    num_weights: int = 0
    vector: int = NONE
    place: int = NONE
    window: int = 0
    rotary: int = NONE
    kv_heads: int = 0
    num_norms: int = 0
    sinks: int = NONE
    query_period: int = 0
    adds: bool = False
    offset: int = 0
    centred: bool = False
    heads: int = 1
    stride: int = 0
    taps: int = 0
    part: AttentionPart = AttentionPart.WHOLE
    function: int = 0
    epsilon: float = 0.0
    factor: float = 1.0
    divisor: float = 1.0
    scale: float = 1.0
    query_beta: float = 0.0


class Buffer(NamedTuple):
    """Memory for one row of each token."""

    columns: int
    is_groups: bool
    """True for quantised values in groups of 32; else floats."""
    is_of_step: bool
    """True if all rows of a step are kept; else only the rows that are computed together."""


class Rotary(NamedTuple):
    """A rotation of heads."""

    vector: int
    """Index of its first frequency."""
    num_pairs: int
    factor: float
    """Factor of cosines and sines."""


@dataclass(slots=True)
class Program:
    """The operations of a model and their data. Buffers and weights are identified by their index in these lists."""

    layout: KVLayout
    ops: list[Op] = field(default_factory=list)
    final_begin: int = 0
    """Index of the first operation after the last layer."""
    head_begin: int = 0
    """Index of the first operation from hidden states to logits."""
    weights: list[Matrix] = field(default_factory=list)
    weight_names: list[str] = field(default_factory=list)
    """Canonical names of the weights, in their order."""
    buffers: list[Buffer] = field(default_factory=list)
    vectors: list[Floats] = field(default_factory=list)
    """Norms, biases and frequencies, which the program stores one after the other."""
    rotaries: list[Rotary] = field(default_factory=list)
    state: int = NONE
    gathered: int = NONE
    hidden: int = NONE
    logits: int = NONE
    places: list[Place] = field(default_factory=list)
    """Where layers and pieces of states lie in blocks."""
    delta_net: DeltaNet | None = None
    """Shapes of its delta rules; None: it has none."""
    kept: int = 0
    """Numbers of a row that stay in its block from stage to stage."""
