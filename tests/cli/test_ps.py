"""`lockstep ps` against a running cluster, and what its table says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lockstep.cli.main import invoke
from lockstep.cli.ps import size, text_of
from lockstep.cluster.snapshot import BudgetSnapshot
from tests.server.managing import Managed
from tests.server.process import IN_THREAD, serve

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
        ["router", "resident", "resident", "800.0", "MB", "800.0", "MB"],
        ["specialists.billing", "resident", "resident", "800.0", "MB", "800.0", "MB"],
        ["specialists.technical", "resident", "resident", "800.0", "MB", "800.0", "MB"],
        ["specialists.legal", "standby", "standby", "800.0", "MB", "-", "0"],
    ]
    assert any(line.startswith("gpu_budget: 2.4 GB of ") for line in shown)
    assert shown[-1] == "counted: nothing yet"


def test_a_server_of_one_model_is_shown_without_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with serve("stub://alpha", "--served-model-name", "org/alpha", *IN_THREAD) as server:
        assert invoke(["ps", "--base-url", server.base_url]) == 0
    shown = capsys.readouterr().out.splitlines()
    row = ["org/alpha", "resident", "resident", "800.0", "MB", "800.0", "MB", "0", "0", "0/-", "0", "-"]
    assert shown[1].split() == row
    assert "gpu_budget: 800.0 MB in use, unbounded" in shown


def test_what_cannot_be_recorded_is_a_warning_and_the_server_is_ready_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the health, in ps, and as a gauge to raise an alarm by; the directory is nobody's business."""
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    flags = ("--manifest", str(MANIFEST), "--backend", "stub", *IN_THREAD, "--trace", str(blocked / "below"))
    with serve(*flags) as server, server.client() as client:
        deadline_s = time.monotonic() + NOTICE_LIMIT_S
        while not (health := client.get("/health")).json()["warnings"] and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert (health.status_code, health.json()["status"]) == (200, "ready")
        (warning,) = health.json()["warnings"]
        assert warning == "nothing is recorded now: Not a directory; requests are answered all the same"
        assert 'lockstep:trace_recording{engine="0",model_name="router"} 0.0' in client.get("/metrics").text
        assert invoke(["ps", "--base-url", server.base_url]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"warning: {warning}"


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["ps", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "cannot connect to http://127.0.0.1:9" in capsys.readouterr().err


def test_a_budget_that_was_cut_says_so() -> None:
    shown = text_of(Managed().snapshot())
    assert "gpu_budget: 40 B of 80 B in use, cut from 100 B to what the machine has" in shown
    assert "counted: requests_total 3" in shown
    assert "far        remote    remote            -         -" in shown


def test_what_nothing_bounds_is_unbounded() -> None:
    from msgspec.structs import replace

    snapshot = replace(Managed().snapshot(), budgets=(BudgetSnapshot("ram_budget", None, None, 5_000),))
    assert "ram_budget: 5.0 kB in use, unbounded" in text_of(snapshot)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1_000, "1.0 kB"), (2_400_000_000, "2.4 GB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
