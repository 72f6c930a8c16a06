"""Engines on the stub model: real loop, real scheduler, no weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions

MakeEngine = Callable[..., Engine]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_engine(clock: ManualClock) -> MakeEngine:
    """`make_engine("stub://name?option=value", num_blocks=…, max_num_seqs=…)`."""

    def make(source: str = "stub://alpha", clock: ManualClock = clock, **options: object) -> Engine:
        engine_options = EngineOptions(**{"num_blocks": 512, **options})  # type: ignore[arg-type]  # fields by name
        model, config = load_model(source, LoadOptions(engine=engine_options))
        return Engine(model, config, clock=clock)

    return make
