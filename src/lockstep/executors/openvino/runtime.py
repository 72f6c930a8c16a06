"""The one place that imports OpenVINO, with its telemetry kept out.

``import openvino`` reports the import to a statistics service when the package ``openvino_telemetry`` can be imported
(openvino/tools/ovc/__init__.py). Hiding that package while OpenVINO is imported makes it take its own silent stub, so
that nothing is ever written to the user's home or sent; the package itself stays importable for others.

Importing this module costs a third of a second: only modules that compute import it.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias, cast

_TELEMETRY = "openvino_telemetry"


def _import_without_telemetry() -> tuple[Any, Any]:
    """OpenVINO and its operator set; None in ``sys.modules`` makes ``import openvino_telemetry`` fail meanwhile."""
    modules = cast(dict[str, ModuleType | None], sys.modules)
    before = modules.get(_TELEMETRY)
    modules[_TELEMETRY] = None
    try:
        import openvino
        from openvino import opset13
    finally:
        del modules[_TELEMETRY]
        if before is not None:
            modules[_TELEMETRY] = before
    return openvino, opset13


# OpenVINO's type information does not match what it does: it is Any under names that say what is meant.
Node: TypeAlias = Any
Model: TypeAlias = Any
CompiledModel: TypeAlias = Any
Port: TypeAlias = Any
Core: TypeAlias = Any
ElementType: TypeAlias = Any
InferRequest: TypeAlias = Any

ov: Any
op: Any
ov, op = _import_without_telemetry()


@cache
def the_core() -> Core:
    """OpenVINO's core, one for the process and kept to its end.

    On processors with large registers its CPU plugin gives the thread that asks first a stack of its own for signals,
    and unmaps it when the core goes, on whatever thread that is: the next Ctrl-C of the first thread is a segmentation
    fault. (OpenVINO's ``SigAltStackSetup``.)
    """
    return ov.Core()
