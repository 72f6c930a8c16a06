"""Observations as files, and verdicts on them."""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.release.evidence import Evidence, gather
from lockstep.release.gate import SecondBaseline, judge
from lockstep.release.observation import SIDES
from lockstep.release.policy import Layer, Policy, policy_of
from lockstep.release.reading import Source, read
from lockstep.release.store import open_store
from lockstep.release.verdict import Signal, Verdict

Row = Mapping[str, Any]


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Observations of requests r0, r1, ..., a tenth of a second apart, with equal fields.

    Args:
        fields: a function is called with the number of the request.
    """
    found = []
    for number in range(count):
        values = {name: value(number) if callable(value) else value for name, value in fields.items()}
        found.append({"request_id": f"r{number}", "ts": number / 10, "latency_ms": 100.0, **values})
    return found


def with_tokens(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Observations with equal answers on all sides."""
    return rows(count, **{"token_ids": lambda number: [number, 1, 2], **fields})


def written(path: Path, observations: Iterable[Row]) -> Path:
    """Write a file of lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in observations))
    return path


def pair_line(index: int, *, differs: bool = False) -> str:
    """Line of a pair; the candidate's answer differs if requested."""
    sides = {
        side: {
            "ts": float(index),
            "latency_ms": 10.0 + index % 3,
            "token_ids": [index, int(differs and side != "baseline")],
        }
        for side in ("baseline", "candidate")
    }
    return json.dumps({"request_id": f"r{index}", **sides}) + "\n"


class _Last:
    """Cache of the last evidence: many tests judge the same evidence by several policies, and gathering is slow."""

    def __init__(self) -> None:
        self._key = ""
        self._stores = ExitStack()
        self._legs: list[tuple[Evidence, tuple[Source, ...]]] = []
        atexit.register(self._stores.close)

    def legs(self, folder: Path, sides: Sequence[Sequence[Row]], policy: Policy) -> list[tuple[Evidence, Any]]:
        """Evidence on the first side against each of the others."""
        key = json.dumps([sides, policy.agreement_field, repr(policy.numeric_tolerances)])
        if key != self._key:
            self._stores.close()
            self._legs = [self._gathered(folder, (sides[0], other), policy) for other in sides[1:]]
            self._key = key
        return self._legs

    def _gathered(self, folder: Path, sides: Sequence[Sequence[Row]], policy: Policy) -> tuple[Evidence, Any]:
        store = self._stores.enter_context(open_store())
        sources = []
        for side, observations in zip(SIDES, sides, strict=True):
            sources.append(read(store, written(folder / f"{side}.jsonl", observations), side)[0])
        return gather(store, policy), tuple(sources)


_LAST = _Last()


def judged(
    folder: Path,
    baseline: Sequence[Row],
    candidate: Sequence[Row],
    second: Sequence[Row] | None = None,
    *,
    policy: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Verdict:
    """Verdict on both sides, by a policy with these fields."""
    rules = policy_of(Layer("test", {**(policy or {}), **fields}))
    (evidence, sources), *beside = _LAST.legs(folder, [baseline, candidate, *([second] if second else [])], rules)
    leg = SecondBaseline(beside[0][0], beside[0][1][1]) if beside else None
    return judge(rules, evidence, sources, leg)


def named(verdict: Verdict) -> dict[str, str]:
    """Signals of all pairs, by name."""
    return {each.name: each.response.value for each in verdict.signals if each.segment == "all"}


def signal(verdict: Verdict, name: str, segment: str = "all") -> Signal:
    """Signal with that name."""
    [found] = [each for each in verdict.signals if (each.name, each.segment) == (name, segment)]
    return found


def states(verdict: Verdict) -> dict[str, str]:
    """States of series of all pairs, by name."""
    return {each.signal: each.state for each in verdict.series if each.segment == "all"}
