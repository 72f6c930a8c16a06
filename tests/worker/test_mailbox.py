"""What came for one request: in order, all at once, and its ending last."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.outputs import TokenOutput
from lockstep.errors import DeadlineError, RequestFailedError
from lockstep.worker.mailbox import Mailbox


def token(number: int) -> TokenOutput:
    return TokenOutput(1, 0, (number,), "x")


async def test_a_slow_reader_gets_all_that_came_at_once() -> None:
    mailbox = Mailbox(1, "model")
    for number in range(100):
        mailbox.put(token(number))
    assert [output.token_ids for output in await mailbox.take()] == [(number,) for number in range(100)]


async def test_the_acceptance_wakes_a_reader_without_an_output() -> None:
    mailbox = Mailbox(1, "model")
    asyncio.get_running_loop().call_soon(mailbox.accept)
    assert await mailbox.take() == []


async def test_what_came_before_an_error_is_read_before_it() -> None:
    mailbox = Mailbox(1, "model")
    mailbox.put(token(1))
    mailbox.fail(RequestFailedError("first"))
    mailbox.fail(RequestFailedError("second"))
    mailbox.put(token(2))
    assert len(await mailbox.take()) == 1
    for _ in range(2):
        with pytest.raises(RequestFailedError, match="first"):
            await mailbox.take()


async def test_an_output_that_brings_an_error_ends_the_request_with_it() -> None:
    mailbox = Mailbox(1, "model")
    mailbox.put(token(1))
    mailbox.put(TokenOutput(1, 0, (), "", FinishReason.DEADLINE, error=DeadlineError("time is up")))
    assert mailbox.is_ended
    assert len(await mailbox.take()) == 1
    with pytest.raises(DeadlineError, match="time is up"):
        await mailbox.take()


async def test_a_reader_that_leaves_can_come_back() -> None:
    mailbox = Mailbox(1, "model")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.take(), 0.01)
    mailbox.put(token(1))
    assert len(await mailbox.take()) == 1
