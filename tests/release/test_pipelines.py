"""Examples for pipelines are run; reactions of providers to the gate follow their documentation."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx2
import pytest
import yaml

from lockstep.cli.main import invoke
from lockstep.release.judging import PolicySources, judge_files
from lockstep.release.live import Follower, LiveGate, app_of
from tests.release.judging import pair_line

GATE = Path("examples/gate")
HOST = "127.0.0.1"
POLICY = PolicySources(settings=["min_pairs=3"])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((GATE / f"{name}.yaml").read_text()))


# -- GitHub Actions ---------------------------------------------------------------------------------------------------


def steps() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = documents("github-actions")[0]["jobs"]["gate"]["steps"]
    return found


def test_every_flag_of_the_workflow_exists(capsys: pytest.CaptureFixture[str]) -> None:
    script = "\n".join(step.get("run", "") for step in steps()).replace("\\\n", " ")
    commands = re.findall(r"bin/lockstep (gate|serve|bench serve) (.*)", script)
    assert {verb for verb, _ in commands} == {"gate", "serve", "bench serve"}
    for verb, arguments in commands:
        assert invoke([*verb.split(), "--help"]) == 0
        text = capsys.readouterr().out
        for flag in re.findall(r"--[a-z-]+", arguments):
            assert re.search(rf"{flag}[ ,\n]", text), f"lockstep {verb} has no {flag}"


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a job in which both versions are this one; its processes end with the test."""
    for side in ("baseline", "candidate"):
        program = tmp_path / side / "bin" / "lockstep"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
        program.chmod(0o755)
    pids = tmp_path / "pids"
    yield os.environ | {"MODEL": "pocket://", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PIDS": str(pids)}
    for pid in pids.read_text().split():
        os.kill(int(pid), signal.SIGTERM)


@pytest.mark.slow
def test_the_steps_of_the_workflow_run_unchanged(tmp_path: Path, runner: dict[str, str]) -> None:
    """All steps but the first, which needs a package index; with free ports."""
    free = [socket.create_server((HOST, 0)) for _ in range(2)]
    ports = {name: str(each.getsockname()[1]) for name, each in zip(("9000", "9001"), free, strict=True)}
    for each in free:
        each.close()
    for step in [step for step in steps() if "run" in step][1:]:
        script = re.sub("|".join(ports), lambda found: ports[found.group()], step["run"]) + "\njobs -p >> $PIDS\n"
        done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=runner, check=False)
        assert done.returncode == 0 or step["name"] == "Judge"
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert done.returncode == {"promote": 0, "rollback": 1, "hold": 2}[verdict["decision"]]
    assert verdict["decision"] != "rollback", "the same version on both sides answers the same"
    assert verdict["summary"]["same"] == verdict["summary"]["pairs"] == 200
    assert verdict["reason"] in (tmp_path / "summary.md").read_text()
    assert ElementTree.parse(tmp_path / "gate.xml").getroot().tag == "testsuite"
    assert (tmp_path / "gate.html").exists()


def test_test_results_follow_the_common_junit_schema(tmp_path: Path) -> None:
    path = tmp_path / "gate.xml"
    assert invoke(["gate", "examples/release_gate_bad.json", "--junit", str(path)]) == 1
    suite = ElementTree.parse(path).getroot()
    assert (suite.tag, set(suite.keys())) == ("testsuite", {"name", "tests", "failures", "errors"})
    assert int(suite.get("tests", "")) == len(suite)
    assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
    for case in suite:
        assert (case.tag, set(case.keys())) == ("testcase", {"classname", "name"})
        assert [(each.tag, set(each.keys())) for each in case] == [("failure", {"type", "message"})]


# -- Argo Rollouts ----------------------------------------------------------------------------------------------------


def argo(metric: dict[str, Any], answers: list[httpx2.Response]) -> str:
    """Phase of a metric after these measurements, by the rules of Argo's documentation and controller.

    An answer beyond 2xx is an error, which is measured again and not counted; a value that meets neither condition is
    inconclusive; more than a limit of a kind ends the metric, and so does its count, in success. All errors are
    consecutive here.
    """
    counts = dict.fromkeys(("Successful", "Failed", "Inconclusive", "Error"), 0)
    member = metric["provider"]["web"]["jsonPath"].removeprefix("{$.").removesuffix("}")
    conditions = {"Failed": metric["failureCondition"], "Successful": metric["successCondition"]}
    for answer in answers:
        phase = "Inconclusive" if answer.is_success else "Error"
        for name, condition in conditions.items():
            subject, operator, value = condition.split()
            assert (subject, operator) == ("result", "==")
            if answer.is_success and answer.json()[member] == json.loads(value):
                phase = name
        counts[phase] += 1
        if counts["Failed"] > metric["failureLimit"]:
            return "Failed"
        if counts["Inconclusive"] > metric.get("inconclusiveLimit", 0):
            return "Inconclusive"
        if counts["Error"] > metric.get("consecutiveErrorLimit", 4):
            return "Error"
        if sum(counts.values()) - counts["Error"] >= metric["count"]:
            return "Successful"
    return "Running"


async def answers(path: Path, address: str, method: str = "GET") -> dict[str, httpx2.Response]:
    """Responses of a gate at a path while it holds, after a promotion, and after a rollback."""
    found = {}
    for decision, count in (("hold", 1), ("promote", 4), ("rollback", 4)):
        path.write_text("".join(pair_line(index, differs=decision == "rollback") for index in range(count)))
        copy = path.with_suffix(f".{decision}")
        gate = LiveGate([Follower(path, copy)], lambda copies: judge_files(copies, POLICY).verdict)
        gate.check()
        assert gate.state.decision == decision
        transport = httpx2.ASGITransport(app=app_of(gate, HOST))
        async with httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            found[decision] = await client.request(method, address)
    return found


async def test_argo_promotes_only_by_the_gates_verdict(tmp_path: Path) -> None:
    [template] = documents("argo-analysis-template")
    [metric] = template["spec"]["metrics"]
    address = metric["provider"]["web"]["url"].removeprefix("{{args.gate-url}}")
    said = await answers(tmp_path / "pairs.jsonl", address)
    patience = metric["consecutiveErrorLimit"]
    assert argo(metric, [said["hold"]] * patience) == "Running"
    assert argo(metric, [said["hold"]] * patience + [said["promote"]]) == "Successful"
    assert argo(metric, [said["hold"]] * patience + [said["rollback"]]) == "Failed"
    assert argo(metric, [said["hold"]] * (patience + 1)) == "Error"


# -- Flagger ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "yes"),
    [
        ("rollout", {"hold", "promote"}),  # any other answer halts the traffic and counts towards failure
        ("confirm-promotion", {"promote"}),  # the promotion waits for it
        ("rollback", {"rollback"}),  # such an answer ends the release
    ],
)
async def test_flagger_gets_2xx_exactly_if_it_should_continue(tmp_path: Path, kind: str, yes: set[str]) -> None:
    [canary] = documents("flagger-canary")
    hooks = {each["type"]: each for each in canary["spec"]["analysis"]["webhooks"]}
    assert set(hooks) == {"rollout", "confirm-promotion", "rollback"}
    address = httpx2.URL(hooks[kind]["url"]).path
    said = await answers(tmp_path / "pairs.jsonl", address, "POST")
    assert {decision for decision, answer in said.items() if answer.status_code == 200} == yes
    assert {answer.status_code for decision, answer in said.items() if decision not in yes} == {412}
    assert all(isinstance(value, str) for value in hooks[kind]["metadata"].values())


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def test_the_job_calls_the_gate_with_existing_flags_and_policy_fields(tmp_path: Path) -> None:
    job, policy = documents("kubernetes-job")
    spec = job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    for name, text in policy["data"].items():
        (tmp_path / name).write_text(text)
    side = "".join(f'{{"request_id": "r{at}", "ts": {at}, "latency_ms": 1, "token_ids": [1]}}\n' for at in range(40))
    for name in ("baseline", "candidate"):
        (tmp_path / f"{name}.jsonl").write_text(side)
    program, *arguments = (re.sub("/(mirror|policy)/", f"{tmp_path}/", each) for each in container["command"])
    assert (program, invoke(arguments)) == ("lockstep", 2), "forty pairs are too few for a sequential gate"
    assert json.loads((tmp_path / "verdict.json").read_text())["policy"]["min_pairs"] == 200
