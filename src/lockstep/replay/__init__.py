"""The run, again: the scheduler that serves, driven by a workload or a recording on a logical clock."""
