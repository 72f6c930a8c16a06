"""What came for one request and was not fetched yet. Event loop only."""

from __future__ import annotations

import asyncio

from lockstep.engine.outputs import TokenOutput
from lockstep.errors import LockstepError


class Mailbox:
    """Bounded by its request: at most one output per token of its completions.

    Args:
        request_id: of the request, unique among the worker's.
        replica: who answers it.
    """

    __slots__ = ("_error", "_has_begun", "_outputs", "_waiter", "is_accepted", "is_ended", "replica", "request_id")

    def __init__(self, request_id: int, replica: str) -> None:
        self.request_id = request_id
        self.replica = replica
        self.is_accepted = False
        """It has, or had, its place in the queue."""
        self.is_ended = False
        """Nothing more will come."""
        self._has_begun = False
        self._outputs: list[TokenOutput] = []
        self._error: LockstepError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[TokenOutput]:
        """All outputs that have come; none right after the acceptance. Waits while there is nothing new.

        Raises:
            LockstepError: what ended the request, once everything before it was taken.
        """
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return outputs
        if self._error is not None:
            raise self._error
        return []

    def accept(self) -> None:
        self.is_accepted = True
        self.wake()

    def put(self, output: TokenOutput) -> bool:
        """Take an output over; one that brings an error ends the request with it.

        Returns:
            Whether its reader is still to be woken. The first output and the ending do it by themselves.
        """
        if self.is_ended:
            return False
        if output.error is not None:
            self.fail(output.error)
            return False
        self._outputs.append(output)
        self.is_ended = output.request is not None
        if self._has_begun and not self.is_ended:
            return True
        self._has_begun = True
        self.wake()
        return False

    def fail(self, error: LockstepError) -> None:
        """End the request with an error; one that has ended keeps its ending."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let whoever waits take what has come."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
