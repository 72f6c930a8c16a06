"""From the engine's thread to asyncio: one wake-up per event loop and step, never one per token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Protocol

from lockstep.engine.generation import Sink
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import RequestFailedError

if TYPE_CHECKING:  # a worker process has no event loop, and starts sooner without
    import asyncio

    OutputQueue = asyncio.Queue[TokenOutput]
    """Bounded by the request itself: at most one output per token of its ``n`` completions."""

OutputStream = AsyncGenerator[TokenOutput, None]


class Submitter(Protocol):
    """The part of an engine that a stream needs."""

    def submit(self, request: GenerationRequest, callback: Sink | None = None) -> int: ...

    def abort(self, request_id: int) -> None: ...

    def is_complete(self, request_id: int) -> bool: ...


class LoopMailboxes:
    """Outputs of one step, grouped by the event loop that waits for them. Engine thread only."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputQueue, TokenOutput]]] = {}

    def post(self, loop: asyncio.AbstractEventLoop, queue: OutputQueue, output: TokenOutput) -> None:
        self._batches.setdefault(loop, []).append((queue, output))

    def dispatch(self, on_lost: Callable[[int], None]) -> None:
        """Hand each loop its batch; ``on_lost`` gets the ids of requests whose loop is closed."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody can read these streams any more
                for _, output in batch:
                    on_lost(output.request_id)


def _deliver(batch: list[tuple[OutputQueue, TokenOutput]]) -> None:
    for queue, output in batch:
        queue.put_nowait(output)


async def stream(engine: Submitter, mailboxes: LoopMailboxes, request: GenerationRequest) -> OutputStream:
    """Yield what each step brings; an error of the request is raised; leaving early aborts it."""
    import asyncio

    loop = asyncio.get_running_loop()
    queue: OutputQueue = asyncio.Queue()
    request_id = engine.submit(request, lambda output: mailboxes.post(loop, queue, output))
    try:
        while True:
            output = await queue.get()
            if output.error is not None:
                raise output.error
            yield output
            if output.request is not None:
                return
    finally:
        if not engine.is_complete(request_id):
            engine.abort(request_id)


async def collect(engine: Submitter, mailboxes: LoopMailboxes, request: GenerationRequest) -> RequestOutput:
    """The collected stream."""
    async for output in stream(engine, mailboxes, request):
        if output.request is not None:
            return output.request
    raise RequestFailedError("the stream ended without its last output; this is a bug in Lockstep")
