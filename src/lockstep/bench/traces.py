"""Timed traces as samples: Mooncake's JSONL and Azure's CSV, read as they are published.

Mooncake (FAST '25): ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}``, one hash per 512 tokens of the
prompt; equal hashes are equal blocks with equal past. Azure (Splitwise, ISCA '24):
``TIMESTAMP,ContextTokens,GeneratedTokens``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import chain, pairwise

import numpy as np

from lockstep.bench.samples import Sample, Segment, json_object
from lockstep.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MICROSECOND_DIGITS = 6


def trace_samples(lines: Iterable[str], name: str, limit: int) -> tuple[Sample, ...]:
    """The first ``limit`` requests of a trace; times count from the first one.

    Raises:
        UsageError: neither of the two formats, or times that run backwards; the message names the line.
    """
    rows = iter(lines)
    first = next(rows, "").lstrip("\ufeff")
    if first.lstrip().startswith("{"):
        samples = _taken(_mooncake(chain([first], rows), name), limit)
    elif tuple(next(csv.reader([first]), [])) == AZURE_COLUMNS:
        samples = _taken(_azure(rows, name), limit)
    else:
        raise UsageError(
            f"{name} is no trace: its first line is neither a JSON object (Mooncake) "
            f"nor {','.join(AZURE_COLUMNS)} (Azure)"
        )
    if not samples:
        raise UsageError(f"{name} holds no request")
    return tuple(samples)


def faster(samples: tuple[Sample, ...], speed: float) -> tuple[Sample, ...]:
    """The same requests with all gaps divided by ``speed``."""
    return tuple(replace(sample, at_s=(sample.at_s or 0.0) / speed) for sample in samples)


def spread(samples: tuple[Sample, ...], seed: int) -> tuple[Sample, ...]:
    """Requests that share a timestamp, apart: uniform between it and the next one, in their order.

    A trace whose clock ticks in seconds would otherwise send bursts that never happened.
    """
    times = [sample.at_s or 0.0 for sample in samples]
    stamps = sorted(set(times))
    last_gap_s = stamps[-1] - stamps[-2] if len(stamps) > 1 else 0.0
    gap_s = dict(zip(stamps, [b - a for a, b in pairwise(stamps)] + [last_gap_s], strict=True))
    offsets = np.random.default_rng([seed, 2]).random(len(times))
    moved = sorted(time + gap_s[time] * float(offset) for time, offset in zip(times, offsets, strict=True))
    return tuple(replace(sample, at_s=at_s - moved[0]) for sample, at_s in zip(samples, moved, strict=True))


def _taken(rows: Iterator[tuple[str, Sample]], limit: int) -> list[Sample]:
    samples: list[Sample] = []
    origin_s = 0.0
    for place, sample in rows:
        if len(samples) >= limit:
            break
        at_s = sample.at_s or 0.0
        if not samples:
            origin_s = at_s
        elif at_s - origin_s < (samples[-1].at_s or 0.0):
            raise UsageError(f"{place}: its time is before that of the line above; sort the trace by time")
        samples.append(replace(sample, at_s=at_s - origin_s))
    return samples


def _mooncake(lines: Iterable[str], name: str) -> Iterator[tuple[str, Sample]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        fields = json_object(line, place)
        try:
            num_input, num_output = int(fields["input_length"]), int(fields["output_length"])
            at_s, hashes = float(fields["timestamp"]) / 1e3, [int(hash_id) for hash_id in fields.get("hash_ids", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{place}: timestamp, input_length, output_length and hash_ids expected ({error!r})"
            ) from None
        yield place, Sample(_blocks(num_input, hashes, number, place), max(1, num_output), at_s)


def _blocks(num_input: int, hashes: list[int], number: int, place: str) -> tuple[Segment, ...]:
    if num_input < 1:
        raise UsageError(f"{place}: input_length is {num_input}; it must be at least 1")
    if not hashes:
        return (Segment((1, number), num_input),)
    if len(hashes) != -(-num_input // MOONCAKE_BLOCK_TOKENS):
        raise UsageError(
            f"{place}: {len(hashes)} hash_ids for {num_input} tokens; one per {MOONCAKE_BLOCK_TOKENS} tokens expected"
        )
    sizes = [MOONCAKE_BLOCK_TOKENS] * (len(hashes) - 1)
    sizes.append(num_input - sum(sizes))
    return tuple(Segment((2, hash_id), size) for hash_id, size in zip(hashes, sizes, strict=True))


def _azure(lines: Iterable[str], name: str) -> Iterator[tuple[str, Sample]]:
    for number, row in enumerate(csv.reader(lines), 2):
        if not row:
            continue
        place = f"{name}:{number}"
        try:
            stamp, num_input, num_output = row
            whole, _, fraction = stamp.partition(".")
            # The published files have seven digits of a second, one more than datetime takes.
            at_s = datetime.fromisoformat(whole + "+00:00").timestamp() + float(
                f"0.{fraction[:_MICROSECOND_DIGITS] or 0}"
            )
            sample = Sample((Segment((1, number), max(1, int(num_input))),), max(1, int(num_output)), at_s)
        except ValueError as error:
            raise UsageError(f"{place}: {','.join(AZURE_COLUMNS)} expected ({error})") from None
        yield place, sample
