"""Whether a replay asks a cost model for prices of what nobody measured."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.replay.timeline import Tick

Ranges = Mapping[str, tuple[int, int]]
"""Least and greatest value of each feature that a calibration saw; its names are those of a cost file."""
FEATURES = ("prefill tokens", "decoding sequences", "context tokens")


class Extrapolation:
    """A watcher that keeps how much the largest steps compute, of each feature."""

    def __init__(self, ranges: Ranges) -> None:
        self._limits = tuple(ranges[name][1] if name in ranges else None for name in FEATURES)
        self._most = [0, 0, 0]
        self._num_steps = 0
        self._num_beyond = 0

    def __call__(self, tick: Tick) -> None:
        """Take in what the replay did next."""
        plan = tick.plan
        if plan is None:
            return
        num_tokens, num_more = sum(plan.lengths), tick.num_ticks - 1
        context = sum(plan.starts) + num_tokens + num_more * len(plan.seq_ids)
        values = tick.num_prefill_tokens, num_tokens - tick.num_prefill_tokens, context
        self._num_steps += tick.num_ticks
        is_beyond = False
        for index, value in enumerate(values):
            self._most[index] = max(self._most[index], value)
            limit = self._limits[index]
            is_beyond = is_beyond or (limit is not None and value > limit)
        self._num_beyond += tick.num_ticks if is_beyond else 0

    def note(self) -> str:
        """What a reader of the times must know; empty: every step is of a size that was measured."""
        beyond = [
            f"up to {most:,} {name} (measured: {limit:,})"
            for name, most, limit in zip(FEATURES, self._most, self._limits, strict=True)
            if limit is not None and most > limit
        ]
        if not beyond:
            return ""
        share = self._num_beyond / self._num_steps
        return f"times are extrapolated for {share:.1%} of the steps, which compute {', '.join(beyond)}"
