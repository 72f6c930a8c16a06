"""Cost models on disk and in words: prices, their errors, and the recording of their measurement."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.errors import UsageError
from lockstep.replay.cost import CostModel, Ranges
from lockstep.replay.workload import PS_PER_MS
from lockstep.report.document import Document, Number, Section, Style, Table, Tables, numbers, words

KIND = "lockstep-cost"
VERSION = 1
"""Version of the file's form; newer ones are refused."""
MAX_BYTES = 1 << 20
"""A cost model has a few kilobytes; what is larger is something else."""
MAX_TICK_MS = 1e9
"""Eleven days a step."""
MAX_PRICE_PS = 10**18
"""Likewise for one token: what is above is no measurement."""
_PS_PER_US = 1e6
_LABELS = {
    "constant_ps": "each step",
    "prefill_step_ps": "each step with prompt tokens",
    "prefill_token_ps": "each prompt token",
    "decode_seq_ps": "each decoding sequence",
    "context_token_ps": "each context token",
}


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
    """Quality on steps that neither fit nor interval has seen."""

    steps: int
    coverage: float
    """Share within the interval."""
    total_error: float
    """Predicted time of all of them by the measured one, less one."""


class MadeOn(msgspec.Struct, frozen=True):
    """Origin of the prices: model, machine and config of the recording."""

    lockstep: str
    machine: str
    model: str
    fingerprint: str
    config: dict[str, Any]
    """Of the scheduler, where it differs from its defaults."""
    environment: dict[str, str] = {}
    """Of the executor: threads, precisions and the like."""


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. Prices are picoseconds, as in ``CostModel``."""

    kind: str = KIND
    version: int = VERSION
    constant_ps: int
    prefill_token_ps: int
    decode_seq_ps: int
    context_token_ps: int
    prefill_step_ps: int
    interval: Interval
    residuals: Residuals
    held_out: HeldOut
    ranges: dict[str, tuple[int, int]]
    """Least and greatest value of each feature that was seen; beyond them the model extrapolates."""
    made_on: MadeOn
    notes: tuple[str, ...] = ()

    def model(self) -> CostModel:
        """The prices."""
        return CostModel(**{field.name: getattr(self, field.name) for field in fields(CostModel)})


class _Prices(msgspec.Struct):
    """Fields that a reader needs; a file written by hand may have no more than the prices."""

    constant_ps: int
    prefill_token_ps: int
    decode_seq_ps: int
    context_token_ps: int
    prefill_step_ps: int = 0
    ranges: dict[str, tuple[int, int]] = {}
    kind: str = KIND
    version: int = VERSION


class Priced(NamedTuple):
    """Prices of a replay, and where they were measured."""

    model: CostModel
    ranges: Ranges
    """Ranges that the measurement covered; empty: unknown."""


def to_bytes(file: CostFile) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def read_priced(path: str | Path) -> Priced:
    """The prices of a file and the ranges of their measurement; its other fields are for human readers.

    Raises:
        UsageError: it cannot be read, is no cost model, of a newer version, or has a price that cannot be.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: the cost model cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is over {MAX_BYTES >> 20} MiB; that is no cost model")
    try:
        prices = msgspec.json.decode(data, type=_Prices)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no cost model: {error}; `lockstep calibrate` writes them") from None
    if prices.kind != KIND:
        raise UsageError(f"{path} is no cost model: its kind is {prices.kind!r}, not {KIND!r}")
    if prices.version > VERSION:
        raise UsageError(f"{path} has version {prices.version}; this Lockstep reads up to {VERSION}")
    values = {field.name: getattr(prices, field.name) for field in fields(CostModel)}
    for name, price in values.items():
        if price < 0:
            raise UsageError(f"{path}: {name} is {price}; no step takes negative time")
        if price > MAX_PRICE_PS:
            raise UsageError(f"{path}: {name} is {price}; the maximum is {MAX_PRICE_PS}")
    return Priced(CostModel(**values), prices.ranges)


def constant_cost(tick_ms: float) -> CostModel:
    """Every step takes ``tick_ms``.

    Raises:
        UsageError: that is no time.
    """
    if not 0 <= tick_ms <= MAX_TICK_MS or math.isnan(tick_ms):
        raise UsageError(f"a step of {tick_ms} ms cannot be; write milliseconds from 0 to {MAX_TICK_MS:,.0f}")
    return CostModel(constant_ps=round(tick_ms * PS_PER_MS))


def cost_document(file: CostFile) -> Document:
    """Prices, and how well they hold, for people."""
    prices = Table("Prices", (*words("price"), *numbers("microseconds")))
    prices.rows += [(label, Number(getattr(file, name) / _PS_PER_US, Style.SHORT)) for name, label in _LABELS.items()]
    residuals, interval, held_out = file.residuals, file.interval, file.held_out
    trust = Table("Trust", (*words("measured against predicted"), *numbers("value")))
    trust.rows += [
        ("steps of the fit", Number(residuals.steps)),
        ("residual: median", f"{residuals.median:+.2%}"),
        ("residual: 5 % to 95 %", f"{residuals.p5:+.2%} to {residuals.p95:+.2%}"),
        ("residual: mean of absolute", f"{residuals.mean_absolute:.2%}"),
        ("variance explained", f"{residuals.r_squared:.2%}"),
        (f"{interval.level:.0%} interval of a step", f"{interval.low:.3f} to {interval.high:.3f} times"),
        ("steps held out", Number(held_out.steps)),
        ("of them within the interval", f"{held_out.coverage:.2%}"),
        ("error of their total time", f"{held_out.total_error:+.2%}"),
    ]
    title = f"What a step costs: {file.made_on.model} on {file.made_on.machine}"
    return Document(title, [Section("", (Tables([prices, trust]),))], notes=file.notes)
