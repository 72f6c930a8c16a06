"""`lockstep replay --verify` and `--execute`: a recording, decided or computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError

VERSION = 1
"""Of the JSON form."""


def replay_trace(verify: Path | None, execute: Path | None, model: str | None, as_json: bool) -> int:
    """Exit code 0: everything is identical, 1: something is not."""
    if verify is not None and execute is not None:
        raise UsageError("--verify decides a recording again and --execute computes it again; give one of them")
    if execute is not None:
        return execute_trace(execute.expanduser(), model, as_json)
    assert verify is not None, "one of the two is given"
    if model is not None:
        raise UsageError("--verify needs no model: it decides, and computes nothing; leave --model out")
    return verify_trace(verify.expanduser(), as_json)


def verify_trace(path: Path, as_json: bool) -> int:
    from lockstep.replay import plans as planning
    from lockstep.replay import verify as deciding
    from lockstep.replay.trace import open_trace

    files = planning.plan_files(path)
    facts: dict[str, Any] = {"version": VERSION}
    lines: list[str] = []
    if files != (path,):
        trace = open_trace(path)
        verification = deciding.verify(trace)
        facts |= deciding.facts(verification)
        lines += deciding.describe(verification, trace)
    if files:
        verdict = planning.verify_plans(files)
        facts["planner"] = planning.facts(verdict)
        lines += planning.describe(verdict)
    print(json.dumps(facts, indent=2) if as_json else "\n".join(lines))
    return 0 if facts.get("identical", True) and facts.get("planner", {}).get("identical", True) else 1


def execute_trace(path: Path, model: str | None, as_json: bool) -> int:
    from lockstep.replay import execute as computing
    from lockstep.replay.trace import open_trace

    if model is None:
        raise UsageError("--execute computes with a model; name it with --model SOURCE")
    engines = []
    for execution in computing.execute(open_trace(path), model):
        engines.append(computing.facts(execution))
        if not as_json:
            print("\n".join(computing.describe(execution)))
    if as_json:
        print(json.dumps({"version": VERSION, "engines": engines}, indent=2))
    return 0 if all(engine["identical"] for engine in engines) else 1
