"""`make demo`: the first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
LIMIT_S = 240.0


@pytest.mark.slow
def test_the_demo_routes_its_messages_and_ends() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    routes = [line.split("-> ")[1] for line in done.stdout.splitlines() if line.startswith("router")]
    assert routes[:4] == ["specialists.billing", "specialists.technical", "specialists.legal", "fallback"]
    assert len(routes) == 5
    assert "│ requests_total      │ 5" in done.stdout
    assert done.stdout.rstrip().endswith(" turns, identical")
