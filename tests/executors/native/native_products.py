"""Weights, rows and libraries for the tests of native products."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hatch_build import NATIVE, cpp_compiler, native_flags
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.products import ThreadPool, multiply, quantise
from lockstep.executors.native.weights import pack
from lockstep.executors.options import ISAS
from tools.random_blocks import random_blocks

Floats = npt.NDArray[np.float32]
CPP = Path(__file__).parents[3] / NATIVE / "cpp"
ELEMENTS = ("processor.cpp", "api_elements.cpp", "elements_portable.cpp", "elements_avx2.cpp", "elements_avx512.cpp")
COMMON_SOURCES = ("api_products.cpp", "pack.cpp", "product.cpp", "threads.cpp", *ELEMENTS)
_HALVES: Mapping[Encoding, tuple[int, ...]] = {
    Encoding.Q6_K: (208,),
    Encoding.Q3_K: (108,),
    Encoding.Q4_K: (0, 2),
    Encoding.Q5_K: (0, 2),
}
"""Where a block has its f16 scales and offsets."""


def libraries() -> list[NativeLibrary]:
    """The installed library with each instruction set of this processor, portable first."""
    best = native_library()
    if isinstance(best, str):
        pytest.skip(best)
    forced = [native_library(isa) for isa in reversed(ISAS) if isa in best.usable]
    return [library for library in forced if not isinstance(library, str)]


def weights_of(encoding: Encoding, features: int, columns: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    data = random_blocks(rng, (features, columns), encoding.value, 0.05)
    return Tensor("random", encoding, (features, columns), data)


def extreme_weights(encoding: Encoding, features: int, columns: int, byte: int, half: int) -> Tensor:
    """All bytes of all blocks the same, but for scales and offsets, which are these bits of a float16."""
    num_values, num_bytes = BLOCKS[encoding]
    blocks = np.full((features, columns // num_values, num_bytes), byte, np.uint8)
    for at in _HALVES.get(encoding, (0, 2) if encoding in (Encoding.Q4_1, Encoding.Q5_1) else (0,)):
        blocks[..., at : at + 2] = np.array([half], "<u2").view(np.uint8)
    return Tensor("extreme", encoding, (features, columns), blocks.reshape(features, -1))


def product(library: NativeLibrary, tensor: Tensor, x: Floats, pool: ThreadPool | None = None) -> Floats:
    return multiply(library, pack(library, tensor), quantise(library, x, pool), pool)


def build_common(folder: Path) -> list[Path]:
    """Objects of all that a library of the portable kernel alone has beside that kernel."""
    stubs = folder / "stubs.cpp"
    names = ("avx2", "avx512")
    stubs.write_text(
        '#include "product.hpp"\nnamespace lockstep::native {\n'
        + "".join(f"const Products* products_{name}() {{ return nullptr; }}\n" for name in names)
        + "}\n"
    )
    sources = [stubs, *(CPP / name for name in COMMON_SOURCES)]
    return _compile({folder / f"{source.stem}.o": source for source in sources}, ("-O0",))


def build_portable(
    target: Path, common: Sequence[Path], changes: Mapping[str, str], flags: tuple[str, ...] = ()
) -> NativeLibrary:
    """A library of the portable kernel alone, with pieces of its source replaced; each must be there once."""
    text = (CPP / "product_portable.cpp").read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    source = target.with_suffix(".cpp")
    source.write_text(text)
    objects = _compile({target.with_suffix(".o"): source}, ("-O1", *flags))
    subprocess.run([*cpp_compiler(), "-shared", "-pthread", *objects, *common, "-o", target], check=True)
    library = native_library("portable", target)
    assert not isinstance(library, str), library
    return library


def _compile(sources: Mapping[Path, Path], flags: tuple[str, ...]) -> list[Path]:
    commands = [
        [*cpp_compiler(), *native_flags(source), *flags, "-I", str(CPP), "-c", str(source), "-o", str(target)]
        for target, source in sources.items()
    ]
    jobs = [subprocess.Popen(command) for command in commands]
    assert [job.wait() for job in jobs] == [0] * len(jobs)
    return list(sources)
