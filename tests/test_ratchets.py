"""The codebase gets no larger, no more scattered and no less tested than it was: each measure has a ratchet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

import pytest

from tools.measures import (
    GROWS,
    MAP_PAGE,
    RATCHETS,
    ROOT,
    Codebase,
    better,
    import_ratchets_of,
    map_lines,
    ratchets_of,
    with_map,
)
from tools.request_path import trace_request_path
from tools.shape import counts_of, counts_of_test

HELD: Mapping[str, float] = json.loads((ROOT / RATCHETS).read_text())
"""By measure. A line of this file that gets worse is for a reviewer, with its reason in the commit's message."""

SLACK, LEAST_SLACK = 0.05, 3
"""How much better than its ratchet a measure may be, as a part of it and in all."""


CODEBASE = Codebase(ROOT)


@cache
def measured() -> Mapping[str, float]:
    return ratchets_of(CODEBASE)


def worse(values: Mapping[str, float]) -> list[str]:
    """Measures that are on the wrong side of their ratchet."""
    return [
        f"{name}: {value:g}, the ratchet is {HELD[name]:g}"
        for name, value in values.items()
        if name in HELD and better(name, value, HELD[name]) != value
    ]


def test_no_measure_of_the_code_is_worse_than_its_ratchet() -> None:
    """`python -m tools.measures --lists` says which modules and docstrings are counted."""
    assert worse(measured()) == []


def test_no_more_modules_are_imported_than_were() -> None:
    assert worse(import_ratchets_of(ROOT)) == []


def test_ratchets_follow_what_has_become_better() -> None:
    """`python -m tools.measures --tighten` sets them, so that what was won is not lost again."""
    values = measured()
    loose = [
        f"{name}: {values[name]:g}, the ratchet is {held:g}"
        for name, held in HELD.items()
        if name in values
        and abs(values[name] - held) > max(SLACK * held, 0.0 if name.startswith(GROWS) else LEAST_SLACK)
    ]
    assert loose == []


def test_the_map_is_of_these_files() -> None:
    """`make map` writes it."""
    page = (ROOT / MAP_PAGE).read_text()
    assert page == with_map(page, map_lines(CODEBASE))


@pytest.mark.slow
def test_the_path_of_a_chat_request_has_not_grown() -> None:
    """`make measures` lists its handovers."""
    assert worse(trace_request_path(ROOT).figures) == []


def test_the_shape_of_code_is_counted() -> None:
    source = (
        "import threading\nimport time\n"
        "def long(self, a, b, c, d, e, f, g: Any) -> None:\n"
        "    try:\n        time.monotonic()\n    except Exception:  # noqa: BLE001\n        threading.Thread()\n"
        "def short(self, a, b, c, d, e, f): ...\n"
    )
    assert counts_of(source) == {
        "functions with over six parameters": 1,
        "Any": 1,
        "broad excepts": 1,
        "ignores": 1,
        "clock reads": 1,
        "threads": 1,
    }
    waits = "    time.sleep(1)\n    asyncio.sleep(0)\n    pair._replace(a=1)\n"
    tests = f"def test(monkeypatch):\n    monkeypatch.setattr(x, 'y', 1)\n{waits}    x._y\n    self._z\n"
    assert counts_of_test(tests) == {"monkeypatch.setattr": 1, "sleeps": 1, "private attributes": 1}
