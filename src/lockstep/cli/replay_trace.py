"""`lockstep replay --verify` and `--execute`: a recording, decided or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UsageError


def replay_trace(verify: Path | None, execute: Path | None, model: str | None) -> int:
    """Exit code 0: everything is identical, 1: something is not."""
    if verify is not None and execute is not None:
        raise UsageError("--verify decides a recording again and --execute computes it again; give one of them")
    if execute is not None:
        return execute_trace(execute, model)
    assert verify is not None, "one of the two is given"
    if model is not None:
        raise UsageError("--verify needs no model: it decides, and computes nothing; leave --model out")
    return verify_trace(verify)


def verify_trace(path: Path) -> int:
    from lockstep.replay.plans import plan_files
    from lockstep.replay.trace import open_trace
    from lockstep.replay.verify import describe, verify

    plans = plan_files(path)
    if plans == (path,):
        return verify_plans_of(plans)
    trace = open_trace(path)
    verification = verify(trace)
    for line in describe(verification, trace):
        print(line)
    code = verify_plans_of(plans) if plans else 0
    return code if verification.is_identical else 1


def verify_plans_of(paths: Sequence[Path]) -> int:
    from lockstep.replay.plans import verify_plans

    verdict = verify_plans(paths)
    is_same = "identical" if verdict.divergence is None else "not identical"
    print(f"planner: {verdict.num_plans:,} plans, {is_same}")
    if verdict.is_cut:
        print("a recording of plans breaks off in the middle of one, which is left out")
    if verdict.divergence is not None:
        print(verdict.divergence)
    return 0 if verdict.divergence is None else 1


def execute_trace(path: Path, model: str | None) -> int:
    from lockstep.replay.execute import describe, execute
    from lockstep.replay.trace import open_trace

    if model is None:
        raise UsageError("--execute computes with a model; name it with --model SOURCE")
    is_equal = True
    for execution in execute(open_trace(path), model):
        for line in describe(execution):
            print(line)
        is_equal = is_equal and execution.parted is None
    return 0 if is_equal else 1
