"""The house gets no larger, no more scattered and no less tested than it was: each measure has a ratchet."""

from __future__ import annotations

import json

from tools.measures import GROWS, RATCHETS, ROOT, House, ratchets_of

HELD: dict[str, float] = json.loads((ROOT / RATCHETS).read_text())
"""By measure. A line of this file that gets worse is for a reviewer, with its reason in the commit's message."""


def test_no_measure_is_worse_than_its_ratchet() -> None:
    """`python -m tools.measures --lists` says which modules and docstrings are counted."""
    house = House(ROOT)
    values = ratchets_of(house)
    worse = [
        f"{name}: {values[name]:g}, the ratchet is {held:g}"
        for name, held in HELD.items()
        if name in values and (values[name] < held if name.startswith(GROWS) else values[name] > held)
    ]
    assert not worse, "\n".join(worse)
