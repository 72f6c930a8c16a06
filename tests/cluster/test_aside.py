"""Work on a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lockstep.cluster.aside import aside
from lockstep.errors import ConfigError


def _faulty() -> None:
    raise ConfigError("wrong")


async def test_what_the_work_gives_is_given() -> None:
    assert await aside(lambda: threading.current_thread().daemon)
    with pytest.raises(ConfigError, match="wrong"):
        await aside(_faulty)


def test_a_loop_ends_while_the_work_goes_on() -> None:
    """And what the work gives afterwards is nobody's."""
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(30.0)
        has_ended.set()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aside(work), 0.05)

    asyncio.run(leave())
    assert not has_ended.is_set()
    before = [thread for thread in threading.enumerate() if thread.name == "lockstep-aside"]
    may_end.set()
    for thread in before:
        thread.join(30.0)
    assert has_ended.is_set()
