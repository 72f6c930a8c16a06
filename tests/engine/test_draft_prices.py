"""Prices of rows are measured before the first request and change nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.core.groups import KVGroup
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.draft_counts import FLAT_PRICES
from lockstep.engine.draft_prices import NUM_CONTEXT_TOKENS, NUM_ROWS, measured_prices, speculator_for
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.executors.base import Logits, StepBatch
from tests.engine.conftest import Pocket
from tests.engine.hybrid_engines import write_hybrid

SUFFIX = '{"method": "suffix"}'


class Timed:
    """An executor whose steps take a time by their number of rows and by their context, on its own clock."""

    def __init__(self, model: LoadedModel, context_us: int = 2) -> None:
        self._context_s = context_us / 1e6
        self._inner = model.executor
        self.geometry = model.executor.geometry
        self.environment, self.machine = model.executor.environment, model.executor.machine
        self.num_rows: list[int] = []
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def execute(self, batch: StepBatch) -> Logits:
        self.num_rows.append(batch.plan.num_tokens)
        noise_s = 0.001 * (len(self.num_rows) % 3)
        self.time_s += 0.01 + 0.002 * batch.plan.num_tokens + self._context_s * max(batch.plan.starts) + noise_s
        logits = self._inner.execute(batch)
        assert len(logits) == len(batch.rows)
        return logits

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None: ...
    def prompt_logits(self, first: int, last: int) -> Logits: ...  # type: ignore[empty-body]  # not called
    def read_blocks(self, blocks): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  # not called
    def write_blocks(self, blocks, content): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  # not called
    def close(self) -> None: ...


def test_prices_are_the_shortest_times_of_steps_with_these_numbers_of_rows(pocket: Pocket) -> None:
    model, config = pocket
    timed = Timed(model)
    prices = measured_prices(timed, config, timed.now_s)
    assert [price.num_rows for price in prices.steps] == [*NUM_ROWS]
    for rows, duration_us in prices.steps:
        assert 0 <= duration_us - (10_000 + 2_000 * rows + 2 * NUM_CONTEXT_TOKENS) < 2 * 40, "of a short context"


@pytest.mark.parametrize(
    ("context_us", "max_model_len", "expected_ns"), [(2, None, 2000), (100, None, 8000), (2, 100, 0)]
)
def test_the_price_of_a_context_is_measured_with_a_long_one(
    pocket: Pocket, context_us: int, max_model_len: int | None, expected_ns: int
) -> None:
    """If sequences may be long enough. A disturbance is no such price."""
    model, config = pocket
    timed = Timed(model, context_us)
    prices = measured_prices(timed, replace(config, max_model_len=max_model_len or config.max_model_len), timed.now_s)
    assert prices.context_ns == pytest.approx(expected_ns, rel=0.2)


def test_no_further_measurement_begins_after_the_maximum_time(pocket: Pocket) -> None:
    model, config = pocket
    timed = Timed(model)
    prices = measured_prices(timed, config, lambda: 60 * timed.time_s)
    assert len(timed.num_rows) == 1 + len(NUM_ROWS)
    assert (len(prices.steps), prices.context_ns) == (len(NUM_ROWS), 0)


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 79}, {"max_chunk_tokens": 6}, {"max_model_len": 40}])
def test_limits_of_a_step_and_of_a_sequence_limit_the_rows(pocket: Pocket, limits: dict[str, int]) -> None:
    model, config = pocket
    small: SchedulerConfig = replace(config, **limits)  # type: ignore[arg-type]  # fields by name
    timed = Timed(model)
    prices = measured_prices(timed, small, timed.now_s)
    assert prices.steps[0].num_rows == 1
    assert max(timed.num_rows[1:]) <= max(small.max_chunk_tokens, small.max_forced_tokens)
    assert len(prices.steps) >= (2 if "max_model_len" in limits else 5)


def test_a_stub_has_flat_prices_and_other_models_none_without_the_option(caplog: pytest.LogCaptureFixture) -> None:
    model, config = load_model("stub://alpha")
    caplog.set_level(logging.INFO)
    assert speculator_for(model, config, None) is None
    assert not caplog.records
    speculator = speculator_for(model, config, SUFFIX)
    assert speculator is not None
    assert caplog.records[-1].args == (model.name, "suffix", 16)
    assert speculator.prices == FLAT_PRICES
    groups = (KVGroup(), KVGroup(1, is_state=True, snapshot_interval=config.block_size))
    assert speculator_for(model, replace(config, groups=groups), SUFFIX) is None
    assert "speculative_config has no effect" in caplog.text


@pytest.mark.parametrize("num_blocks", [8, 40])
def test_a_model_with_windows_is_measured_with_as_many_positions_as_its_pool_holds(
    num_blocks: int, tmp_path: Path
) -> None:
    path = write_hybrid(tmp_path, "tiny-gemma4")
    options = LoadOptions(EngineOptions(num_blocks=num_blocks), cache_dir=tmp_path / "cache")
    model, config = load_model(str(path), options)
    assert len(config.groups) > 1
    assert measured_prices(model.executor, config).steps
    model.close()
