"""Programs under construction: adds buffers, weights, numbers and operations to a program (``program.hpp``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.artifacts.model import ModelConfig
from lockstep.executors.kv_layout import KVLayout
from lockstep.executors.native.operations import GATES, NONE, Action, Buffer, Floats, Op, Program, Rotary
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.weights import KINDS

Vector = Callable[[str, int | tuple[int, int]], Floats]
"""Function that returns a norm's weights, a bias or the kernel of a convolution by its canonical name and shape."""
Frequencies = Sequence[tuple[Floats, float]]
"""Angles per position of each pair of dimensions, and the factor of cosines and sines: one entry for all layers, and a
second entry for layers with a window if their rotation differs."""


class Assembly:
    """A program under construction. Buffers are identified by their index, and by a name as they are created.

    Args:
        matrices: matrices by canonical name.
        vector: reads one of the artifact's vectors.
        has: tests whether the artifact has a tensor.
        rotations: frequencies of rotations.
        layout: places of keys, values and states.
        kept: numbers of a row that stay in its block from stage to stage.
    """

    def __init__(
        self, config: ModelConfig, matrices: Mapping[str, Matrix], vector: Vector, has: Callable[[str], bool],
        rotations: Frequencies, layout: KVLayout, kept: int,
    ) -> None:  # fmt: skip
        self.config = config
        self.matrices = matrices
        self.vector = vector
        self.has = has
        self.program = Program(layout=layout, kept=kept, delta_net=config.delta_net)
        self.state = NONE
        """Buffer of the residual."""
        self._buffers: dict[str, int] = {}
        self._num_numbers = 0
        for frequencies, factor in rotations:
            self.program.rotaries.append(Rotary(self.add_vector(frequencies), len(frequencies), factor))

    def add(self, action: Action, out: int, **fields: float) -> None:
        """Add an operation."""
        self.program.ops.append(Op(action, out=out, **fields))  # type: ignore[arg-type]

    def buffer(self, name: str, columns: int, *, is_groups: bool = False, is_of_step: bool = False) -> int:
        """The buffer with that name, created on first use."""
        if name not in self._buffers:
            self._buffers[name] = len(self.program.buffers)
            self.program.buffers.append(Buffer(columns, is_groups, is_of_step))
        return self._buffers[name]

    def add_vector(self, numbers: Floats) -> int:
        """Index of the first of some numbers in the program's vectors."""
        begin = self._num_numbers
        self.program.vectors.append(numbers)
        self._num_numbers += len(numbers)
        return begin

    def weights(self, names: list[str]) -> dict[str, int]:
        """Fields of an operation for weights side by side."""
        first = len(self.program.weights)
        self.program.weights += [self.matrices[name] for name in names]
        self.program.weight_names += names
        return {"first_weight": first, "num_weights": len(names)}

    def add_places(self, layer: int) -> int:
        """Index of the place of the first piece of a layer's state. The others follow it."""
        self.program.places += self.program.layout.states[layer]
        return len(self.program.places) - len(self.program.layout.states[layer])

    def product(
        self, x: int, names: list[str], out: int, *, adds: bool = False, factor: float = 1.0, divisor: float = 1.0
    ) -> None:
        """Add products of several weights side by side, with their biases if the artifact has any."""
        bias, operands, weights = self._biases(names), self._operands(x, names), self.weights(names)
        self.add(Action.PRODUCT, out, vector=bias, adds=adds, factor=factor, divisor=divisor, **operands, **weights)

    def gate(self, x: int, names: list[str], out: int, activation: str) -> None:
        """Add a product by a gate: a function of one product, times another one if there are two weights."""
        operands, bias = self._operands(x, names), self._biases(names)
        self.add(Action.GATE, out, function=GATES[activation], vector=bias, **operands, **self.weights(names))

    def multiply(
        self,
        x: int,
        out: int,
        columns: int,
        *,
        at: int = 0,
        function: str = "identity",
        heads: int = 1,
        stride: int = 0,
    ) -> None:
        """Multiply a buffer by a function of columns of another one, which are parts that begin ``stride`` apart."""
        fields = {"in_at": at, "columns": columns, "heads": heads, "stride": stride}
        self.add(Action.MULTIPLY, out, in_=x, function=GATES[function], **fields)

    def _operands(self, x: int, names: list[str]) -> dict[str, int]:
        """The input of products in the form of their weights: quantised for panels, else as floats."""
        if self.program.buffers[x].is_groups:
            return {"in_groups": x}
        packed = [name for name in names if self.matrices[name].encoding in KINDS]
        operands = {"in_": x} if len(packed) < len(names) else {}
        if packed:
            columns = self.program.buffers[x].columns
            operands["in_groups"] = self.buffer(f"groups of {columns}", columns, is_groups=True)
            self.add(Action.QUANTISE, operands["in_groups"], in_=x, columns=columns)
        return operands

    def _biases(self, names: list[str]) -> int:
        """The biases of products side by side, with zeros for those that the artifact does not have."""
        biases = [f"{name.removesuffix('weight')}bias" for name in names]
        if not any(self.has(each) for each in biases):
            return NONE
        sizes = [self.matrices[name].features for name in names]
        parts = [
            self.vector(each, size) if self.has(each) else np.zeros(size, np.float32)
            for each, size in zip(biases, sizes, strict=True)
        ]
        return self.add_vector(np.concatenate(parts))

    def norm(self, x: int, out: int, name: str, size: int, at: int = 0) -> None:
        """Add a norm of columns of a buffer."""
        weights = self.norm_weights(name, size)
        is_centred, epsilon = self.config.layer_norm, self.config.rms_norm_eps
        if is_centred:
            bias = self.vector(f"{name}.bias", size) if self.config.norm_bias else np.zeros(size, np.float32)
            weights = np.concatenate([weights, bias])
        self.add(
            Action.NORM, out, in_=x, in_at=at, out_at=at, columns=size, vector=self.add_vector(weights),
            epsilon=epsilon, centred=is_centred,
        )  # fmt: skip

    def norm_weights(self, name: str, size: int) -> Floats:
        """Weights of a norm, with the offset that the model's files leave out."""
        return self.vector(f"{name}.weight", size) + np.float32(self.config.norm_offset)

    def normed(self, prefix: str, name: str | None) -> int:
        """The state as input of the next products, normalised if the model does so."""
        if name is None:
            return self.state
        normed = self.buffer("normed", self.config.hidden_size)
        self.norm(self.state, normed, prefix + name, self.config.hidden_size)
        return normed

    def to_state(self, x: int, weight: str, prefix: str, norm: str | None) -> None:
        """Add a product to the state, after normalising it if the model does so, or normalise the sum."""
        state, factor, size = self.state, self.config.residual_scale, self.config.hidden_size
        if norm is None or self.config.sum_norm:
            self.product(x, [weight], state, adds=True, factor=factor)
            if norm is not None:
                is_last = self.program.state != state and not self.config.final_norm
                self.norm(state, self.program.state if is_last else state, prefix + norm, size)
            return
        added = self.buffer("added", size)
        self.product(x, [weight], added)
        self.norm(added, added, prefix + norm, size)
        self.add(Action.ADD, state, in_=added, columns=size, factor=factor)
