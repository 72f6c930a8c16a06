"""`lockstep replay --verify` and `--execute`: a recording, decided or computed again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.replay.trace import Trace

VERSION = 2
"""Of the JSON form."""


def replay_trace(verify: Path | None, execute: Path | None, model: str | None, allows_gaps: bool, as_json: bool) -> int:
    """Exit code 0: everything is there and identical, 1: something is not."""
    if verify is not None and execute is not None:
        raise UsageError("--verify decides a recording again and --execute computes it again; give one of them")
    if execute is not None:
        if allows_gaps:
            raise UsageError("--execute follows every step and cannot pass over gaps; leave --allow-gaps out")
        return execute_trace(execute.expanduser(), model, as_json)
    assert verify is not None, "one of the two is given"
    if model is not None:
        raise UsageError("--verify needs no model: it decides, and computes nothing; leave --model out")
    return verify_trace(verify.expanduser(), as_json, allows_gaps=allows_gaps)


def verify_trace(path: Path, as_json: bool, *, allows_gaps: bool = False) -> int:
    from lockstep.replay import plans as planning
    from lockstep.replay import verify as deciding
    from lockstep.replay.trace import open_trace

    files = planning.plan_files(path)
    facts: dict[str, Any] = {"version": VERSION}
    lines: list[str] = []
    is_in_order = may_be_meant = True
    if files != (path,):
        trace = open_trace(path)
        verification = deciding.verify(trace)
        facts |= deciding.facts(verification)
        lines += deciding.describe(verification, trace)
        is_in_order, may_be_meant = (verification.is_in_order(allows) for allows in (allows_gaps, True))
    if files:
        verdict = planning.verify_plans(files)
        facts["planner"] = planning.facts(verdict)
        lines += planning.describe(verdict)
        is_in_order = verdict.is_in_order(allows_gaps) and is_in_order
        may_be_meant = verdict.is_in_order(True) and may_be_meant
    print(json.dumps(facts, indent=2) if as_json else "\n".join(lines))
    if not is_in_order and may_be_meant:
        print("files that somebody deleted on purpose are no fault with --allow-gaps", file=sys.stderr)
    return 0 if is_in_order else 1


def open_and_tell(path: Path) -> Trace:
    """The recording, with what is to be said of its files on standard error."""
    from lockstep.replay.trace import open_trace

    trace = open_trace(path)
    tell(map(str, trace.findings))
    return trace


def tell(notes: Iterable[str]) -> None:
    """Say on standard error what whoever uses a file should know of it."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def execute_trace(path: Path, model: str | None, as_json: bool) -> int:
    from lockstep.replay import execute as computing

    if model is None:
        raise UsageError("--execute computes with a model; name it with --model SOURCE")
    engines = []
    for execution in computing.execute(open_and_tell(path), model):
        engines.append(computing.facts(execution))
        if not as_json:
            print("\n".join(computing.describe(execution)))
    if as_json:
        print(json.dumps({"version": VERSION, "engines": engines}, indent=2))
    return 0 if all(engine["identical"] for engine in engines) else 1
