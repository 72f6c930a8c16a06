"""Azure's LLM inference traces (Splitwise, ISCA '24): ``TIMESTAMP,ContextTokens,GeneratedTokens``.

A stamp is a date and a time with up to 12 digits of a second, with or without an offset from UTC. Nothing is said of
contents, so requests share nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from lockstep.errors import TraceError
from lockstep.replay.readers.fields import MAX_TOKENS, PS_PER_S, shown
from lockstep.replay.workload import WorkloadRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_COUNT = re.compile(r"\d{1,10}", re.ASCII)
_EPOCH = datetime.fromisoformat("0001-01-01T00:00:00+00:00")


def rows(lines: Iterable[tuple[int, str]], name: str) -> Iterator[WorkloadRequest]:
    """The requests of a trace; arrivals in picoseconds since the year 1."""
    has_header = False
    for number, line in lines:
        place = f"{name}:{number}"
        try:
            columns = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise TraceError(f"{place}: not CSV ({error})") from None
        if has_header:
            yield row(columns, number, place)
        elif tuple(columns) == COLUMNS:
            has_header = True
        else:
            raise TraceError(f"{place}: the columns are {shown(','.join(columns))}; {','.join(COLUMNS)} expected")


def row(columns: Sequence[str], number: int, place: str) -> WorkloadRequest:
    """One line; TraceError names its place. An output of 0 tokens counts as 1, because every request gets one."""
    if len(columns) != len(COLUMNS):
        raise TraceError(f"{place}: {len(columns)} columns; {','.join(COLUMNS)} expected")
    stamp, context, generated = columns
    num_output = max(1, _tokens(generated, COLUMNS[2], place))
    num_prompt = _tokens(context, COLUMNS[1], place)
    if num_prompt < 1:
        raise TraceError(f"{place}: {COLUMNS[1]} is 0; it must be at least 1")
    return WorkloadRequest(str(number), num_prompt, num_output, num_output, _stamp_ps(stamp, place), place=place)


def _tokens(text: str, what: str, place: str) -> int:
    if not _COUNT.fullmatch(text) or int(text) > MAX_TOKENS:
        raise TraceError(f"{place}: {what} is {shown(text)}; it must be a whole number from 0 to {MAX_TOKENS}")
    return int(text)


def _stamp_ps(text: str, place: str) -> int:
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError("2023-11-16 18:15:46.6805900 would be right")
        whole_s, digits, offset = match.groups()
        since = datetime.fromisoformat(whole_s + (offset or "+00:00")) - _EPOCH
        if since < timedelta(0):
            raise ValueError("time begins with the year 1")
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{place}: {COLUMNS[0]} is {shown(text)}; it must be a date and a time ({error})") from None
    return since // timedelta(seconds=1) * PS_PER_S + int((digits or "0").ljust(12, "0"))
