"""What a worker was asked finds its answer: outputs their readers, together and not too often, and questions theirs."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.errors import DeadlineError, QueueFullError, RequestFailedError, WorkerLostError
from lockstep.worker.messages import Answered, Checked, Outputs, Refused
from lockstep.worker.pending import Mailbox, PendingRequests

FOR_EVER_S = 3600.0
LAST = Completion(0, "", (7,), FinishReason.LENGTH, None, None)
WHOLE = RequestOutput(0, (1,), (LAST,), 0, 0, Timings(0.0, 0.0, 1.0))


def token(mailbox: Mailbox, number: int) -> TokenOutput:
    return TokenOutput(mailbox.request_id, 0, (number,), "x")


def last(mailbox: Mailbox, number: int) -> TokenOutput:
    return TokenOutput(mailbox.request_id, 0, (number,), "x", FinishReason.LENGTH, request=WHOLE)


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def reading(mailbox: Mailbox) -> asyncio.Task[list[TokenOutput]]:
    """A reader that waits."""
    task = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    return task


async def begun(pending: PendingRequests, count: int) -> list[Mailbox]:
    """Mailboxes whose first token was read, and a step since, so that the next wake-up is an interval away."""
    mailboxes = [pending.open("model") for _ in range(count)]
    for mailbox in mailboxes:
        reader = await reading(mailbox)
        pending.outputs(Outputs([mailbox.request_id], [token(mailbox, 0)]))
        assert ids(await reader) == [0]
    pending.outputs(Outputs([], [token(mailbox, 1) for mailbox in mailboxes]))
    for mailbox in mailboxes:
        assert ids(await mailbox.take()) == [1]
    return mailboxes


async def test_outputs_go_to_their_requests_and_those_of_closed_requests_are_dropped() -> None:
    pending = PendingRequests()
    one, two = pending.open("model"), pending.open("model")
    assert pending.leave(one)
    pending.outputs(Outputs([one.request_id, two.request_id], [token(one, 7), token(two, 7)]))
    assert await two.take() == [token(two, 7)]
    assert two.is_accepted
    assert not one.is_accepted
    assert pending.num_requests == 1
    assert not pending.leave(one)


async def test_refused_request_needs_no_abort() -> None:
    pending = PendingRequests()
    mailbox = pending.open("model")
    pending.refused(Refused(mailbox.request_id, QueueFullError("full")))
    with pytest.raises(QueueFullError):
        await mailbox.take()
    assert not pending.leave(mailbox)


async def test_query_is_answered_at_most_once() -> None:
    pending = PendingRequests()
    ask_id = pending.next_id()
    answer = asyncio.create_task(pending.answer(ask_id, 10.0))
    await asyncio.sleep(0)
    pending.answered(Answered(ask_id + 1, Checked("of another", 0)))
    pending.answered(Answered(ask_id, Checked("", 0)))
    pending.answered(Answered(ask_id, Checked("again", 0)))
    assert await answer == Checked("", 0)
    assert await pending.answer(pending.next_id(), 0.01) is None


async def test_query_cancelled_at_its_answer_is_cancelled() -> None:
    pending = PendingRequests()
    for num_turns in range(4):  # from the answer to the cancellation
        asking = asyncio.create_task(pending.answer(1, FOR_EVER_S))
        await asyncio.sleep(0)
        pending.answered(Answered(1, Checked("", 0)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_cancelled = asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() == is_cancelled


async def test_a_lost_worker_ends_every_wait() -> None:
    pending = PendingRequests()
    mailbox = pending.open("model")
    answer = asyncio.create_task(pending.answer(pending.next_id(), 10.0))
    await asyncio.sleep(0)
    pending.end(WorkerLostError("gone"))
    assert await answer is None
    with pytest.raises(WorkerLostError):
        await mailbox.take()


async def test_a_slow_reader_gets_all_that_came_at_once() -> None:
    mailbox = Mailbox(1, "model")
    for number in range(100):
        mailbox.put(token(mailbox, number))
    assert [output.token_ids for output in await mailbox.take()] == [(number,) for number in range(100)]


async def test_the_acceptance_wakes_a_reader_without_an_output() -> None:
    mailbox = Mailbox(1, "model")
    asyncio.get_running_loop().call_soon(mailbox.accept)
    assert await mailbox.take() == []


async def test_outputs_before_an_error_are_read_first() -> None:
    mailbox = Mailbox(1, "model")
    mailbox.put(token(mailbox, 1))
    mailbox.fail(RequestFailedError("first"))
    mailbox.fail(RequestFailedError("second"))
    mailbox.put(token(mailbox, 2))
    assert len(await mailbox.take()) == 1
    for _ in range(2):
        with pytest.raises(RequestFailedError, match="first"):
            await mailbox.take()


async def test_an_output_that_brings_an_error_ends_the_request_with_it() -> None:
    mailbox = Mailbox(1, "model")
    mailbox.put(token(mailbox, 1))
    mailbox.put(TokenOutput(1, 0, (), "", FinishReason.DEADLINE, error=DeadlineError("time is up")))
    assert mailbox.is_ended
    assert len(await mailbox.take()) == 1
    with pytest.raises(DeadlineError, match="time is up"):
        await mailbox.take()


async def test_a_reader_that_leaves_can_come_back() -> None:
    mailbox = Mailbox(1, "model")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.take(), 0.01)
    mailbox.put(token(mailbox, 1))
    assert len(await mailbox.take()) == 1


async def test_the_first_and_the_last_token_are_delivered_at_once() -> None:
    pending = PendingRequests(FOR_EVER_S)
    (busy,) = await begun(pending, 1)
    new = pending.open("model")
    readers = [await reading(busy), await reading(new)]
    pending.outputs(Outputs([new.request_id], [token(busy, 2), token(new, 0)]))
    assert ids(await readers[1]) == [0]
    assert not readers[0].done()
    pending.outputs(Outputs([], [last(busy, 3)]))
    assert ids(await readers[0]) == [2, 3]


async def test_an_error_is_delivered_at_once_after_held_tokens() -> None:
    pending = PendingRequests(FOR_EVER_S)
    (mailbox,) = await begun(pending, 1)
    reader = await reading(mailbox)
    failed = TokenOutput(mailbox.request_id, 0, (), "", FinishReason.DEADLINE, error=DeadlineError("late"))
    pending.outputs(Outputs([], [token(mailbox, 2)]))
    pending.outputs(Outputs([], [failed]))
    assert ids(await reader) == [2]


async def test_outputs_within_an_interval_wake_all_readers_at_its_end() -> None:
    pending = PendingRequests(0.02)
    mailboxes = await begun(pending, 3)
    readers = [await reading(mailbox) for mailbox in mailboxes]
    for number in range(2, 7):
        pending.outputs(Outputs([], [token(mailbox, number) for mailbox in mailboxes]))
    assert not any(reader.done() for reader in readers)
    assert [ids(outputs) for outputs in await asyncio.gather(*readers)] == [[2, 3, 4, 5, 6]] * 3


async def test_tokens_of_slow_steps_are_delivered_at_once() -> None:
    pending = PendingRequests(0.01)
    (mailbox,) = await begun(pending, 1)
    for number in range(2, 5):
        await asyncio.sleep(0.02)
        reader = await reading(mailbox)
        pending.outputs(Outputs([], [token(mailbox, number)]))
        await asyncio.sleep(0)
        assert reader.done(), "woken by the step itself, without a timer"


async def test_without_an_interval_nothing_is_held() -> None:
    pending = PendingRequests()
    (mailbox,) = await begun(pending, 1)
    for number in range(2, 100):
        reader = await reading(mailbox)
        pending.outputs(Outputs([], [token(mailbox, number)]))
        await asyncio.sleep(0)
        assert ids(reader.result()) == [number]
