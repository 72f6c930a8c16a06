"""docs/coming-from.md is true: what its tables name in code is executed, or looked up where a running Lockstep has it.

A table's kind is its heading; of each row the second cell is what is here. Nothing is said twice for the test's sake.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml

import lockstep.core
import lockstep.engine
from lockstep.cli.main import command_of, invoke
from lockstep.cluster.manifest_file import dump, parse
from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ManifestError
from lockstep.replay.configs import parse_value
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
ORIGINS = ("runtime-lab", "NRT", "ruvllm", "oxillama")
OFFLINE = ("check", "replay", "diff", "sweep", "run", "gate", "mirror", "mirror-gate")
"""Verbs that end by themselves and need nobody: their commands are executed, the others parsed."""
SUPPORT = (ROOT / "examples" / "customer-support.yaml").read_text(encoding="utf-8")
BUSY = SUPPORT.replace("max_active_sessions: 16", "max_active_sessions: 1").replace(
    "tier: resident\n      co_activation", "tier: standby\n      co_activation"
)
"""The example with one session at once, and with specialists that are warmed: everything of it happens."""


class Row(NamedTuple):
    """One row of a table under a heading."""

    origin: str
    kind: str
    claims: tuple[str, ...]
    """What stands in code in its second cell."""


def rows_of(page: str) -> Iterator[Row]:
    """All of them, without their heads."""
    origin = kind = ""
    is_below_head = False
    for line in page.splitlines():
        if line.startswith("## "):
            origin, kind = line.removeprefix("## ").removeprefix("From "), ""
        elif line.startswith("### "):
            kind = line.removeprefix("### ")
        if line.startswith("| ") and is_below_head and kind:
            yield Row(origin, kind, tuple(re.findall(r"`([^`]+)`", line.split(" |")[1])))
        is_below_head = line.startswith("|---") or (is_below_head and line.startswith("|"))


ROWS = tuple(rows_of(PAGE))
CHECKED: set[str] = set()
"""Kinds of tables that a test here looks at."""


def of_kind(kind: str) -> pytest.MarkDecorator:
    CHECKED.add(kind)
    claims = [claim for row in ROWS if row.kind == kind for claim in row.claims]
    return pytest.mark.parametrize("claim", list(dict.fromkeys(claims)))


# -- what a running server gives ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A server of `BUSY` after everything has happened that the page speaks of."""

    client: httpx2.Client
    cluster: dict[str, Any]
    metrics: str
    events: set[str]
    answers: list[dict[str, Any]]
    routes: Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    path = tmp_path_factory.mktemp("coming-from") / "cluster.yaml"
    path.write_text(BUSY)
    with serve("--manifest", str(path), "--backend", "stub", *IN_THREAD) as server, server.client() as client:
        answers = [ask(client, "billing", "one"), ask(client, "a question about nothing", "two")]
        for what in ("load", "unload"):
            assert client.post(f"/v1/models/legal/{what}").status_code == 200
        until(lambda: client.get("/v1/cluster").json()["counters"]["co_activation_warms"] == 2, "two models are warmed")
        put = client.put("/v1/manifest", content=BUSY, headers={"Content-Type": "application/yaml"})
        assert put.status_code == 200
        yield Seen(
            client,
            client.get("/v1/cluster").json(),
            client.get("/metrics").text,
            events_of(server),
            answers,
            client.get("/openapi.json").json()["paths"],
        )


def ask(client: httpx2.Client, text: str, session: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "session_id": session}
    answer: dict[str, Any] = client.post("/v1/chat/completions", json=body).json()
    return answer


def events_of(server: ServerProcess) -> set[str]:
    """All types until the replacement's end, which is the last thing that happened."""
    found: set[str] = set()
    with server.client() as client, client.stream("GET", "/v1/events?after=0") as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                found.add(line.removeprefix("event: "))
            if "manifest_replaced" in found:
                break
    return found


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


# -- one checker a kind ---------------------------------------------------------------------------------------------


@of_kind("Commands")
def test_commands_run(claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(claim)
    assert program == "lockstep"
    if arguments[0] in OFFLINE:
        assert invoke(arguments) == (1 if arguments[0] == "diff" else 0)
        return
    command = command_of(arguments.pop(0))
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    with command.make_context(command.name, arguments):
        pass


@of_kind("Limits")
def test_limits_are_the_schedulers(claim: str) -> None:
    name, is_set, value = claim.partition("=")
    assert name in {field.name for field in fields(SchedulerConfig)}
    if is_set:
        limits: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "max_model_len": 512}
        SchedulerConfig(**limits, **{name: parse_value(name, value)})


@of_kind("Defaults that differ")
def test_defaults_are_those(claim: str) -> None:
    name, _, value = claim.partition("=")
    [default] = [field.default for field in fields(SchedulerConfig) if field.name == name]
    assert default == parse_value(name, value)


@cache
def report() -> dict[str, Any]:
    """Of a replay, as the command line writes it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert invoke(["replay", str(ROOT / "examples" / "workload_pressure.json"), "--ticks", "--json"]) == 0
    told: dict[str, Any] = json.loads(printed.getvalue())
    return told


@of_kind("Report")
def test_report_fields_are_there(claim: str) -> None:
    assert has(report(), claim)


@of_kind("Every tick")
def test_tick_fields_are_there(claim: str) -> None:
    if "=" not in claim:
        assert has(report(), f"ticks[].{claim}")


@cache
def verdict() -> dict[str, Any]:
    """Verdict on an example that has bad news, as the command line writes it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert invoke(["gate", str(ROOT / "examples" / "release_gate_bad.json"), "--json"]) == 1
    told: dict[str, Any] = json.loads(printed.getvalue())
    return told


@of_kind("The release gate")
def test_verdict_members_are_there(claim: str) -> None:
    assert has(verdict(), claim)


@of_kind("Routes")
def test_routes_are_there(claim: str, seen: Seen) -> None:
    method, path = claim.split()
    known = {re.sub(r"\{(\w+)[^}]*\}", r"{\1}", route): methods for route, methods in seen.routes.items()}
    route = re.sub(r"^/v1/models/legal/", "/v1/models/{model_id}/", path)
    assert method.lower() in known[route]
    if method == "GET" and path != "/v1/events":
        assert seen.client.get(path).status_code == 200


@of_kind("Manifest keys")
def test_manifest_keys_are_read(claim: str) -> None:
    """Set in the example, where they stand; what is read is written again."""
    path, _, value = claim.partition(": ")
    block = manifest = yaml.safe_load(SUPPORT)
    *way, key = path.replace("models.NAME", "legal").split(".")
    for name in way:
        block = manifest["models"]["specialists"][2] if name == "legal" else block.setdefault(name, {})
    block[key] = yaml.safe_load(value)
    read = parse(yaml.safe_dump(manifest, sort_keys=False))
    assert parse(dump(read)) == read
    assert len(read.notes) == (value in ("18G", "32gb", "18000000000"))


@of_kind("Counters")
def test_counters_are_counted(claim: str, seen: Seen) -> None:
    if claim.startswith("lockstep:"):
        name = re.escape(claim)
        assert re.search(rf"^# TYPE {name} ", seen.metrics, re.MULTILINE)
    else:
        assert has(seen.cluster, claim)


@of_kind("Events")
def test_events_happen(claim: str, seen: Seen) -> None:
    assert claim in seen.events


@of_kind("A routed answer")
def test_routed_answers_have_their_fields(claim: str, seen: Seen) -> None:
    assert all(has(answer, claim) for answer in seen.answers)


def test_the_calls_are_those_of_the_page(seen: Seen) -> None:
    for answer, intent in zip(seen.answers, ("billing", "none"), strict=True):
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "dispatch_to_specialist"
        assert f"`{call['function']['arguments']}`" in PAGE
        assert answer["lockstep"]["intent"] == intent
        assert answer["choices"][0]["finish_reason"] != "tool_calls"


@cache
def classes() -> dict[str, Any]:
    """Every class of the core and the engine, by its name."""
    found: dict[str, Any] = {}
    for package in (lockstep.core, lockstep.engine):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name))
            found |= {n: v for n, v in members.items() if isinstance(v, type) and v.__module__ == module.name}
    return found


@of_kind("Python")
def test_python_names_exist(claim: str) -> None:
    name, *rest = claim.split(".")
    assert reduce(getattr, rest, classes()[name]) is not None


def test_what_is_not_yet_is_not_there() -> None:
    """A page that says so of what has come is out of date."""
    _, _, missing = PAGE.partition("### Not yet\n")
    assert "`rollouts:`" in missing
    with pytest.raises(ManifestError, match="rollouts"):
        parse(SUPPORT + "rollouts: []\n")
    assert "bench peers" not in missing
    assert "peers" in command_of("bench").commands


def test_no_table_of_the_page_is_left_out() -> None:
    assert {row.kind for row in ROWS} == CHECKED | {"Not here on purpose", "Not yet"}
    for row in ROWS:
        assert row.kind not in CHECKED or row.claims, f"{row.origin}, {row.kind}: a row without anything to look up"
    assert list(dict.fromkeys(row.origin for row in ROWS if row.kind == "Commands")) == list(ORIGINS)
