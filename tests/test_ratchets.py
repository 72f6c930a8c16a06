"""The house gets no larger, no more scattered and no less tested than it was: each measure has a ratchet."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tools.hops import way_of
from tools.measures import RATCHETS, ROOT, House, better, import_ratchets_of, ratchets_of

HELD: Mapping[str, float] = json.loads((ROOT / RATCHETS).read_text())
"""By measure. A line of this file that gets worse is for a reviewer, with its reason in the commit's message."""


def worse(values: Mapping[str, float]) -> list[str]:
    """Measures that are on the wrong side of their ratchet."""
    return [
        f"{name}: {value:g}, the ratchet is {HELD[name]:g}"
        for name, value in values.items()
        if name in HELD and better(name, value, HELD[name]) != value
    ]


def test_no_measure_of_the_code_is_worse_than_its_ratchet() -> None:
    """`python -m tools.measures --lists` says which modules and docstrings are counted."""
    assert worse(ratchets_of(House(ROOT))) == []


def test_no_more_modules_are_imported_than_were() -> None:
    assert worse(import_ratchets_of(ROOT)) == []


@pytest.mark.slow
def test_the_way_of_a_chat_request_is_no_longer_than_it_was() -> None:
    """`make measures` lists its hops."""
    assert worse(way_of(ROOT).figures) == []
