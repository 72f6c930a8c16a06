"""Files as workloads: what format one has is read from its content, and each format has a module of its own."""

from lockstep.replay.readers.arrivals import ReadOptions
from lockstep.replay.readers.reading import read_workload

__all__ = ["ReadOptions", "read_workload"]
