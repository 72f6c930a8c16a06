"""Each command, key, field, counter and name of docs/coming-from.md is run, or looked up where Lockstep has it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import lockstep.core
import lockstep.engine
from lockstep.cli.main import command_of, invoke
from lockstep.cluster import snapshot
from lockstep.cluster.manifest_file import dump, parse
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.errors import ConfigError, ManifestError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.release.observation import NAMES
from lockstep.replay.configs import parse_value
from tests.coming_from.conftest import SUPPORT, Seen
from tests.coming_from.offline import EXAMPLES, example_verdict, has, pressure, report
from tests.coming_from.page import BLOCKS, CHECKED, ORIGINS, PAGE, ROWS, Row, claims_of, code_of, of_kind

OFFLINE = ("check", "replay", "diff", "sweep", "run", "gate", "mirror", "mirror-gate")
"""Verbs that end by themselves and need no server: their commands are run, those of others are parsed."""
KINDS_WITHOUT_CODE = {"Not here on purpose", "Not yet", "Figures beside NRT's"}
MIB = 2**20
NRT_UNITS = {"": MIB, "mb": MIB, "mib": MIB, "g": 2**30, "gb": 2**30, "gib": 2**30, "t": 2**40}
"""Bytes of NRT's units, in any case; a plain number is MiB."""


@claims_of("Commands")
def test_commands_run(claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(claim)
    assert program == "lockstep"
    if arguments[0] in OFFLINE:
        assert invoke(arguments) == (1 if arguments[0] == "diff" else 0)
        return
    assert_parsed(arguments)


def assert_parsed(arguments: list[str]) -> None:
    command = command_of(arguments[0])
    rest = arguments[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    with command.make_context(command.name, rest):
        pass


def value_of(claim: str) -> tuple[str, Any]:
    """A field of a scheduler's config and its value, None where the page names the field alone."""
    name, is_set, value = claim.partition("=")
    return name, parse_value(name, value) if is_set else None


@claims_of("Limits")
def test_limits_are_the_schedulers(claim: str) -> None:
    name, value = value_of(claim)
    assert name in {field.name for field in fields(SchedulerConfig)}
    if value is not None:
        limits: dict[str, Any] = {"block_size": 16, "num_blocks": 64, "max_model_len": 512, name: value}
        if name.endswith("_seqs"):
            limits["max_num_batched_tokens"] = 4096
        assert getattr(SchedulerConfig(**limits), name) == value


@claims_of("Defaults that differ")
def test_defaults_are_those(claim: str) -> None:
    if claim.startswith("SamplingParams."):
        name, _, value = claim.removeprefix("SamplingParams.").partition("=")
        assert repr(getattr(SamplingParams(), name)) == value
        return
    name, _, value = claim.partition("=")
    [default] = [field.default for field in fields(SchedulerConfig) if field.name == name]
    assert default == parse_value(name, value)


@claims_of("Report")
def test_report_members_exist(claim: str) -> None:
    assert has(pressure(), claim)


CHECKED.add("The published figures")


@pytest.mark.parametrize("row", of_kind("The published figures"), ids=lambda row: row.cells[0])
def test_both_workloads_give_the_published_figures(row: Row) -> None:
    [[name], [plain], [pressured]] = map(code_of, row.cells)
    figures = [report(str(EXAMPLES / f"{file}.json"))[name] for file in ("workload", "workload_pressure")]
    assert figures == [float(plain), float(pressured)]


@claims_of("Every tick")
def test_members_of_ticks_exist(claim: str) -> None:
    assert has(pressure(), f"ticks[].{claim}")


@claims_of("Observations")
def test_fields_of_observations_exist(claim: str) -> None:
    assert claim in NAMES


@claims_of("The release gate")
def test_members_of_verdicts_exist(claim: str) -> None:
    assert has(example_verdict("release_gate_bad.json", 1), claim)


CHECKED.add("Sizes")


def in_nrt(text: str) -> int:
    """Bytes of a budget as NRT reads it."""
    found = re.fullmatch(r'"?(\d+)([A-Za-z]*)"?', text)
    assert found is not None
    return int(found[1]) * NRT_UNITS[found[2].lower()]


def with_budget(text: str) -> str:
    return SUPPORT.replace("18GB", text)


@pytest.mark.parametrize("row", of_kind("Sizes"), ids=lambda row: row.cells[0])
def test_a_converted_size_has_the_bytes_that_nrt_reads(row: Row) -> None:
    for theirs in code_of(row.cells[0]):
        for ours in row.claims:
            read = parse(with_budget(ours))
            assert (read.resources.gpu_budget_bytes, read.notes) == (in_nrt(theirs), ())


@pytest.mark.parametrize("row", of_kind("Sizes"), ids=lambda row: row.cells[0])
def test_an_unchanged_size_of_nrt_is_read_as_its_row_states(row: Row) -> None:
    """As the bytes or the size that it names, with a warning, or as an error, that has each size of the sentence."""
    for theirs in code_of(row.cells[0]):
        sizes = re.findall(r"\b\d+[GMTi]*i?B\b", row.sentence)
        if row.sentence.startswith("An error"):
            with pytest.raises(ManifestError) as caught:
                parse(with_budget(theirs))
            assert len(sizes) == 2
            assert all(size in str(caught.value) for size in sizes)
            continue
        read = parse(with_budget(theirs))
        num_bytes = read.resources.gpu_budget_bytes
        if row.sentence == "The same bytes.":
            assert num_bytes == in_nrt(theirs)
        elif found := re.match(r"Read as ([\d,]+) bytes", row.sentence):
            assert num_bytes == int(found[1].replace(",", ""))
        else:
            assert num_bytes == parse(with_budget(sizes[0])).resources.gpu_budget_bytes
        assert bool(read.notes) == ("warning" in row.sentence)
        assert all(size in note for note in read.notes for size in sizes)


def test_the_error_and_the_manifest_of_the_page_are_real(tmp_path: Path) -> None:
    [manifest] = [block for block in BLOCKS if block.language == "yaml"]
    path = tmp_path / "cluster.yaml"
    path.write_text(manifest.text)
    assert invoke(["check", str(path), "--backend", "stub"]) == 0
    shown = parse(manifest.text).resources
    assert (shown.gpu_budget_bytes, shown.ram_budget_bytes) == (in_nrt('"18432"'), in_nrt("32GB"))
    [error] = [block for block in BLOCKS if "without a unit" in block.text]
    with pytest.raises(ManifestError) as caught:
        parse(with_budget('"18432"'))
    assert error.text in str(caught.value)


@claims_of("Routes")
def test_routes_answer(claim: str, seen: Seen) -> None:
    method, path = claim.split()
    known = {re.sub(r"\{(\w+)[^}]*\}", r"{\1}", route): methods for route, methods in seen.routes.items()}
    route = re.sub(r"^/v1/models/legal/", "/v1/models/{model_id}/", path)
    assert method.lower() in known[route]
    if method == "GET" and path != "/v1/events":
        assert seen.client.get(path).status_code == 200


@claims_of("Manifest keys")
def test_manifest_keys_are_read(claim: str) -> None:
    """Set in the example; what is read is written again."""
    assert not parse(manifest_with(claim)).notes


@claims_of("Several hosts")
def test_keys_and_commands_of_several_hosts(claim: str) -> None:
    if claim.startswith("lockstep "):
        assert_parsed(shlex.split(claim)[1:])
    else:
        parse(manifest_with(claim))


def manifest_with(claim: str) -> str:
    path, _, value = claim.partition(": ")
    block = manifest = yaml.safe_load(SUPPORT)
    *way, key = path.replace("models.NAME", "legal").split(".")
    for name in way:
        block = manifest["models"]["specialists"][2] if name == "legal" else block.setdefault(name, {})
    block[key] = yaml.safe_load(value)
    text = yaml.safe_dump(manifest, sort_keys=False)
    read = parse(text)
    assert parse(dump(read)) == read
    return text


@claims_of("Counters")
def test_counters_are_counted(claim: str, seen: Seen) -> None:
    if claim.startswith("lockstep:"):
        assert re.search(rf"^# TYPE {re.escape(claim)} ", seen.metrics, re.MULTILINE)
    else:
        assert has(seen.cluster, claim)


@claims_of("Events")
def test_events_happen(claim: str, seen: Seen) -> None:
    assert f"event: {claim}" in seen.events


@claims_of("A routed answer")
def test_routed_answers_have_their_members(claim: str, seen: Seen) -> None:
    assert all(has(answer, claim) for answer in seen.answers)


@claims_of("Sessions in host memory")
def test_members_of_sessions_and_flags_exist(claim: str, seen: Seen) -> None:
    if claim.startswith("lockstep "):
        assert_parsed(shlex.split(claim)[1:])
        return
    name, _, value = claim.partition(": ")
    assert name in seen.session("one")
    if name == "place":
        assert value in get_args(snapshot.KVLocation)


@cache
def classes() -> dict[str, Any]:
    """Every class of the core and the engine, and of sampling, by its name."""
    found: dict[str, Any] = {"SamplingParams": SamplingParams}
    for package in (lockstep.core, lockstep.engine):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name))
            found |= {n: v for n, v in members.items() if isinstance(v, type) and v.__module__ == module.name}
    return found


@claims_of("Python")
def test_python_names_exist(claim: str) -> None:
    assert_named(claim)


@claims_of("States")
def test_names_of_states_exist(claim: str) -> None:
    assert_named(claim)


def assert_named(claim: str) -> None:
    name, *rest = claim.split(".")
    assert reduce(getattr, rest, classes()[name]) is not None


def test_what_is_not_available_yet_is_not_there() -> None:
    """The page is out of date once it is there."""
    _, _, missing = PAGE.partition("### Not yet\n")
    assert "`rollouts:`" in missing
    with pytest.raises(ManifestError, match="rollouts"):
        parse(SUPPORT + "rollouts: []\n")
    assert "speculative decoding with a draft model" in missing
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculativeConfig.of({"method": "draft_model"})


def test_no_table_of_the_page_is_left_out() -> None:
    assert {row.kind for row in ROWS} == CHECKED | KINDS_WITHOUT_CODE
    for row in ROWS:
        is_bare = row.kind in KINDS_WITHOUT_CODE or row.kind in ("Sizes", "The published figures")
        assert is_bare or row.claims, f"{row.origin}, {row.kind}: a row without anything to look up"
    assert list(dict.fromkeys(row.origin for row in ROWS if row.kind == "Commands")) == list(ORIGINS)
