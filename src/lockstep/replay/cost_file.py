"""Cost models in files: a JSON object with the prices of ``CostModel``, and whatever else its writer adds."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel
from lockstep.replay.workload import PS_PER_MS

MAX_BYTES = 16 << 20
MAX_TICK_MS = 1e9
"""Eleven days a step."""


class _Prices(msgspec.Struct):
    """The prices must be there; other keys are the writer's business."""

    constant_ps: int
    prefill_token_ps: int
    decode_seq_ps: int
    context_token_ps: int


def read_cost(path: Path) -> CostModel:
    """The cost model in a file.

    Raises:
        UsageError: there is none, or a price is missing, no whole number or negative.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: the cost model cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is over {MAX_BYTES >> 20} MiB; that is no cost model")
    try:
        prices = msgspec.json.decode(data, type=_Prices)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is no cost model: {error}; `lockstep calibrate` writes them") from None
    values = msgspec.structs.asdict(prices)
    for name, price in values.items():
        if price < 0:
            raise UsageError(f"{path}: {name} is {price}; no step takes negative time")
    return CostModel(**values)


def constant_cost(tick_ms: float) -> CostModel:
    """Every step takes ``tick_ms``.

    Raises:
        UsageError: that is no time.
    """
    if not 0 <= tick_ms <= MAX_TICK_MS or math.isnan(tick_ms):
        raise UsageError(f"a step of {tick_ms} ms cannot be; write milliseconds from 0 to {MAX_TICK_MS:,.0f}")
    return CostModel(constant_ps=round(tick_ms * PS_PER_MS))
