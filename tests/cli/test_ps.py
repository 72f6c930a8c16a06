"""`lockstep ps` against a running cluster, and what its table says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.ps import EXIT_LEFT, text_of
from lockstep.cluster.snapshot import BudgetSnapshot
from tests.server.living import Living, living_cluster
from tests.server.managing import Hosted, Managed
from tests.server.process import IN_THREAD, serve
from tests.waiting import until

NOTICE_LIMIT_S = 30.0
"""A worker is asked for its health every second; far above that."""
MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "customer-support.yaml"


def test_a_running_cluster_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serve("--manifest", str(MANIFEST), "--backend", "stub", *IN_THREAD) as server:
        assert invoke(["ps", "--base-url", server.base_url]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert invoke(["ps", "--base-url", server.base_url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cluster"] == "customer-support-agent"
    columns = ["MODEL", "TIER", "STATE", "PREDICTED", "MEASURED", "RUNNING", "WAITING", "SESSIONS", "REQUESTS", "IDLE"]
    assert shown[0].split() == columns
    assert [line.split()[:7] for line in shown[1:5]] == [
        ["router", "resident", "resident", "800", "MB", "800", "MB"],
        ["specialists.billing", "resident", "resident", "800", "MB", "800", "MB"],
        ["specialists.technical", "resident", "resident", "800", "MB", "800", "MB"],
        ["specialists.legal", "standby", "standby", "800", "MB", "-", "0"],
    ]
    assert any(line.startswith("gpu_budget: 2.4 GB of ") for line in shown)
    assert shown[-1] == "counters: all zero"


def test_a_server_of_one_model_is_shown_without_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with serve("stub://alpha", "--served-model-name", "org/alpha", *IN_THREAD) as server:
        assert invoke(["ps", "--base-url", server.base_url]) == 0
    shown = capsys.readouterr().out.splitlines()
    row = ["org/alpha", "resident", "resident", "800", "MB", "800", "MB", "0", "0", "0/-", "0", "-"]
    assert shown[1].split() == row
    assert "memory for models: 800 MB in use, no limit set" in shown


def test_recording_fault_is_a_warning_of_a_ready_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the health, in ps, and as a gauge to raise an alarm by; the directory is nobody's business."""
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    flags = ("--manifest", str(MANIFEST), "--backend", "stub", *IN_THREAD, "--trace", str(blocked / "below"))
    with serve(*flags) as server, server.client() as client:
        until(lambda: client.get("/health").json()["warnings"])
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        (warning,) = health.json()["warnings"]
        assert warning == "recording has stopped: Not a directory; requests are still served"
        assert 'lockstep:trace_recording{engine="0",model_name="router"} 0.0' in client.get("/metrics").text
        assert invoke(["ps", "--base-url", server.base_url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"warning: {warning}"


def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ps", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "cannot connect to http://127.0.0.1:9" in capsys.readouterr().err


def test_a_budget_that_was_cut_shows_its_declared_size() -> None:
    shown = text_of(Managed().snapshot())
    assert "gpu_budget: 40 B of 80 B in use, reduced from 100 B to the machine's memory" in shown
    assert "counters: requests_total 3" in shown
    assert "far        remote    remote            -         -" in shown


def test_tasks_are_shown_if_a_model_is_not_for_text() -> None:
    from msgspec.structs import replace

    snapshot = Managed().snapshot()
    text_only = replace(snapshot, models=tuple(replace(model, task="generate") for model in snapshot.models))
    assert "TASK" not in text_of(text_only)
    models = (replace(snapshot.models[0], task="embed"), *text_only.models[1:])
    head, first, second, *_ = text_of(replace(snapshot, models=models)).splitlines()
    at = head.index("TASK")
    assert (first[at:].split()[0], second[at:].split()[0]) == ("embed", "generate")


def test_a_budget_that_is_not_set_is_shown_as_memory_without_a_limit() -> None:
    from msgspec.structs import replace

    snapshot = replace(Managed().snapshot(), budgets=(BudgetSnapshot("ram_budget", None, None, 5_000),))
    assert "memory for standby models: 5 kB in use, no limit set" in text_of(snapshot)


@contextmanager
def hosted(cluster: Hosted) -> Iterator[Living]:
    with living_cluster(cluster) as server:
        yield server


def test_hosts_and_where_each_replica_is_are_shown_and_why_one_is_not() -> None:
    lines = text_of(Hosted().snapshot()).splitlines()
    at = lines.index("")
    assert [line.split("  ")[0] for line in lines[at + 1 : at + 5]] == ["HOST", "a", "b", "gone"]
    shown = "a 10.0.0.1 there 1 1 of 4 CPU, 2.5 GB of 8 GB memory, 0 of 1 fast"
    assert " ".join(lines[at + 2].split()) == shown
    assert lines[at + 4].split() == ["gone", "10.0.0.3", "lost", "0", "-"]
    assert [line.split()[:4] for line in lines[at + 7 : at + 10]] == [
        ["router#0", "ready", "a", "10.0.0.1:5001"],
        ["router#1", "loading", "b", "-"],
        ["org/legal#0", "waiting", "-", "-"],
    ]
    assert "router#1 is loading: the model is loading" in lines
    assert "org/legal#0 is waiting: no host has 4 CPU free: a has 1 CPU; b has 0 CPU" in lines


def test_without_hosts_no_hosts_or_replicas_are_listed() -> None:
    shown = text_of(Managed().snapshot())
    assert "HOST" not in shown
    assert "REPLICA" not in shown


def test_a_host_is_drained_until_its_replicas_have_left_and_may_have_some_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Hosted()
    with hosted(cluster) as server:
        assert invoke(["ps", "--drain", "10.0.0.1", "--base-url", server.url]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "a is drained: it has no replicas",
            "router#1 is loading: the model is loading",
            "org/legal#0 is waiting: no host has 4 CPU free: a has 1 CPU; b has 0 CPU",
        ]
        assert list(cluster.drained) == ["a"]
        assert invoke(["ps", "--undrain", "a", "--base-url", server.url]) == 0
        assert capsys.readouterr().out == "a is no longer drained\n"
        assert cluster.drained == {}


def test_replicas_left_after_the_wait_are_named_with_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with hosted(Hosted()) as server:
        assert invoke(["ps", "--drain", "b", "--wait", "0.2", "--base-url", server.url]) == EXIT_LEFT
        assert capsys.readouterr().out.splitlines() == [
            "b is draining; replicas left on it after 0.2 s: 1",
            "router#1 is loading: the model is loading",
        ]
        assert invoke(["ps", "--drain", "b", "--wait", "0", "--base-url", server.url]) == 0
        assert "left on it: 1; `lockstep ps` shows the progress" in capsys.readouterr().out
        assert invoke(["ps", "--drain", "b", "--wait", "0.2", "--json", "--base-url", server.url]) == EXIT_LEFT
        told = json.loads(capsys.readouterr().out)
        assert (told["host"], told["is_empty"]) == ("b", False)
        assert [(place["models"], place["number"]) for place in told["places"]] == [(["router"], 1)]


def test_an_unknown_host_is_rejected_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with hosted(Hosted()) as server:
        for flag in ("--drain", "--undrain"):
            assert invoke(["ps", flag, "gon", "--base-url", server.url]) == 2
            assert "no host is called 'gon'; did you mean 'gone'?" in capsys.readouterr().err


def test_a_server_without_hosts_drains_none(capsys: pytest.CaptureFixture[str]) -> None:
    with serve("--manifest", str(MANIFEST), "--backend", "stub", *IN_THREAD) as server:
        assert invoke(["ps", "--drain", "a", "--base-url", server.base_url]) == 2
    assert "the manifest has no `hosts:`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drain", "a", "--undrain", "b"], "--drain and --undrain are both given"),
        (["--wait", "3"], "--wait requires --drain HOST"),
        (["--undrain", "a", "--wait", "3"], "--wait requires --drain HOST"),
    ],
)
def test_flags_that_do_not_fit_each_other_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["ps", *flags, "--base-url", "http://127.0.0.1:9"]) == 2
    assert message in capsys.readouterr().err
