"""Verbs run in this process, and schedulers driven without a model."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.cli.main import invoke
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan, StepResult
from tests.coming_from.page import ROOT

EXAMPLES = ROOT / "examples"
PRESSURE = str(EXAMPLES / "workload_pressure.json")


def has(value: Any, path: str) -> bool:
    """Whether a document has a path: ``models[].id`` is in one of the models at least."""
    first, _, rest = path.partition(".")
    name = first.removesuffix("[]")
    if not isinstance(value, dict) or name not in value:
        return False
    inner = value[name]
    if name != first:
        return any(has(each, rest) for each in inner) if rest else isinstance(inner, list)
    return has(inner, rest) if rest else True


def printed(*arguments: str, code: int = 0) -> str:
    """Standard output of a verb that ends with this exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert invoke(list(arguments)) == code
    return out.getvalue()


def report(workload: str, *flags: str) -> dict[str, Any]:
    """The report of a replay, with its ticks."""
    read: dict[str, Any] = json.loads(printed("replay", workload, "--ticks", "--json", *flags))
    return read


@cache
def pressure() -> dict[str, Any]:
    return report(PRESSURE)


def workload(folder: Path, requests: Sequence[Mapping[str, Any]], **config: Any) -> str:
    """A workload file, small unless the config says otherwise."""
    limits = {"block_size": 16, "num_blocks": 64, "max_model_len": 512, **config}
    path = folder / "workload.json"
    numbered = [{"id": f"r{number}", "arrival_tick": 0, **each} for number, each in enumerate(requests)]
    path.write_text(json.dumps({"config": limits, "requests": numbered}))
    return str(path)


@cache
def example_verdict(name: str, code: int) -> dict[str, Any]:
    """The verdict on an example of the gate."""
    read: dict[str, Any] = json.loads(printed("gate", str(EXAMPLES / name), "--json", code=code))
    return read


def verdict(folder: Path, code: int, baseline: Sequence[Any], candidate: Sequence[Any], **policy: Any) -> Any:
    """The verdict on observations."""
    path = folder / "gate.json"
    policy = {"min_pairs": 1, **policy}
    path.write_text(json.dumps({"policy": policy, "baseline": baseline, "candidate": candidate}))
    return json.loads(printed("gate", str(path), "--json", code=code))


def scheduler(**limits: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**{"block_size": 16, "num_blocks": 64, "max_model_len": 512, **limits}))


def step(core: Scheduler) -> StepPlan:
    """One step, in which every sampling sequence gets a token."""
    plan = core.schedule()
    if plan.has_work:
        core.commit(plan, StepResult((1,) * plan.num_samples, (None,) * plan.num_samples))
    core.check()
    return plan


def run(core: Scheduler, *requests: Request) -> list[StepPlan]:
    """Add requests and step until all have ended."""
    for request in requests:
        core.add(request)
    plans = []
    while core.has_unfinished:
        plans.append(step(core))
        assert len(plans) < 1000
    return plans
