"""Choice of the executor that a model is loaded into; each is imported where it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.artifacts.model import Artifact
from lockstep.executors.base import Executor
from lockstep.executors.options import ExecutorOptions

Report = Callable[[str, float], None]


def load_executor(artifact: Artifact, options: ExecutorOptions, report: Report) -> Executor:
    """Load a model into the executor that the options name.

    Args:
        report: called with a stage of loading and its fraction done.

    Raises:
        LockstepError: see `load_executor` of each executor.
    """
    if options.is_native:
        from lockstep.executors.native import executor as native

        return native.load_executor(artifact, options, report)
    from lockstep.executors.openvino import executor as openvino

    return openvino.load_executor(artifact, options, report)


def expected_environment(artifact: Artifact, options: ExecutorOptions) -> dict[str, str]:
    """The environment that a load would have."""
    if options.is_native:
        from lockstep.executors.native import executor as native

        return native.environment_of(artifact, options)
    from lockstep.executors.openvino import loading as openvino

    return openvino.expected_environment(artifact, options)
