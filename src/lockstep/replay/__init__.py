"""Replay and verification: runs the serving scheduler on a logical clock, driven by a workload or a recording."""
