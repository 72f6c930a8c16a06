"""Row operations of the native library as functions of arrays, and builds of it from changed sources."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hatch_build import cpp_compiler, native_flags

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
ISAS = ("portable", "avx2", "avx512")
GATES = ("silu", "gelu_tanh", "gelu_erf", "relu", "tanh", "sigmoid", "identity")
FLOAT_TYPES = ("f32", "f16", "bf16")
CPP = Path(__file__).resolve().parents[3] / "src" / "lockstep" / "executors" / "native" / "cpp"
RUNS_HERE = 2
"""What ``native_has_isa`` gives for an instruction set that this processor runs."""


class Rows(ctypes.Structure):
    """``Rows`` of api_elements.cpp."""

    _fields_ = (("data", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("capacity", "rows", "columns", "stride")))


def rows_of(array: Floats) -> Rows:
    """Rows of an array of two dimensions whose last one is contiguous, or of one row."""
    view = array.reshape(1, -1) if array.ndim == 1 else array
    assert view.dtype == np.float32
    assert view.strides[1] == 4 or view.shape[1] == 1
    stride = view.strides[0] // 4 if len(view) > 1 else view.shape[1]
    return Rows(view.ctypes.data, (len(view) - 1) * stride + view.shape[1] if len(view) else 0, *view.shape, stride)


@dataclass(frozen=True)
class Elements:
    """The operations with one instruction set. A refusal is a ValueError with the library's sentence."""

    library: ctypes.CDLL
    isa: str

    def call(self, name: str, *arguments: Any) -> None:
        function = self.library[f"native_{name}"]
        function.restype = ctypes.c_char_p
        plain = [
            array.ctypes.data_as(ctypes.c_void_p) if isinstance(array, np.ndarray) else array for array in arguments
        ]
        wrong = function(self.isa.encode(), *[ctypes.byref(each) if isinstance(each, Rows) else each for each in plain])
        if wrong is not None:
            raise ValueError(wrong.decode())

    def map(self, name: str, *arguments: Any, out: Floats | None = None) -> Floats:
        """An operation whose output has the shape of the first array among its arguments."""
        first = next(each for each in arguments if isinstance(each, np.ndarray))
        result: Floats = np.full(first.shape, 77, np.float32) if out is None else out
        self.call(name, *[rows_of(x) if isinstance(x, np.ndarray) else x for x in arguments], rows_of(result))
        return result

    def norm(self, x: Floats, weight: Floats, offset: float = 0.0, epsilon: float = 1e-5) -> Floats:
        result: Floats = np.full(x.shape, 77, np.float32)
        numbers = ctypes.c_float(offset), ctypes.c_float(epsilon)
        self.call("norm", rows_of(x), rows_of(weight), *numbers, rows_of(result))
        return result

    def layer_norm(self, x: Floats, weights: Floats, epsilon: float = 1e-5) -> Floats:
        """The norm with weights and biases [2, columns]."""
        result: Floats = np.full(x.shape, 77, np.float32)
        self.call("layer_norm", rows_of(x), rows_of(weights), ctypes.c_float(epsilon), rows_of(result))
        return result

    def add(self, x: Floats, y: Floats, factor: float = 1.0) -> Floats:
        return self.map("add", x, y, ctypes.c_float(factor))

    def gate(self, function: str, gate: Floats, up: Floats) -> Floats:
        return self.map("gate", GATES.index(function), gate, up)

    def activate(self, function: str, x: Floats) -> Floats:
        return self.map("activate", GATES.index(function), x)

    def cap(self, x: Floats, cap: float) -> Floats:
        return self.map("cap", x, ctypes.c_float(cap))

    def divide(self, x: Floats, divisor: float) -> Floats:
        return self.map("divide", x, ctypes.c_float(divisor))

    def embed(self, kind: str, table: npt.NDArray[Any], ids: Any, columns: int, factor: float = 1.0) -> Floats:
        numbers = np.asarray(ids, np.int64)
        out: Floats = np.full((len(numbers), columns), 77, np.float32)
        sizes = ctypes.c_int64(table.nbytes), ctypes.c_int64(table.strides[0])
        kind_number = FLOAT_TYPES.index(kind)
        self.call("embed", kind_number, table, *sizes, numbers, ctypes.c_float(factor), rows_of(out))
        return out

    def rotation(self, frequencies: Floats, positions: Any, factor: float = 1.0) -> Floats:
        numbers = np.asarray(positions, np.int64)
        out: Floats = np.full((len(numbers), 2 * len(frequencies)), 77, np.float32)
        self.call("rotation", rows_of(frequencies), numbers, ctypes.c_float(factor), rows_of(out))
        return out

    def weigh(self, x: Floats, peak: float, temperature: float) -> Doubles:
        out: Doubles = np.full(len(x), 77.0)
        self.call("weigh", x, ctypes.c_int64(len(x)), ctypes.c_double(peak), ctypes.c_double(temperature), out)
        return out

    def weigh_lightly(self, x: Floats, peak: float, temperature: float) -> Floats:
        out: Floats = np.full(len(x), 77, np.float32)
        self.call("weigh_lightly", x, ctypes.c_int64(len(x)), ctypes.c_float(peak), ctypes.c_double(temperature), out)
        return out

    def total(self, x: npt.NDArray[Any]) -> float:
        out = np.full(1, 77.0)
        self.call("total", 8 * x.itemsize, x, ctypes.c_int64(len(x)), out)
        return float(out[0])

    def softmax(self, x: Floats, temperature: float = 1.0) -> Floats:
        return self.map("softmax", x, ctypes.c_double(temperature))

    def log_softmax(self, x: Floats) -> Floats:
        return self.map("log_softmax", x)

    def logprobs(self, x: Floats, tokens: Any, k: int) -> tuple[Doubles, npt.NDArray[np.int64], Doubles]:
        """Log-probabilities [rows] of the tokens; ids and log-probabilities [rows, k] of the most likely."""
        found, top = np.full(len(x), 77.0), np.full((len(x), k), 77.0)
        ids = np.full((len(x), k), 77, np.int64)
        self.call("logprobs", rows_of(x), np.asarray(tokens, np.int64), ctypes.c_int64(k), found, ids, top)
        return found, ids, top

    def unit(self, x: Floats) -> Floats:
        return self.map("unit", x)

    def dot(self, x: Floats, y: Floats) -> Doubles:
        out: Doubles = np.full(len(x), 77.0)
        self.call("dot", rows_of(x), rows_of(y), out)
        return out


def powers(library: ctypes.CDLL, base: float, exponents: Doubles) -> Doubles:
    out = np.full(len(exponents), 77.0)
    function = library["native_powers"]
    function.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (exponents, out)]
    wrong = function(ctypes.c_double(base), pointers[0], ctypes.c_int64(len(out)), pointers[1])
    if wrong is not None:
        raise ValueError(wrong.decode())
    return out


def logarithm(library: ctypes.CDLL, x: float) -> float:
    function = library["native_log"]
    function.restype = ctypes.c_double
    return float(function(ctypes.c_double(x)))


def isas_here(library: ctypes.CDLL) -> list[Elements]:
    """Portable first, then what this processor has."""
    return [Elements(library, isa) for isa in ISAS if library.native_has_isa(isa.encode()) == RUNS_HERE]


def compile_library(target: Path, sources: Path = CPP, flags: tuple[str, ...] = ("-O1",)) -> ctypes.CDLL:
    """Build and load a library of the sources of a folder."""
    jobs = []
    objects = []
    for source in sorted(sources.glob("*.cpp")):
        objects.append(str(target.parent / f"{target.stem}_{source.stem}.o"))
        jobs.append(
            subprocess.Popen([*cpp_compiler(), *native_flags(source), *flags, "-c", str(source), "-o", objects[-1]])
        )
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    subprocess.run([*cpp_compiler(), "-shared", "-s", *objects, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def changed_sources(folder: Path, changes: Mapping[str, Mapping[str, str]]) -> Path:
    """A copy of the sources of the row operations with pieces of text replaced, by file; each must be there once."""
    copy = folder / "cpp"
    copy.mkdir()
    for source in (*CPP.glob("*.hpp"), *CPP.glob("*elements*.cpp"), CPP / "processor.cpp"):
        shutil.copy(source, copy)
    for name, pieces in changes.items():
        text = (copy / name).read_text()
        for old, new in pieces.items():
            assert text.count(old) == 1, f"{old!r} is in {name} {text.count(old)} times"
            text = text.replace(old, new)
        (copy / name).write_text(text)
    return copy
