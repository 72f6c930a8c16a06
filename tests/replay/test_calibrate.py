"""Cost models from steps: calibration recovers known prices despite outliers and faults."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError, TraceError, UsageError
from lockstep.replay.calibrate import MIN_STEPS, calibrate, non_negative
from lockstep.replay.cost import CostModel
from lockstep.replay.cost_file import CostFile, MadeOn, cost_document, read_priced, to_bytes
from lockstep.replay.live import LiveStep
from lockstep.report.document import Number, Tables, cell_text

MADE_ON = MadeOn("0.1.0", "a machine", "pocket", "f" * 16, {"max_num_seqs": 8})
PRICES = b'{"constant_ps": 1, "prefill_token_ps": 1, "decode_seq_ps": 1, "context_token_ps": %b}'
TRUTH_US = (900.0, 12.0, 70.0, 0.03, 400.0)


def synthetic(
    num_steps: int, *, noise: float = 0.0, stalls: float = 0.0, seed: int = 7, truth: Sequence[float] = TRUTH_US
) -> list[LiveStep]:
    """Steps under varying load; a quarter of the time is gaps, every twentieth step follows an idle time."""
    random = np.random.default_rng(seed)
    steps = []
    for number in range(num_steps):
        num_prefill = int(random.integers(0, 300)) if random.random() < 0.3 else 0
        num_decode = int(random.integers(0 if num_prefill else 1, 32))
        context = num_prefill + int(random.integers(20, 400)) * num_decode
        price = truth[0] + truth[1] * num_prefill + truth[2] * num_decode + truth[3] * context
        price += truth[4] if num_prefill else 0.0
        price *= float(np.exp(noise * random.standard_normal()))
        price *= 40 if random.random() < stalls else 1
        is_after_idle = number % 20 == 0
        gap = 10**7 if is_after_idle else round(price / 4)
        duration = round(price * 3 / 4)
        steps.append(LiveStep(0, number, 0, duration, gap, is_after_idle, num_prefill, num_decode, context))
    return steps


def prices_us(file: CostFile) -> tuple[float, ...]:
    return tuple(getattr(file, field.name) / 1e6 for field in fields(CostModel))


def test_exact_steps_return_their_prices() -> None:
    file = calibrate(synthetic(2000), MADE_ON)
    assert prices_us(file) == pytest.approx(TRUTH_US, rel=0.01)
    assert file.residuals.r_squared > 0.9999
    assert abs(file.held_out.total_error) < 0.001


def test_noise_and_stalls_do_not_change_the_prices() -> None:
    file = calibrate(synthetic(20_000, noise=0.1, stalls=0.01), MADE_ON)
    assert prices_us(file)[:3] == pytest.approx(TRUTH_US[:3], rel=0.12)


def test_the_interval_has_its_stated_coverage() -> None:
    file = calibrate(synthetic(20_000, noise=0.2), MADE_ON)
    assert file.interval.low < 1 < file.interval.high
    assert file.interval.level == 0.9
    assert file.held_out.coverage == pytest.approx(0.9, abs=0.02)


def test_the_level_is_that_of_the_mean() -> None:
    """With skewed noise the median step is cheaper than the mean one, and totals follow the mean."""
    steps = synthetic(20_000, noise=0.5)
    assert abs(calibrate(steps, MADE_ON).held_out.total_error) < 0.03


def test_the_same_steps_give_the_same_bytes() -> None:
    assert to_bytes(calibrate(synthetic(500, noise=0.1), MADE_ON)) == to_bytes(
        calibrate(synthetic(500, noise=0.1), MADE_ON)
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], f"the recording has 0 steps; a cost model needs at least {MIN_STEPS}"),
        (synthetic(MIN_STEPS - 1), "a cost model needs at least"),
        (
            [step._replace(num_prefill_tokens=0, num_decode_seqs=1) for step in synthetic(100)],
            "no step computed prompt",
        ),
        ([step._replace(num_decode_seqs=0, num_prefill_tokens=5) for step in synthetic(100)], "no step decoded"),
        ([step._replace(duration_us=0) for step in synthetic(100)], "no durations"),
    ],
    ids=["none", "few", "no prompts", "no decodes", "no times"],
)
def test_insufficient_recordings_are_refused(steps: list[LiveStep], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        calibrate(steps, MADE_ON)


def test_features_that_cannot_be_separated_are_reported() -> None:
    steps = [
        step._replace(num_context_tokens=step.num_prefill_tokens + 7 * step.num_decode_seqs) for step in synthetic(300)
    ]
    file = calibrate(steps, MADE_ON)
    assert any("context tokens depend on the other features" in note for note in file.notes)
    assert min(prices_us(file)) >= 0
    assert abs(file.held_out.total_error) < 0.05, "the sum is known, whatever the shares"


def test_few_residuals_lower_the_level_of_the_interval() -> None:
    file = calibrate(synthetic(MIN_STEPS, noise=0.1), MADE_ON)
    assert file.interval.steps == 10
    assert file.interval.level == pytest.approx(9 / 11, abs=1e-6)
    assert any("too few for an interval above 82%" in note for note in file.notes)


def test_gaps_after_idle_time_have_no_price() -> None:
    steps = [step._replace(is_after_idle=True, gap_us=10**6) for step in synthetic(300)]
    file = calibrate(steps, MADE_ON)
    assert prices_us(file)[0] == pytest.approx(TRUTH_US[0] * 3 / 4, rel=0.02)
    assert any("the gaps between steps have no price" in note for note in file.notes)


def test_a_file_is_read_as_the_model_that_replays_use(tmp_path: Path) -> None:
    file = calibrate(synthetic(500), MADE_ON)
    path = tmp_path / "cost.json"
    path.write_bytes(to_bytes(file))
    assert read_priced(path).model == CostModel(
        file.constant_ps, file.prefill_token_ps, file.decode_seq_ps, file.context_token_ps, file.prefill_step_ps
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a cost model"),
        (b"\xff\x00", "is not a cost model"),
        (b"[]", "is not a cost model"),
        (b"[" * 100_000, "is not a cost model"),
        (b'{"requests": []}', "missing required field `constant_ps`"),
        (PRICES % b'1, "kind": "report"', "its kind is 'report', not 'lockstep-cost'"),
        (PRICES % b'1, "version": 2', "has version 2; this Lockstep reads versions up to 1"),
        (PRICES % b"NaN", "is not a cost model"),
        (PRICES % b"1.5", "is not a cost model"),
        (PRICES % b"-1", "context_token_ps is -1; it must be at least 0"),
        (PRICES % str(10**18 + 1).encode(), "the maximum is 1000000000000000000"),
        (b" " * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_priced(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="cannot read the cost model: No such file"):
        read_priced(tmp_path / "absent.json")


def test_the_tables_say_prices_and_trust() -> None:
    [section] = cost_document(calibrate(synthetic(1000), MADE_ON)).sections
    [block] = section.blocks
    assert isinstance(block, Tables)
    prices, trust = block.tables
    assert list(map(cell_text, prices.rows[0])) == ["each step", "900"]
    assert ("steps held out", Number(200)) in trust.rows


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_no_non_negative_point_beats_the_solution(seed: int, num_features: int) -> None:
    random = np.random.default_rng(seed)
    features = random.normal(size=(20, num_features))
    values = random.normal(size=20)
    weights = random.uniform(0.1, 2.0, size=20)

    def loss(point: np.ndarray) -> float:
        return float((weights * (values - features @ point) ** 2).sum())

    best = non_negative(features, values, weights)
    assert (best >= 0).all()
    grid = itertools.product((-0.05, 0.0, 0.05), repeat=num_features)
    assert all(loss(best) <= loss(np.maximum(best + np.array(step), 0.0)) + 1e-9 for step in grid)
