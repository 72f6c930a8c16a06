"""`make demo`: the first thing that a newcomer runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
LIMIT_S = 240.0


@pytest.mark.slow
def test_the_demo_routes_its_messages_judges_its_answers_and_ends() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    routes = [line.split("-> ")[1] for line in done.stdout.splitlines() if line.startswith("router")]
    assert routes[:4] == ["specialists.billing", "specialists.technical", "specialists.legal", "fallback"]
    assert len(routes) == 5
    assert "│ requests_total      │ 5" in done.stdout
    assert " turns, identical" in done.stdout
    verdicts = done.stdout.partition("the gate: this server against itself")[2].splitlines()
    assert verdicts[1].startswith("promote: ")
    assert [line.split(";")[0] for line in verdicts if "answers are the same" in line] == [
        "  10 of 10 answers are the same"
    ] * 2
    assert "  what changed: max_chunk_tokens, from 256 to 16" in verdicts
    assert "p95 first token" in done.stdout
