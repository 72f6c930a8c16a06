"""Pairs of answers: one request as a baseline and a candidate answered it, as lines that `lockstep gate` reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.bench.client import Outcome
from lockstep.bench.runner import Job


@dataclass(frozen=True, slots=True)
class Pair:
    """Both answers; None: interrupted before its end."""

    index: int
    """Of the request in the data set."""
    baseline: Outcome | None
    candidate: Outcome | None


def request_id(seed: int, index: int) -> str:
    """The id that a request has on both servers, in their logs and recordings."""
    return f"bench-{seed}-{index}"


def pairs_of(jobs: Sequence[Job], outcomes: Sequence[Outcome | None]) -> list[Pair]:
    """Outcomes of a run whose jobs come in twos, in either order."""
    pairs = []
    for index in range(len(jobs) // 2):
        both = {jobs[at].target: outcomes[at] for at in (2 * index, 2 * index + 1)}
        pairs.append(Pair(index, both[0], both[1]))
    return pairs


def lines_of(pairs: Iterable[Pair], seed: int, model: str) -> bytes:
    """Pairs as JSON lines; those that neither server answered to the end are left out."""
    encode = msgspec.json.encode
    lines = []
    for pair in pairs:
        sides = {"baseline": pair.baseline, "candidate": pair.candidate}
        known = {side: _observation(outcome) for side, outcome in sides.items() if outcome is not None}
        if known:
            line = {"request_id": request_id(seed, pair.index), "index": pair.index, "model": model, **known}
            lines.append(encode(line) + b"\n")
    return b"".join(lines)


def _observation(outcome: Outcome) -> dict[str, Any]:
    """One answer in the fields of an observation; times in milliseconds, but for its start."""
    if not outcome.is_success:
        return {"ts": outcome.start_s, "ok": False, "error": outcome.error}
    return {
        "ts": outcome.start_s,
        "ok": True,
        "latency_ms": outcome.e2el_s * 1e3,
        "ttft_ms": outcome.ttft_s * 1e3,
        "token_latencies_ms": [gap_s * 1e3 for gap_s in outcome.itl_s],
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "text": outcome.text,
    }
