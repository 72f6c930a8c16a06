"""Inputs of the gate for tests: writes files of observations and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.release.evidence import Evidence, gather
from lockstep.release.gate import judge
from lockstep.release.observation import NAMES, SIDES, Side
from lockstep.release.policy import Layer, policy_of
from lockstep.release.reading import Source, read
from lockstep.release.store import Store, open_store
from lockstep.release.verdict import Verdict

DATA = Path(__file__).parent / "data"
Record = Mapping[str, Any]


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, records: Iterable[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_into(store: Store, paths: Sequence[Path]) -> list[Source]:
    """Read one file with both sides, or two files."""
    if len(paths) == 1:
        return [read(store, paths[0], None)[0]]
    return [read(store, path, side)[0] for path, side in zip(paths, SIDES, strict=True)]


def observations(path: Path, side: Side | None = "baseline", *, of: Side = "baseline") -> list[dict[str, Any]]:
    """Observations of a file in the order of time and id, without unknown fields."""
    listed = ", ".join(f'"{name}"' for name in NAMES)
    with open_store() as store:
        read(store, path, side)
        rows = store.rows(f'SELECT {listed} FROM {of} ORDER BY ts, request_id, engine_id, "index", latency_ms')
    return [{name: value for name, value in zip(NAMES, row, strict=True) if value is not None} for row in rows]


def evidence_of(store: Store, *paths: Path) -> Evidence:
    """Evidence of one file with both sides, or of two files; it is valid as long as the store."""
    read_into(store, paths)
    return gather(store)


def verdict_of(*paths: Path, **settings: Any) -> Verdict:
    """Verdict on one file with both sides, or on two files."""
    with open_store() as store:
        sources = read_into(store, paths)
        policy = policy_of(Layer("test", {"min_pairs": 1, **settings}))
        return judge(policy, gather(store, policy), tuple(sources))


def pair_file(path: Path, baseline: Sequence[Any], candidate: Sequence[Any]) -> Path:
    """Document with both sides."""
    return write_json(path, {"baseline": list(baseline), "candidate": list(candidate)})
