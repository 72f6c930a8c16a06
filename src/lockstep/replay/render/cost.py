"""A cost model in words: prices, residuals, the interval and what to beware of."""

from __future__ import annotations

from typing import TextIO

from lockstep.replay.cost_file import CostFile
from lockstep.replay.render.figures import printable, short_text
from lockstep.replay.render.tables import Table
from lockstep.replay.render.terminal import show

_PS_PER_US = 1e6
_LABELS = {
    "constant_ps": "each step",
    "prefill_step_ps": "each step with prompt tokens",
    "prefill_token_ps": "each prompt token",
    "decode_seq_ps": "each decoding sequence",
    "context_token_ps": "each context token",
}


def show_cost(file: CostFile, out: TextIO | None = None) -> None:
    """Write it where ``out`` (default: standard output) leads."""
    head = f"What a step costs: {printable(file.made_on.model)} on {printable(file.made_on.machine)}"
    show(head, cost_tables(file), file.notes, out)


def cost_tables(file: CostFile) -> list[Table]:
    """Prices, and how well they hold."""
    prices = Table("Prices", ("price", "microseconds"))
    for name, label in _LABELS.items():
        prices.rows.append((label, short_text(getattr(file, name) / _PS_PER_US)))
    residuals, interval, held_out = file.residuals, file.interval, file.held_out
    trust = Table("Trust", ("measured against predicted", "value"))
    trust.rows += [
        ("steps of the fit", f"{residuals.steps:,}"),
        ("residual: median", f"{residuals.median:+.2%}"),
        ("residual: 5 % to 95 %", f"{residuals.p5:+.2%} to {residuals.p95:+.2%}"),
        ("residual: mean of absolute", f"{residuals.mean_absolute:.2%}"),
        ("variance explained", f"{residuals.r_squared:.2%}"),
        (f"{interval.level:.0%} interval of a step", f"{interval.low:.3f} to {interval.high:.3f} times"),
        ("steps held out", f"{held_out.steps:,}"),
        ("of them within the interval", f"{held_out.coverage:.2%}"),
        ("error of their total time", f"{held_out.total_error:+.2%}"),
    ]
    return [prices, trust]
