"""Observations as files, and verdicts on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli.gate import PolicyFlags, judge_files
from lockstep.release.verdict import Signal, Verdict

Row = Mapping[str, Any]


def rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Observations of requests r0, r1, ..., a tenth of a second apart, with the same fields.

    Args:
        fields: a function is called with the number of the request.
    """
    found = []
    for number in range(count):
        values = {name: value(number) if callable(value) else value for name, value in fields.items()}
        found.append({"request_id": f"r{number}", "ts": number / 10, "latency_ms": 100.0, **values})
    return found


def with_tokens(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Observations with the same answers on every side."""
    return rows(count, **{"token_ids": lambda number: [number, 1, 2], **fields})


def written(path: Path, observations: Iterable[Row]) -> Path:
    """A file of lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in observations))
    return path


def judged(
    folder: Path,
    baseline: Sequence[Row],
    candidate: Sequence[Row],
    second: Sequence[Row] | None = None,
    *,
    policy: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Verdict:
    """The verdict on both sides, by a policy of these fields."""
    paths = [written(folder / f"{name}.jsonl", each) for name, each in (("b", baseline), ("c", candidate))]
    rules = folder / "policy.json"
    rules.write_text(json.dumps({**(policy or {}), **fields}))
    beside = written(folder / "a.jsonl", second) if second is not None else None
    return judge_files(paths, PolicyFlags(rules), beside).verdict


def named(verdict: Verdict) -> dict[str, str]:
    """Responses by signal, of all pairs."""
    return {each.name: each.response.value for each in verdict.signals if each.segment == "all"}


def signal(verdict: Verdict, name: str, segment: str = "all") -> Signal:
    """The signal of that name."""
    [found] = [each for each in verdict.signals if (each.name, each.segment) == (name, segment)]
    return found
