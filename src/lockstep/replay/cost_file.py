"""Cost models on disk: defines the file of prices, their errors and their origin, and formats it for people."""

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
"""Version of the file's form; newer versions are refused."""
MAX_BYTES = 1 << 20
"""Maximum size of a file; a cost model has a few kilobytes."""
MAX_TICK_MS = 1e9
"""Maximum duration of a step: eleven days."""
MAX_PRICE_PS = 10**18
"""Maximum price of one token."""
_PS_PER_US = 1e6
_LABELS = {
    "constant_ps": "each step",
    "prefill_step_ps": "each step with prompt tokens",
    "prefill_token_ps": "each prompt token",
    "decode_seq_ps": "each decoding sequence",
    "context_token_ps": "each context token",
}


class Interval(msgspec.Struct, frozen=True):
    """Prediction interval of one step: ``low`` to ``high`` times its prediction."""

    level: float
    """Share of steps that the interval should contain."""
    low: float
    high: float
    steps: int
    """Number of residuals that it was computed from; none of these steps was part of the fit."""
    method: str


class Residuals(msgspec.Struct, frozen=True):
    """Relative residuals (measured / predicted - 1) of the steps of the fit."""

    steps: int
    median: float
    p5: float
    p95: float
    mean_absolute: float
    r_squared: float
    """Share of the variance of step times that the model explains."""


class HeldOut(msgspec.Struct, frozen=True):
    """Quality on steps that were used neither for the fit nor for the interval."""

    steps: int
    coverage: float
    """Share of these steps within the interval."""
    total_error: float
    """Error of their total predicted time (predicted / measured - 1)."""


class MadeOn(msgspec.Struct, frozen=True):
    """Origin of the prices: model, machine and config of the recording."""

    lockstep: str
    machine: str
    model: str
    fingerprint: str
    config: dict[str, Any]
    """Scheduler fields that differ from their defaults."""
    environment: dict[str, str] = {}
    """Compute environment of the executor: threads, precisions and the like."""


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a cost file. Prices are in picoseconds, as in ``CostModel``."""

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
    """Measured minimum and maximum of each feature; outside of them the model extrapolates."""
    made_on: MadeOn
    notes: tuple[str, ...] = ()

    def model(self) -> CostModel:
        """Prices as a cost model."""
        return CostModel(**{field.name: getattr(self, field.name) for field in fields(CostModel)})


class _Prices(msgspec.Struct):
    """Fields that replays need; a file written by hand may have only the prices."""

    constant_ps: int
    prefill_token_ps: int
    decode_seq_ps: int
    context_token_ps: int
    prefill_step_ps: int = 0
    ranges: dict[str, tuple[int, int]] = {}
    kind: str = KIND
    version: int = VERSION


class Priced(NamedTuple):
    """Prices of a replay, and the measured ranges."""

    model: CostModel
    ranges: Ranges
    """Measured ranges; empty: unknown."""


def to_bytes(file: CostFile) -> bytes:
    """Indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def read_priced(path: str | Path) -> Priced:
    """Read the prices of a file and their measured ranges; the other fields are for people.

    Raises:
        UsageError: the file cannot be read, is not a cost model, is of a newer version, or has an invalid price.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the cost model: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB, so it is not a cost model")
    try:
        prices = msgspec.json.decode(data, type=_Prices)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a cost model: {error}; write one with `lockstep calibrate`") from None
    if prices.kind != KIND:
        raise UsageError(f"{path} is not a cost model: its kind is {prices.kind!r}, not {KIND!r}")
    if prices.version > VERSION:
        raise UsageError(f"{path} has version {prices.version}; this Lockstep reads versions up to {VERSION}")
    values = {field.name: getattr(prices, field.name) for field in fields(CostModel)}
    for name, price in values.items():
        if price < 0:
            raise UsageError(f"{path}: {name} is {price}; it must be at least 0")
        if price > MAX_PRICE_PS:
            raise UsageError(f"{path}: {name} is {price}; the maximum is {MAX_PRICE_PS}")
    return Priced(CostModel(**values), prices.ranges)


def constant_cost(tick_ms: float) -> CostModel:
    """Cost model in which every step takes ``tick_ms``.

    Raises:
        UsageError: ``tick_ms`` is out of range.
    """
    if not 0 <= tick_ms <= MAX_TICK_MS or math.isnan(tick_ms):
        raise UsageError(f"a step cannot take {tick_ms} ms; give milliseconds from 0 to {MAX_TICK_MS:,.0f}")
    return CostModel(constant_ps=round(tick_ms * PS_PER_MS))


def cost_document(file: CostFile) -> Document:
    """Document with the prices and their errors, for people."""
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
    title = f"Step prices: {file.made_on.model} on {file.made_on.machine}"
    return Document(title, [Section("", (Tables([prices, trust]),))], notes=file.notes)
