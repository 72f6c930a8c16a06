"""What is shown of loads: a line a stage and now and then, on terminals a bar, and what else is printed beside it."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from lockstep.cli.progress import REMINDER_S, LoadingLines, ServingProgress
from tests.terminals import Terminal


class Watch:
    """A clock that is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_loading_stage_prints_a_line_and_a_reminder_when_it_lasts() -> None:
    said, watch = list[str](), Watch()
    tell = LoadingLines(said.append, watch)

    def lines() -> list[str]:
        taken = said[:]
        said.clear()
        return taken

    tell("a", "open", 0.0)
    assert lines() == [], "a file is mostly opened in no time"
    watch.now_s += REMINDER_S
    tell.remind()
    assert lines() == ["a: opening its files, for 5 s"]
    tell("a", "open", 1.0)
    tell("a", "open", 1.0)
    tell("a", "save", 1.0)
    watch.now_s += 10 * REMINDER_S
    tell.remind()
    assert lines() == [], "it waits for its turn, which is no stage"
    tell("a", "download model.gguf", 0.0)
    watch.now_s += 3.0
    tell("a", "download model.gguf", 0.25)
    tell.remind()
    assert lines() == ["a: fetching model.gguf"]
    watch.now_s += 2.0
    tell.remind()
    tell("b", "trial", 0.0)
    assert lines() == [
        "a: fetching model.gguf, 25% done after 5 s",
        "b: loading it in a trial process, because this machine never ran it",
    ]
    tell("a", "pack", 0.0)
    watch.now_s += 7.0
    tell.remind()
    assert lines() == [
        "a: packing its weights",
        "a: packing its weights, for 7 s",
        "b: loading it in a trial process, because this machine never ran it, for 7 s",
    ]
    tell("a", "ready", 1.0)
    tell("b", "ready", 1.0)
    assert lines() == [
        "a: ready after 67.0 s (open 5.0 s, download 5.0 s, pack 7.0 s)",
        "b: ready after 7.0 s (trial 7.0 s)",
    ]
    watch.now_s += 100.0
    tell.remind()
    assert lines() == []


def test_terminal_shows_bars_and_keeps_completed_lines(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = io.StringIO()
    progress = ServingProgress(Console(file=drawn, force_terminal=True, width=100))
    with progress.running():
        progress.update("a", "pack", 0.0)
        progress.announce("lockstep: listening on there, loading [a]")
        progress.update("b[1]", "pack", 0.0)
        progress.update("b[1]", "pack", 0.5)
        progress.update("a", "ready", 1.0)
        progress.update("b[1]", "ready", 1.0)
        progress.announce("lockstep: ready")
    text = drawn.getvalue()
    assert "a: packing its weights" in text
    assert "b[1]: packing its weights" in text
    assert "a: ready after" in text
    assert "b[1]: ready after" in text
    assert capsys.readouterr().out == "lockstep: listening on there, loading [a]\nlockstep: ready\n"


def test_a_log_for_machines_has_no_bars(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lockstep")
    with contextlib.redirect_stderr(Terminal()) as terminal:
        progress = ServingProgress.of_process("json")
        progress.update("a", "pack", 0.0)
    assert terminal.getvalue() == ""
    assert caplog.messages == ["a: packing its weights"]
