"""Work on a thread that nobody has to wait for: a server that is told to end while it hashes or fetches gigabytes
ends at once, where one of asyncio's own threads would be joined first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """What the work returns or raises. Leaving early leaves it to its end, or to the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(answer: Callable[[Any], None], value: object) -> None:
        if not done.done():
            answer(value)

    def body() -> None:
        try:
            answer, value = done.set_result, work()
        except Exception as error:
            tell(loop, settle, done.set_exception, error)
        else:
            tell(loop, settle, answer, value)

    threading.Thread(target=body, name="lockstep-aside", daemon=True).start()
    return await done


def tell(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    """Call something on a loop, from another thread; nothing where the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *arguments)
