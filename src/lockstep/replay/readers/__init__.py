"""Readers: load files of any supported format as workloads."""

from lockstep.replay.readers.reading import ReadOptions, read_workload

__all__ = ["ReadOptions", "read_workload"]
