"""Readers are woken together and not too often; first tokens and endings wait for nobody."""

from __future__ import annotations

import asyncio

from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.errors import DeadlineError
from lockstep.worker.correspondence import Correspondence
from lockstep.worker.mailbox import Mailbox
from lockstep.worker.messages import Outputs

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


async def begun(letters: Correspondence, count: int) -> list[Mailbox]:
    """Mailboxes whose first token was read, and a step since, so that the next wake-up is an interval away."""
    mailboxes = [letters.open("model") for _ in range(count)]
    for mailbox in mailboxes:
        reader = await reading(mailbox)
        letters.outputs(Outputs([mailbox.request_id], [token(mailbox, 0)]))
        assert ids(await reader) == [0]
    letters.outputs(Outputs([], [token(mailbox, 1) for mailbox in mailboxes]))
    for mailbox in mailboxes:
        assert ids(await mailbox.take()) == [1]
    return mailboxes


async def test_the_first_token_and_the_ending_are_told_at_once() -> None:
    letters = Correspondence(FOR_EVER_S)
    (busy,) = await begun(letters, 1)
    new = letters.open("model")
    readers = [await reading(busy), await reading(new)]
    letters.outputs(Outputs([new.request_id], [token(busy, 2), token(new, 0)]))
    assert ids(await readers[1]) == [0]
    assert not readers[0].done()
    letters.outputs(Outputs([], [last(busy, 3)]))
    assert ids(await readers[0]) == [2, 3]


async def test_an_error_is_told_at_once_and_after_what_was_held() -> None:
    letters = Correspondence(FOR_EVER_S)
    (mailbox,) = await begun(letters, 1)
    reader = await reading(mailbox)
    failed = TokenOutput(mailbox.request_id, 0, (), "", FinishReason.DEADLINE, error=DeadlineError("late"))
    letters.outputs(Outputs([], [token(mailbox, 2)]))
    letters.outputs(Outputs([], [failed]))
    assert ids(await reader) == [2]


async def test_what_comes_within_an_interval_comes_to_all_readers_at_its_end() -> None:
    letters = Correspondence(0.02)
    mailboxes = await begun(letters, 3)
    readers = [await reading(mailbox) for mailbox in mailboxes]
    for number in range(2, 7):
        letters.outputs(Outputs([], [token(mailbox, number) for mailbox in mailboxes]))
    assert not any(reader.done() for reader in readers)
    assert [ids(outputs) for outputs in await asyncio.gather(*readers)] == [[2, 3, 4, 5, 6]] * 3


async def test_slower_steps_are_told_at_once() -> None:
    letters = Correspondence(0.01)
    (mailbox,) = await begun(letters, 1)
    for number in range(2, 5):
        await asyncio.sleep(0.02)
        reader = await reading(mailbox)
        letters.outputs(Outputs([], [token(mailbox, number)]))
        await asyncio.sleep(0)
        assert reader.done(), "woken by the step itself, without a timer"


async def test_without_an_interval_nothing_is_held() -> None:
    letters = Correspondence()
    (mailbox,) = await begun(letters, 1)
    for number in range(2, 100):
        reader = await reading(mailbox)
        letters.outputs(Outputs([], [token(mailbox, number)]))
        await asyncio.sleep(0)
        assert ids(reader.result()) == [number]
