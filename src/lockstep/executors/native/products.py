"""Products of weights and activations: multiplies packed and float weights with rows, using the native library.

Results have the same bits for every number of rows, thread count and instruction set.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding
from lockstep.artifacts.tensors import GROUP_SIZE
from lockstep.executors.native.library import NativeLibrary
from lockstep.executors.native.weights import KINDS, PackedWeights, pointer

Floats = npt.NDArray[np.float32]
FLOAT_TYPES = (Encoding.F32, Encoding.F16, Encoding.BF16)
"""Encodings of float weights, in the order of their numbers in the library."""
ACTIVATION_GROUP = np.dtype([("scale", "<f4"), ("sums", "<i2", 2), ("numbers", "i1", GROUP_SIZE)])
"""``Numbers`` of product.hpp: one group of a quantised row."""


class ThreadPool:
    """Threads of the native library, which sleep while there is no work. Stop it before the process forks."""

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self.threads = threads
        self._library, self._handle = library, ctypes.c_void_p()
        wrong = library.handle.native_pool_start(threads, ctypes.byref(self._handle))
        if wrong is not None:
            raise ValueError(f"{threads} threads: {wrong.decode()}")

    @property
    def handle(self) -> ctypes.c_void_p:
        assert self._handle, "the pool was stopped"
        return self._handle

    def stop(self) -> None:
        """End the threads. The pool must not be in use."""
        self._library.handle.native_pool_stop(self._handle)
        self._handle = ctypes.c_void_p()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def quantise(library: NativeLibrary, x: Floats, pool: ThreadPool | None = None) -> npt.NDArray[np.void]:
    """Quantise rows of activations ``[rows, columns]`` to int8 with a scale per group of 32: ``[rows, groups]``.

    A group with NaN or infinity gets the scale NaN, so that all products of its row are NaN, and no other row's.
    """
    rows, columns = x.shape
    groups = np.empty((rows, -(-columns // GROUP_SIZE)), ACTIVATION_GROUP)
    _call(library, "quantise", pool, *_rows(x), rows, columns, groups, groups.size)
    return groups


def multiply(
    library: NativeLibrary,
    weights: PackedWeights,
    x: npt.NDArray[np.void],
    pool: ThreadPool | None = None,
    out: Floats | None = None,
) -> Floats:
    """Multiply quantised rows ``[rows, groups]`` with packed weights: ``[rows, features]``.

    Raises:
        ValueError: sizes do not agree; nothing was written.
    """
    result = np.empty((len(x), weights.features), np.float32) if out is None else out
    _call(
        library,
        "multiply",
        pool,
        ctypes.c_int(KINDS.index(weights.encoding)),
        weights.panels,
        weights.panels.nbytes,
        weights.features,
        weights.columns,
        x,
        x.size,
        len(x),
        *_rows(result),
    )
    return result


def multiply_floats(
    library: NativeLibrary, encoding: Encoding, weights: npt.NDArray[Any], x: Floats, pool: ThreadPool | None = None
) -> Floats:
    """Multiply rows ``[rows, columns]`` with float weights ``[features, columns]`` as they are stored."""
    result = np.empty((len(x), weights.shape[0]), np.float32)
    _call(
        library,
        "multiply_floats",
        pool,
        ctypes.c_int(FLOAT_TYPES.index(encoding)),
        weights,
        weights.nbytes,
        *weights.shape,
        *_rows(x),
        len(x),
        *_rows(result),
    )
    return result


def _rows(array: Floats) -> tuple[Floats, int, int]:
    """An array of rows, the number of its elements and the stride of its rows, in the library's format."""
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    return array, array.size, array.shape[1]


def _call(library: NativeLibrary, name: str, pool: ThreadPool | None, *arguments: Any) -> None:
    plain: list[Any] = [library.isa.encode(), None if pool is None else pool.handle]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            plain.append(pointer(argument))
        else:
            plain.append(ctypes.c_int64(argument) if isinstance(argument, int) else argument)
    wrong = getattr(library.handle, f"native_{name}")(*plain)
    if wrong is not None:
        raise ValueError(f"{name}: {wrong.decode()}")
