"""Row math: computes functions on rows of numbers with the same bits on every processor.

NumPy's exponentials, logarithms and matrix products, and those of the C library, choose code by processor and round
differently. For tokens, log-probabilities and vectors, the native library computes them instead, in the order that its
bit contract defines (docs/native.md). Comparisons, basic element-wise arithmetic and `np.cumsum`, which adds in order,
are the same everywhere.

If the library could not be built, NumPy computes: with the same results on one machine, but perhaps not on another.
"""

from __future__ import annotations

import ctypes
import logging
import math
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.executors.native.library import NativeLibrary, native_library

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
log_of_module = logging.getLogger(__name__)


class RowMath(Protocol):
    """The functions. Rows are contiguous. Arrays of several dimensions are processed element by element."""

    def weigh(self, values: Floats, peak: float, temperature: float) -> Weights:
        """e^((x - peak) / temperature), in doubles."""
        ...

    def weigh_lightly(self, values: Floats, peak: float, temperature: float) -> Floats:
        """Like `weigh` but in floats, with a rounded inverse of the temperature."""
        ...

    def total(self, values: Floats | Weights) -> float:
        """Sum of all numbers, in doubles."""
        ...

    def log_total(self, row: Floats) -> float:
        """log(sum of e^x); NaN for a row that is not finite."""
        ...

    def unit(self, rows: Floats) -> Floats:
        """Each row [count, size] divided by its length. A row of zeros is not changed."""
        ...

    def log(self, x: float) -> float:
        """Natural logarithm of a positive number."""
        ...

    def power(self, base: float, exponents: Weights) -> Weights:
        """base^exponents of a positive base."""
        ...


class _Rows(ctypes.Structure):
    """``Rows`` of api_elements.cpp."""

    _fields_ = (("data", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("capacity", "rows", "columns", "stride")))


class NativeMath:
    """`RowMath` of the native library."""

    def __init__(self, library: NativeLibrary) -> None:
        self._isa = library.isa.encode()
        pointer, count, double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        handle = library.handle

        def function(name: str, *arguments: type) -> ctypes._NamedFuncPointer:
            found = handle[f"native_{name}"]  # a separate function object, with its own types
            found.argtypes, found.restype = (ctypes.c_char_p, *arguments), ctypes.c_char_p
            return found

        self._weigh = function("weigh", pointer, count, double, double, pointer)
        self._weigh_lightly = function("weigh_lightly", pointer, count, ctypes.c_float, double, pointer)
        self._total = function("total", ctypes.c_int, pointer, count, pointer)
        self._log_total = function("log_total", pointer, count, pointer)
        self._unit = function("unit", ctypes.POINTER(_Rows), ctypes.POINTER(_Rows))
        self._powers = handle["native_powers"]  # plain: mathematical powers
        self._powers.argtypes, self._powers.restype = (double, pointer, count, pointer), ctypes.c_char_p
        self._log = handle["native_log"]
        self._log.argtypes, self._log.restype = (double,), double

    def weigh(self, values: Floats, peak: float, temperature: float) -> Weights:
        values = np.ascontiguousarray(values, np.float32)
        out = np.empty(values.shape, np.float64)
        _check(self._weigh(self._isa, values.ctypes.data, values.size, peak, temperature, out.ctypes.data))
        return out

    def weigh_lightly(self, values: Floats, peak: float, temperature: float) -> Floats:
        values = np.ascontiguousarray(values, np.float32)
        out = np.empty(values.shape, np.float32)
        _check(self._weigh_lightly(self._isa, values.ctypes.data, values.size, peak, temperature, out.ctypes.data))
        return out

    def total(self, values: Floats | Weights) -> float:
        row: npt.NDArray[np.floating] = np.ascontiguousarray(values)
        found = ctypes.c_double()
        _check(self._total(self._isa, 8 * row.itemsize, row.ctypes.data, row.size, ctypes.addressof(found)))
        return found.value

    def log_total(self, row: Floats) -> float:
        row, found = np.ascontiguousarray(row, np.float32), ctypes.c_double()
        _check(self._log_total(self._isa, row.ctypes.data, row.size, ctypes.addressof(found)))
        return found.value

    def unit(self, rows: Floats) -> Floats:
        rows = np.ascontiguousarray(rows, np.float32)
        out = np.empty_like(rows)
        if rows.size:
            _check(self._unit(self._isa, _rows_of(rows), _rows_of(out)))
        return out

    def log(self, x: float) -> float:
        return float(self._log(x))

    def power(self, base: float, exponents: Weights) -> Weights:
        exponents = np.ascontiguousarray(exponents, np.float64)
        out = np.empty_like(exponents)
        _check(self._powers(base, exponents.ctypes.data, exponents.size, out.ctypes.data))
        return out


class NumpyMath:
    """`RowMath` of NumPy, used if there is no library."""

    def weigh(self, values: Floats, peak: float, temperature: float) -> Weights:
        return np.exp((values.astype(np.float64) - peak) / temperature)

    def weigh_lightly(self, values: Floats, peak: float, temperature: float) -> Floats:
        return np.exp(np.subtract(values, np.float32(peak)) * np.float32(1.0 / temperature))

    def total(self, values: Floats | Weights) -> float:
        return float(values.sum(dtype=np.float64))

    def log_total(self, row: Floats) -> float:
        peak = float(row.max())
        return math.log(self.total(self.weigh_lightly(row, peak, 1.0))) + peak

    def unit(self, rows: Floats) -> Floats:
        wide = rows.astype(np.float64)
        lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
        return (wide / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)

    def log(self, x: float) -> float:
        return math.log(x)

    def power(self, base: float, exponents: Weights) -> Weights:
        return np.asarray(base**exponents, np.float64)


@cache
def row_math() -> RowMath:
    """The functions in use: those of the native library with the fastest instruction set. All of them give the same
    bits."""
    library = native_library()
    if isinstance(library, str):
        log_of_module.warning("sampling uses NumPy, so answers may differ on another processor: %s", library)
        return NumpyMath()
    return NativeMath(library)


def _rows_of(rows: Floats) -> _Rows:
    return _Rows(rows.ctypes.data, rows.size, len(rows), rows.shape[1], rows.shape[1])


def _check(wrong: bytes | None) -> None:
    if wrong is not None:
        raise ValueError(wrong.decode())
