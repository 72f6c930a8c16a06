"""Readings of answers by the parser: what a client of a stream sees."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.server.tools.call_formats import CallFormat
from lockstep.server.tools.parser import ContentDelta, ToolParser

NAMES = ("f", "get_weather")
SCHEMAS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "get_weather": {}}


@dataclass
class Seen:
    """What a client of a stream knows."""

    content: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Index to id, name and arguments so far."""


def read(call_format: CallFormat, pieces: Iterable[str]) -> tuple[ToolParser, Seen]:
    ids = itertools.count()
    parser = ToolParser(call_format, NAMES, lambda: f"call_{next(ids)}", SCHEMAS)
    seen = Seen()
    for delta in [*(delta for piece in pieces for delta in parser.append(piece)), *parser.flush()]:
        if isinstance(delta, ContentDelta):
            assert delta.text
            seen.content += delta.text
        elif delta.index not in seen.calls:
            assert delta.id is not None and delta.name is not None and delta.arguments  # noqa: PT018 - one fact
            seen.calls[delta.index] = [delta.id, delta.name, delta.arguments]
        else:
            assert delta.id is None and delta.name is None and delta.arguments  # noqa: PT018 - one fact
            seen.calls[delta.index][2] += delta.arguments
    for call in parser.calls:
        assert seen.calls[call.index] == [call.id, call.name, call.arguments]
        assert isinstance(json.loads(call.arguments), dict)
    return parser, seen


def outcome(call_format: CallFormat, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, seen = read(call_format, pieces)
    return seen.content, [(call.name, call.arguments) for call in parser.calls]
