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

    __slots__ = ("_error", "_outputs", "_waiter", "is_accepted", "is_ended", "replica", "request_id")

    def __init__(self, request_id: int, replica: str) -> None:
        self.request_id = request_id
        self.replica = replica
        self.is_accepted = False
        """It has, or had, its place in the queue."""
        self.is_ended = False
        """Nothing more will come."""
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
        self._wake()

    def put(self, output: TokenOutput) -> None:
        """Take an output over; one that brings an error ends the request with it."""
        if self.is_ended:
            return
        if output.error is not None:
            self.fail(output.error)
            return
        self._outputs.append(output)
        self.is_ended = output.request is not None
        self._wake()

    def fail(self, error: LockstepError) -> None:
        """End the request with an error; one that has ended keeps its ending."""
        if not self.is_ended:
            self.is_ended = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
