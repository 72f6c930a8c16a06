"""Forward pass in the native library: passes a program to the library once, then runs it step by step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import ModelConfig
from lockstep.errors import ExecutorError
from lockstep.executors.kv_layout import BLOCK_TOKENS as BLOCK_TOKENS
from lockstep.executors.native.adapters import PackedAdapter
from lockstep.executors.native.library import NativeLibrary
from lockstep.executors.native.operations import Op, Program
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.products import FLOAT_TYPES, ThreadPool
from lockstep.executors.native.weights import KINDS, pointer
from lockstep.executors.step_inputs import WindowTables

STORAGES = ("f32", "f16", "int8")
"""Precisions of keys and values, in the order of their numbers in ``attention.hpp``."""
_FLOATS = ("epsilon", "factor", "divisor", "scale", "query_beta")
_OPS = np.dtype([(name, "<f4" if name in _FLOATS else "<i4") for name in Op._fields])
_WEIGHTS = np.dtype([("type", "<i8"), ("features", "<i8"), ("columns", "<i8"), ("data", "<u8"), ("bytes", "<i8")])
_BUFFERS = np.dtype([("columns", "<i4"), ("is_groups", "<i4"), ("life", "<i4"), ("unused", "<i4")])
_GROUPS = np.dtype([("num_parts", "<i4"), ("window", "<i4"), ("is_state", "<i4")])
_PLACES = np.dtype([("group", "<i4"), ("part", "<i4"), ("offset", "<i8")])
_WINDOWS = np.dtype([("plan", "<u8"), ("plan_size", "<i8"), ("first_columns", "<u8")])
_ROTARIES = np.dtype([("vector", "<i4"), ("num_pairs", "<i4"), ("factor", "<f4")])
_ADAPTER_WEIGHTS = np.dtype([
    ("weight", "<i4"), ("rank", "<i4"), ("a_type", "<i4"), ("b_type", "<i4"), ("scale", "<f4"), ("unused", "<i4"),
    ("a", "<u8"), ("b", "<u8"), ("a_bytes", "<i8"), ("b_bytes", "<i8"),
])  # fmt: skip
_FUNCTIONS = ("make", "step", "logits", "project", "load_adapter", "unload_adapter")


class _Program(ctypes.Structure):
    """``Program`` of ``program.hpp``."""

    _fields_ = (
        ("ops", ctypes.c_void_p), ("num_ops", ctypes.c_int64), ("final_begin", ctypes.c_int64),
        ("head_begin", ctypes.c_int64), ("weights", ctypes.c_void_p), ("num_weights", ctypes.c_int64),
        ("buffers", ctypes.c_void_p), ("num_buffers", ctypes.c_int64), ("vectors", ctypes.c_void_p),
        ("num_vectors", ctypes.c_int64), ("rotaries", ctypes.c_void_p), ("num_rotaries", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("state", "gathered", "hidden", "logits", "heads", "storage")),
        ("vocab_size", ctypes.c_int32), ("kept", ctypes.c_int32),
        ("groups", ctypes.c_void_p), ("num_groups", ctypes.c_int64), ("places", ctypes.c_void_p),
        ("num_places", ctypes.c_int64), ("block_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "is_tiled")),
    )  # fmt: skip


class _StepInput(ctypes.Structure):
    """``StepInput`` of ``forward.hpp``."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64), ("ids", ctypes.c_void_p), ("types", ctypes.c_void_p), ("plan", ctypes.c_void_p),
        ("plan_size", ctypes.c_int64), ("windows", ctypes.c_void_p), ("num_windows", ctypes.c_int64),
        ("states", ctypes.c_void_p), ("states_size", ctypes.c_int64),
        ("totals", ctypes.c_void_p), ("totals_size", ctypes.c_int64),
        ("stage", ctypes.c_int64), ("cache", ctypes.c_void_p), ("block_bytes", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64), ("num_hidden_rows", ctypes.c_int64), ("hidden_rows", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p), ("hidden_size", ctypes.c_int64), ("adapters", ctypes.c_void_p),
    )  # fmt: skip


class Forward:
    """The forward pass of one model. One caller at a time.

    Args:
        library: library with the instruction set to use.
        pool: thread pool for the work; it must outlive this object.
        storage: one of `STORAGES`.

    Raises:
        ExecutorError: the library rejects the program.
    """

    def __init__(
        self, library: NativeLibrary, pool: ThreadPool, program: Program, config: ModelConfig, storage: str
    ) -> None:
        self._handle = ctypes.c_void_p()
        handle = library.handle
        self._functions = {name: getattr(handle, f"native_forward_{name}") for name in _FUNCTIONS}
        for function in self._functions.values():
            function.restype = ctypes.c_char_p
        self._free = handle.native_forward_free
        self._free.restype = None
        self._hidden_size = config.hidden_size
        self._weights = program.weights  # the library reads them in place
        self._adapters: dict[int, PackedAdapter] = {}  # these, too
        ops = np.array([tuple(op) for op in program.ops], _OPS)
        weights = np.array(
            [
                (weight_type(each), each.features, each.columns, each.data.ctypes.data, each.data.nbytes)
                for each in program.weights
            ],
            _WEIGHTS,
        )
        buffers = np.array([(b.columns, b.is_groups, 0 if b.is_of_step else 1, 0) for b in program.buffers], _BUFFERS)
        vectors = np.concatenate([*program.vectors, np.zeros(0, np.float32)]).astype(np.float32, copy=False)
        rotaries = np.array([tuple(each) for each in program.rotaries], _ROTARIES)
        groups = np.array([(each.num_parts, each.window, each.is_state) for each in program.layout.groups], _GROUPS)
        places = np.array([tuple(each) for each in program.places], _PLACES)
        passed = _Program(
            ops.ctypes.data, len(ops), program.final_begin, program.head_begin, weights.ctypes.data, len(weights),
            buffers.ctypes.data, len(buffers), vectors.ctypes.data, len(vectors), rotaries.ctypes.data, len(rotaries),
            program.state, program.gathered, program.hidden, program.logits, config.num_heads,
            STORAGES.index(storage), config.vocab_size, program.kept, groups.ctypes.data, len(groups),
            places.ctypes.data, len(places), program.layout.block_bytes, *_delta_shape(program),
        )  # fmt: skip
        self._call("make", ctypes.byref(passed), library.isa.encode(), pool.handle, ctypes.byref(self._handle))

    def step(
        self, token_ids: npt.NDArray[np.int64], plan: npt.NDArray[np.int32], cache: npt.NDArray[np.uint8],
        hidden_rows: npt.NDArray[np.int64], totals: npt.NDArray[np.int32] | None = None, stage: int = 0,
        types: npt.NDArray[np.int32] | None = None, windows: Sequence[WindowTables] = (),
        states: npt.NDArray[np.int32] | None = None, adapters: npt.NDArray[np.int32] | None = None,
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """Run all layers over a step's tokens, or one stage of them, and keep their states for `logits`.

        Args:
            token_ids: ``[T]``.
            plan: see `Chunks.plan`.
            cache: ``[num_blocks, bytes]``: all layers of a block, one after the other, and what its tokens keep.
            hidden_rows: tokens whose hidden states are needed. Only the last stage has any.
            totals: total lengths of the sequences, for a program with stages.
            types: ``[T]``, token types; None: all are 0.
            windows: tables of the groups with a window, in order.
            states: see `Chunks.states`.
            adapters: ``[T]``, slots of adapters; None: no token has one.

        Returns:
            ``[len(hidden_rows), hidden_size]``: the input of the LM head.

        Raises:
            ExecutorError: the step does not fit the program, or there is not enough memory.
        """
        hidden = np.empty((len(hidden_rows), self._hidden_size), np.float32)
        totals_at, num_totals = (None, 0) if totals is None else (totals.ctypes.data, len(totals))
        tables = np.array(
            [(each.plan.ctypes.data, len(each.plan), each.first_columns.ctypes.data) for each in windows], _WINDOWS
        )
        states_at, num_states = (None, 0) if states is None else (states.ctypes.data, states.size)
        passed = _StepInput(
            len(token_ids), token_ids.ctypes.data, None if types is None else types.ctypes.data,
            plan.ctypes.data, len(plan), tables.ctypes.data, len(tables), states_at, num_states,
            totals_at, num_totals, stage,
            cache.ctypes.data, cache.shape[1], len(cache), len(hidden_rows), hidden_rows.ctypes.data,
            hidden.ctypes.data, hidden.size, None if adapters is None else adapters.ctypes.data,
        )  # fmt: skip
        self._call("step", self._handle, ctypes.byref(passed))
        return hidden

    def logits(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write the logits ``[len(rows), vocab_size]`` of tokens of the latest step."""
        assert out.flags.c_contiguous
        self._call(
            "logits", self._handle, pointer(rows), ctypes.c_int64(len(rows)), pointer(out),
            ctypes.c_int64(out.size),
        )  # fmt: skip

    def project(self, vectors: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
        """Apply the head to vectors ``[n, hidden_size]`` in the place of hidden states: ``[n, size]``."""
        assert vectors.flags.c_contiguous
        assert vectors.dtype == np.float32
        out = np.empty((len(vectors), size), np.float32)
        self._call(
            "project", self._handle, pointer(vectors), ctypes.c_int64(vectors.size), ctypes.c_int64(len(vectors)),
            pointer(out), ctypes.c_int64(out.size),
        )  # fmt: skip
        return out

    def load_adapter(self, slot: int, adapter: PackedAdapter) -> None:
        """Fill an empty slot. The adapter's memory is read in place and kept until the slot is empty."""
        targets = np.array(
            [
                (*each[:5], 0, each.a.ctypes.data, each.b.ctypes.data, each.a.nbytes, each.b.nbytes)
                for each in adapter.targets
            ],
            _ADAPTER_WEIGHTS,
        )  # fmt: skip
        self._call("load_adapter", self._handle, ctypes.c_int64(slot), pointer(targets), ctypes.c_int64(len(targets)))
        self._adapters[slot] = adapter

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot."""
        self._call("unload_adapter", self._handle, ctypes.c_int64(slot))
        del self._adapters[slot]

    def _call(self, name: str, *arguments: Any) -> None:
        wrong = self._functions[name](*arguments)
        if wrong is not None:
            raise ExecutorError(f"the forward pass failed: {wrong.decode()}")

    def close(self) -> None:
        """Release the program. Calling this again has no effect."""
        if self._handle:
            self._free(self._handle)
            self._handle = ctypes.c_void_p()
            self._adapters.clear()


def _delta_shape(program: Program) -> tuple[int, ...]:
    """``DeltaShape`` of ``recurrent.hpp``."""
    net = program.delta_net
    return (0,) * 5 if net is None else (
        net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim, int(net.is_tiled)
    )  # fmt: skip


def weight_type(matrix: Matrix) -> int:
    """Number of a matrix's type in ``program.hpp``."""
    if matrix.encoding not in KINDS:
        return len(KINDS) + FLOAT_TYPES.index(matrix.encoding)
    begin = len(KINDS) + len(FLOAT_TYPES) if matrix.is_stored else 0
    return begin + KINDS.index(matrix.encoding)
