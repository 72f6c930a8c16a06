"""The 95th percentile of all gaps equals that of sorting them, also for too many gaps to sort."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lockstep.release import gaps
from lockstep.release.evidence import GapSampling, gather
from lockstep.release.gaps import EVERYTHING
from lockstep.release.statistics import nearest_rank
from lockstep.release.store import open_store
from tests.release.inputs import Record, pair_file, read_into

SEED = 11


def sides(num_pairs: int, num_segments: int) -> tuple[list[Record], list[Record]]:
    """Gaps with a long tail and a different size in each segment; some answers have none, and some failed."""
    rng = np.random.default_rng(SEED)
    found: tuple[list[Record], list[Record]] = ([], [])
    for place in range(num_pairs):
        segment = int(rng.integers(num_segments))
        for side in found:
            values = (segment + 1) * rng.pareto(1.5, int(rng.integers(0, 40)))
            gap_list = [round(float(each), 2) for each in values]
            error = {"error": "boom"} if rng.random() < 0.05 else {}
            side.append({"request_id": f"r-{place}", "segment": f"s{segment}", "token_latencies_ms": gap_list, **error})
    return found


def expected(baseline: list[Record], candidate: list[Record]) -> dict[int, tuple[float, float]]:
    healthy = [
        pair
        for pair in zip(baseline, candidate, strict=True)
        if all("error" not in each and each["token_latencies_ms"] for each in pair)
    ]
    names = sorted({str(b["segment"]) for b, _ in healthy})

    def p95(side: int, segment: str | None) -> float:
        pooled = [
            each
            for pair in healthy
            if segment in (None, pair[0]["segment"])
            for each in pair[side]["token_latencies_ms"]
        ]
        return nearest_rank(np.array(pooled), 0.95)

    segments = {number: (p95(0, name), p95(1, name)) for number, name in enumerate(names)}
    return {**segments, EVERYTHING: (p95(0, None), p95(1, None))}


def found_in(path: Path, sampling: GapSampling | None = None) -> dict[int, tuple[float, float]]:
    with open_store() as store:
        read_into(store, [path])
        return dict(gather(store, sampling=sampling).decode_p95)


@pytest.mark.parametrize(
    ("most_sorted", "num_drawn"), [(10, 400), (300, 400), (3000, 400), (10**9, 400), (10**9, 30), (300, 30), (10**9, 1)]
)
def test_percentiles_are_exact_for_any_sample_of_gaps(tmp_path: Path, most_sorted: int, num_drawn: int) -> None:
    baseline, candidate = sides(400, 3)
    sampling = GapSampling(num_drawn, most_sorted)
    assert found_in(pair_file(tmp_path / "input.json", baseline, candidate), sampling) == expected(baseline, candidate)


def test_a_bracket_that_misses_is_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost no gaps are sampled, and the first brackets are minimal."""
    baseline, candidate = sides(400, 3)
    looks: list[float] = []

    def narrow(sample: NDArray[np.float64], near: float) -> gaps.Bracket:
        looks.append(near)
        return gaps.Bracket(-math.inf, math.inf) if near > 1 else gaps.Bracket(1.0, 1.0)

    monkeypatch.setattr(gaps, "_bracket", narrow)
    sampling = GapSampling(max_sorted=100)
    assert found_in(pair_file(tmp_path / "input.json", baseline, candidate), sampling) == expected(baseline, candidate)
    assert len(set(looks)) > 2


def test_pairs_without_gaps_have_no_percentile(tmp_path: Path) -> None:
    records = [{"request_id": "a", "latency_ms": 1.0}]
    assert found_in(pair_file(tmp_path / "input.json", records, records)) == {}


def test_one_side_without_gaps_has_none(tmp_path: Path) -> None:
    path = pair_file(
        tmp_path / "input.json", [{"request_id": "a", "token_latencies_ms": [1.0, 2.0]}], [{"request_id": "a"}]
    )
    found = found_in(path)
    assert found.keys() == {0, EVERYTHING}
    for baseline, candidate in found.values():
        assert baseline == 2.0
        assert math.isnan(candidate)
