"""Native library: loads it, and chooses an instruction set that it has and this processor supports.

``hatch_build.py`` compiles the library from the C++ sources in ``cpp``. All instruction sets give the same bits, so the
choice only affects speed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.executors.options import ISAS

LIBRARY = Path(__file__).with_name("liblockstep_native.so")
BITS_VERSION = 1
"""Version of the bits that this package requires, the same as in bits.hpp."""
INTERFACE_VERSION = 4
"""Version of the library's functions and structures that this package uses, the same as in bits.hpp."""
ISA_VARIABLE = "LOCKSTEP_ISA"
"""Environment variable with the default instruction set. All instruction sets give the same bits."""
_BUILD = "build it with `python hatch_build.py`, which needs a C++ compiler"
_IN_LIBRARY, _RUNS_HERE = 1, 2


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library with one instruction set."""

    handle: ctypes.CDLL
    bits_version: int
    """Version of the bits of all results. Results of two machines with the same version are equal."""
    built: tuple[str, ...]
    """Instruction sets that the library has."""
    usable: tuple[str, ...]
    """Instruction sets of the library that this processor supports, fastest first."""
    isa: str
    """The instruction set in use."""


def native_library(isa: str | None = None, library: Path = LIBRARY) -> NativeLibrary | str:
    """The library, or a sentence that states why it cannot be used.

    Args:
        isa: instruction set to use; None: the one in ``LOCKSTEP_ISA``, else the fastest one.
    """
    handle = _load(library)
    if isinstance(handle, str):
        return handle
    version = int(handle.native_bits_version())
    found, expected = (version, int(handle.native_interface_version())), (BITS_VERSION, INTERFACE_VERSION)
    if found != expected:
        return f"the native library was built from other sources (versions {found}, not {expected}): {_BUILD}"
    states = {name: int(handle.native_has_isa(name.encode())) for name in ISAS}
    built = tuple(name for name in ISAS if states[name] >= _IN_LIBRARY)
    usable = tuple(name for name in ISAS if states[name] >= _RUNS_HERE)
    chosen, origin = (isa, "") if isa else (os.environ.get(ISA_VARIABLE) or usable[0], f" of {ISA_VARIABLE}")
    if chosen not in ISAS:
        return f"there is no instruction set {chosen!r}{origin}; the known ones are {', '.join(ISAS)}"
    if chosen not in usable:
        reason = "this processor does not support" if chosen in built else "the native library does not have"
        return f"{reason} the instruction set {chosen!r}{origin}; usable here: {', '.join(usable)}"
    return NativeLibrary(handle, version, built, usable, chosen)


@cache
def _load(library: Path) -> ctypes.CDLL | str:
    if not library.exists():
        return f"the native library was not built: {_BUILD}"
    try:
        handle = ctypes.CDLL(str(library))
        for name in ("pool_start", "pack", "quantise", "multiply", "multiply_floats"):
            getattr(handle, f"native_{name}").restype = ctypes.c_char_p
        handle.native_packed_bytes.restype = ctypes.c_int64
        handle.native_pool_stop.restype = None
        handle.native_interface_version.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        return f"the native library cannot be loaded ({error}): {_BUILD}"
    return handle
