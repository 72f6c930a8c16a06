"""Native executors for tests, and the instruction sets of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.artifacts.model import Artifact
from lockstep.executors.fixed_plans import num_regions
from lockstep.executors.native.executor import NativeExecutor, load_executor
from lockstep.executors.native.library import native_library
from lockstep.executors.options import ISAS, ExecutorOptions

_LIBRARY = native_library()
USABLE = () if isinstance(_LIBRARY, str) else _LIBRARY.usable
EACH_ISA = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in USABLE, reason=f"no {isa} here: {_LIBRARY}")) for isa in ISAS
]


def threads_with(isa: str) -> int:
    """Threads in a test of every instruction set: several with the fastest one, since the division of work among them
    is the same for all."""
    return 2 if isa == USABLE[0] else 1


@contextmanager
def loaded(
    artifact: Artifact, num_blocks: int = 120, num_host_blocks: int = 20, **options: Any
) -> Iterator[NativeExecutor]:
    """An executor with this many blocks in each region of its pool (`fixed_plans`)."""
    executor = load_executor(artifact, ExecutorOptions(**options), lambda stage, share: None)
    assert isinstance(executor, NativeExecutor)
    regions = num_regions(executor.geometry)
    executor.allocate(num_blocks * regions, num_host_blocks * regions)
    yield executor
    executor.close()
