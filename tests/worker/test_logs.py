"""A log line is one line, says what it is about, and can be read by machines, whatever was logged."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

import pytest

from lockstep.worker.logs import FIELDS, JsonFormatter, TextFormatter, log_to_stderr

HOSTILE = 'a model\n2026-01-01T00:00:00.000Z INFO    server lockstep: "admin" came=in'


def record_of(message: str = "loaded %s", *values: object, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("lockstep.worker", logging.INFO, __file__, 1, message, values, None)
    record.created = 1_700_000_000.1239
    setattr(record, FIELDS, fields)
    return record


def failed() -> logging.LogRecord:
    record = record_of("no %s", "luck")
    try:
        raise ValueError("the reason")
    except ValueError:
        record.exc_info = sys.exc_info()
    return record


def test_a_text_line_has_its_values_at_the_end() -> None:
    line = TextFormatter("server").format(record_of("loaded %s", "alpha", took_ms=12, model="alpha", ids=[1, None]))
    start = "2023-11-14T22:13:20.123Z INFO    server lockstep.worker: loaded alpha"
    assert line == f"{start} took_ms=12 model=alpha ids=[1, null]"


@pytest.mark.parametrize("value", [HOSTILE, "two words", "a=b", 'a"b', "\x1b[2J", "tab\t", "\u2028", "\x9b2J"])
def test_a_value_cannot_break_its_line_nor_pass_for_another(value: str) -> None:
    """A client names its model as it likes."""
    line = TextFormatter("server").format(record_of("refused", model=value, status=404))
    assert line.isprintable()
    told = line.partition(" model=")[2].removesuffix(" status=404")
    assert json.loads(told) == value


def test_a_message_of_several_lines_is_one() -> None:
    line = TextFormatter("server").format(record_of("%s", HOSTILE))
    assert "\n" not in line
    assert line.startswith("2023-11-14T22:13:20.123Z INFO    server lockstep.worker: a model 2026-")


def test_json_line_is_an_object_with_any_values() -> None:
    line = JsonFormatter("worker").format(record_of("%s", HOSTILE, model=HOSTILE, name="Müller", path=io))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.123Z",
        "level": "info",
        "process": "worker",
        "logger": "lockstep.worker",
        "message": HOSTILE,
        "model": HOSTILE,
        "name": "Müller",
        "path": str(io),
    }
    assert "Müller" in line


def test_error_line_has_its_traceback() -> None:
    text, found = TextFormatter("server").format(failed()), json.loads(JsonFormatter("server").format(failed()))
    first, *traceback = text.splitlines()
    assert first.endswith(" lockstep.worker: no luck")
    assert traceback[-1] == "ValueError: the reason"
    assert found["traceback"].splitlines() == traceback


@pytest.mark.parametrize(
    ("level", "expected"), [("debug", ["a", "b", "c", "z"]), ("info", ["b", "c", "z"]), ("error", ["z"])]
)
def test_logs_of_lockstep_follow_the_level_and_those_of_libraries_start_at_warning(
    level: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others, a warning whatever our level is."""
    log_to_stderr("json", level, "server")
    ours, other = logging.getLogger("lockstep.some"), logging.getLogger("some.library")
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)  # after the set-up: whoever draws there puts its own in place
    ours.debug("a")
    ours.info("b")
    ours.warning("c")
    other.info("y")
    other.warning("z")
    lines: list[dict[str, Any]] = [json.loads(line) for line in shown.getvalue().splitlines()]
    assert [line["message"] for line in lines] == expected
