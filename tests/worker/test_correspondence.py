"""Events find those who wait for them, and nobody else."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.engine.outputs import TokenOutput
from lockstep.errors import QueueFullError, WorkerLostError
from lockstep.worker.correspondence import Correspondence
from lockstep.worker.messages import Checked, Outputs, Refused


def token(request_id: int) -> TokenOutput:
    return TokenOutput(request_id, 0, (7,), "x")


async def test_outputs_go_to_their_requests_and_those_that_nobody_reads_nowhere() -> None:
    letters = Correspondence()
    one, two = letters.open("model"), letters.open("model")
    assert letters.leave(one)
    letters.outputs(Outputs([one.request_id, two.request_id], [token(one.request_id), token(two.request_id)]))
    assert await two.take() == [token(two.request_id)]
    assert two.is_accepted
    assert not one.is_accepted
    assert letters.num_requests == 1
    assert not letters.leave(one)


async def test_a_request_that_was_refused_is_not_to_be_aborted() -> None:
    letters = Correspondence()
    mailbox = letters.open("model")
    letters.refused(Refused(mailbox.request_id, QueueFullError("full")))
    with pytest.raises(QueueFullError):
        await mailbox.take()
    assert not letters.leave(mailbox)


async def test_a_question_is_answered_once_or_not_at_all() -> None:
    letters = Correspondence()
    ask_id = letters.next_id()
    answer = asyncio.create_task(letters.answer(ask_id, 10.0))
    await asyncio.sleep(0)
    letters.answered(Checked(ask_id + 1, "of another", 0))
    letters.answered(Checked(ask_id, "", 0))
    letters.answered(Checked(ask_id, "again", 0))
    assert await answer == Checked(ask_id, "", 0)
    assert await letters.answer(letters.next_id(), 0.01) is None


async def test_when_the_worker_is_gone_nobody_goes_on_waiting() -> None:
    letters = Correspondence()
    mailbox = letters.open("model")
    answer = asyncio.create_task(letters.answer(letters.next_id(), 10.0))
    await asyncio.sleep(0)
    letters.end(WorkerLostError("gone"))
    assert await answer is None
    with pytest.raises(WorkerLostError):
        await mailbox.take()
