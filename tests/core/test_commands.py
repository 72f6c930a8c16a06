"""A listener gets every command that may have an effect, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.request import FinishReason
from lockstep.core.scheduler import Scheduler
from lockstep.errors import PromptTooLongError
from tests.core.drive import commit, config, prompt, step


class Heard:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def added(self, *command: Any) -> None:
        self.all.append(("added", *command))

    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None:
        self.all.append(("aborted", seq_id, reason, step, in_step))

    def answer_named(self, seq_id: int, hashes: Any, step: int, in_step: bool) -> None:
        self.all.append(("named", seq_id, hashes, step, in_step))

    def pinned(self, *command: Any) -> None:
        self.all.append(("pinned", *command))

    def unpinned(self, *command: Any) -> None:
        self.all.append(("unpinned", *command))

    def filled(self, *command: Any) -> None:
        self.all.append(("filled", *command))

    def proposed(self, *command: Any) -> None:
        self.all.append(("proposed", *command))

    def cache_reset(self, *command: Any) -> None:
        self.all.append(("reset", *command))


def test_each_command_is_reported_with_the_step_before_which_it_takes_effect() -> None:
    heard = Heard()
    core = Scheduler(config(), heard)
    request = prompt(list(range(9)))
    core.add(request)
    core.add(request)
    step(core)
    plan = core.schedule()
    core.abort(0)
    commit(core, plan)
    core.abort(1, FinishReason.DEADLINE)
    core.pin(request.block_hashes, (2,))
    core.sweep(request.block_hashes, (2,))
    core.fill(request.block_hashes)
    core.reset_prefix_cache()
    core.propose({1: 2})
    assert heard.all == [
        ("added", 0, request, 0),
        ("added", 1, request, 0),
        ("aborted", 0, FinishReason.ABORT, 2, True),
        ("aborted", 1, FinishReason.DEADLINE, 2, False),
        ("pinned", request.block_hashes, (2,), 2),
        ("unpinned", request.block_hashes, (2,), 2),
        ("filled", request.block_hashes, 0, 0, 2),
        ("reset", 2),
        ("proposed", {1: 2}, 2),
    ]


def test_names_of_an_answer_are_reported_during_a_step_and_between_steps() -> None:
    heard = Heard()
    core = Scheduler(config(), heard)
    core.add(prompt(list(range(9))))
    step(core)
    heard.all.clear()
    hashes = (b"one" * 5,)
    core.name_answer(0, hashes)
    core.schedule()
    core.name_answer(0, hashes)
    core.name_answer(0, ())
    core.name_answer(7, hashes)
    assert heard.all == [("named", 0, hashes, 1, False), ("named", 0, hashes, 2, True)]


def test_rejected_and_empty_commands_are_not_reported() -> None:
    heard = Heard()
    core = Scheduler(config(max_model_len=8), heard)
    with pytest.raises(PromptTooLongError):
        core.add(prompt(9))
    core.abort(0)
    core.pin(())
    core.sweep(())
    core.fill(())
    assert heard.all == []


def test_a_request_is_reported_with_its_hashes_when_caching_is_off() -> None:
    """A recording without a cache can therefore be replayed with one."""
    heard = Heard()
    core = Scheduler(config(enable_prefix_caching=False), heard)
    request = prompt(list(range(9)))
    core.add(request)
    assert heard.all == [("added", 0, request, 0)]
    assert request.block_hashes
