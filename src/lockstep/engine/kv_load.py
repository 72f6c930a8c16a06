"""Load of a chain of KV blocks: contents on their way back, read by the store's thread and taken by an engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from lockstep.executors.base import Blocks

MAX_AHEAD_BYTES = 32 << 20
"""Contents that were read for one chain and not taken yet."""


class ChainLoad:
    """Contents of a chain on their way back: read by the store's thread, taken by one engine's."""

    def __init__(self, environment: bytes, hashes: Sequence[bytes], num_bytes: int, wake: Callable[[], None]) -> None:
        self.environment = environment
        self.hashes = tuple(hashes)
        self.num_bytes = num_bytes
        """Of one block."""
        self.wake = wake
        """Called by the store's thread when there is something to take, or nothing more will come."""
        self.num_read = 0
        self.num_taken = 0
        self.is_over = False
        """Nothing more will be read."""
        self._ready: deque[Blocks] = deque()
        self._lock = threading.Lock()
        """So that nothing is added to what was cancelled meanwhile: it would be taken for the block that is missing."""

    @property
    def is_ready(self) -> bool:
        """True if there is something to take, or nothing more will come."""
        return bool(self._ready) or self.is_over

    @property
    def is_done(self) -> bool:
        """True if all that came was taken, and nothing more will come."""
        return self.is_over and not self._ready

    @property
    def wants_more(self) -> bool:
        """True if the next block should be read."""
        return not self.is_over and (self.num_read - self.num_taken) * self.num_bytes < MAX_AHEAD_BYTES

    def put(self, content: Blocks) -> None:
        """Add the next block's content, unless no one wants it any more."""
        with self._lock:
            if not self.is_over:
                self._ready.append(content)
                self.num_read += 1
                self.is_over = self.num_read == len(self.hashes)

    def take(self, most_bytes: int) -> list[Blocks]:
        """Contents of the next blocks, at least one where there is any."""
        with self._lock:
            count = min(len(self._ready), max(1, most_bytes // self.num_bytes))
            self.num_taken += count
            return [self._ready.popleft() for _ in range(count)]

    def cancel(self) -> None:
        """Want nothing more of it."""
        with self._lock:
            self.is_over = True
            self._ready.clear()
