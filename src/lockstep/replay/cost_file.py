"""A cost model on disk: prices, how far they can be trusted, and what they were measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel

KIND = "lockstep-cost"
VERSION = 1
"""Of the file's form; newer ones are refused."""
MAX_BYTES = 1 << 20
"""A cost model has a few kilobytes; what is larger is something else."""
MAX_PRICE_PS = 10**18
"""Eleven days for one token: what is above is no measurement."""


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Picoseconds, as in ``CostModel``."""

    constant_ps: int
    prefill_token_ps: int = 0
    decode_seq_ps: int = 0
    context_token_ps: int = 0


class Interval(msgspec.Struct, frozen=True):
    """Prediction interval of one step: from ``low`` to ``high`` times its prediction."""

    level: float
    """The share of steps that it is to contain."""
    low: float
    high: float
    steps: int
    """Residuals that it is the quantiles of; the fit has not seen them."""
    method: str


class Residuals(msgspec.Struct, frozen=True):
    """Measured by predicted, less one; of the steps that the fit was made on."""

    steps: int
    median: float
    p5: float
    p95: float
    mean_absolute: float
    r_squared: float
    """Share of the variance of step times that is explained."""


class HeldOut(msgspec.Struct, frozen=True):
    """How the model does on steps that neither fit nor interval has seen."""

    steps: int
    coverage: float
    """Share within the interval."""
    total_error: float
    """Predicted time of all of them by the measured one, less one."""


class MadeOn(msgspec.Struct, frozen=True):
    """Where the prices hold."""

    lockstep: str
    machine: str
    model: str
    fingerprint: str
    config: dict[str, Any]


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    kind: str
    version: int
    prices: Prices
    interval: Interval
    residuals: Residuals
    held_out: HeldOut
    ranges: dict[str, tuple[int, int]]
    """Least and greatest value of each feature that was seen; beyond them the model extrapolates."""
    made_on: MadeOn
    notes: tuple[str, ...] = ()


class _Head(msgspec.Struct):
    """What every version has, and what a file written by hand needs."""

    kind: str = ""
    version: int = 0
    prices: Prices | None = None


def to_bytes(file: CostFile) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def read_cost(path: str | Path) -> CostModel:
    """The prices of a file; one that says only ``kind``, ``version`` and ``prices`` will do.

    Raises:
        UsageError: it cannot be read, is no cost model, of a newer version, or has a price that cannot be.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; lockstep calibrate makes a cost model") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path} is no cost model: it is larger than {MAX_BYTES:,} bytes")
    try:
        head = msgspec.json.decode(content, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no cost model: {error}") from error
    if head.kind != KIND:
        raise UsageError(f"{path} is no cost model: its kind is {head.kind!r}, not {KIND!r}")
    if not 1 <= head.version <= VERSION:
        raise UsageError(f"{path} has version {head.version}; this Lockstep reads up to {VERSION}")
    if head.prices is None:
        raise UsageError(f"{path} has no prices")
    for name, price in msgspec.structs.asdict(head.prices).items():
        if not 0 <= price <= MAX_PRICE_PS:
            raise UsageError(f"{path}: {name} is {price}; it must be from 0 to {MAX_PRICE_PS}")
    cost = CostModel(**msgspec.structs.asdict(head.prices))
    if cost.constant_ps == 0 and cost.prefill_token_ps == 0 and cost.decode_seq_ps == 0:
        raise UsageError(f"{path}: steps cost nothing; one price at least must be above 0")
    return cost
