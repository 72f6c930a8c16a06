"""`make demo`: the first thing that a newcomer runs."""

from __future__ import annotations

import re
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
    assert "│ requests_total      │ 6" in done.stdout
    said = " ".join(done.stdout.split())
    places = re.findall(r"its session: place (\w+), (\d+) tokens on the device, (\d+) in host memory", said)
    (before, held, _), (away, left, stored), (back, again, _) = places
    assert (before, away, back) == ("device", "host", "device")
    assert (int(held) > 0, int(left), int(stored) > 0, int(again) > 0) == (True, 0, True, True)
    [cached] = re.findall(r"; (\d+) prompt tokens were not computed again", said)
    assert int(cached) > 0
    assert "all of it computed: the same answer, byte by byte" in said
    assert re.search(r"dashboard while it runs: http://127.0.0.1:\d+/", done.stdout)
    assert " turns, identical" in done.stdout
    verdicts = done.stdout.partition("the gate: this server against itself")[2].splitlines()
    assert verdicts[1].startswith("promote: ")
    assert [line.split(";")[0] for line in verdicts if "answers are the same" in line] == [
        "  12 of 12 answers are the same"
    ] * 2
    assert "  what changed: max_chunk_tokens, from 256 to 16" in verdicts
    assert "p95 first token" in done.stdout
