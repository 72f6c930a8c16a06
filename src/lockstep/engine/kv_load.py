"""Load of a chain of KV blocks: passes contents from the store's thread to an engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from lockstep.executors.base import Blocks


class ChainLoad:
    """A chain that is being loaded: read by the store's thread, taken by an engine's thread.

    Args:
        max_ahead_bytes: maximum size of contents that were read and not taken yet.
    """

    def __init__(
        self,
        environment: bytes,
        hashes: Sequence[bytes],
        sizes: Sequence[int],
        wake: Callable[[], None],
        max_ahead_bytes: int,
    ) -> None:
        self._max_ahead_bytes = max_ahead_bytes
        self.environment = environment
        self.hashes = tuple(hashes)
        self.sizes = tuple(sizes)
        """Size of each content in bytes."""
        self.wake = wake
        """Called by the store's thread when contents can be taken, or the load is over."""
        self.num_read = 0
        self.num_taken = 0
        self.is_over = False
        """True if no more contents will be read."""
        self._ready: deque[Blocks] = deque()
        self._lock = threading.Lock()
        """Guards against adding contents after a cancel, which would be taken for the missing block."""

    @property
    def is_ready(self) -> bool:
        """True if contents can be taken, or the load is over."""
        return bool(self._ready) or self.is_over

    @property
    def is_done(self) -> bool:
        """True if the load is over and all contents were taken."""
        return self.is_over and not self._ready

    @property
    def needs_more(self) -> bool:
        """True if the next block should be read."""
        return not self.is_over and sum(self.sizes[self.num_taken : self.num_read]) < self._max_ahead_bytes

    def put(self, content: Blocks) -> None:
        """Add the next block's content, unless the load is over."""
        with self._lock:
            if not self.is_over:
                self._ready.append(content)
                self.num_read += 1
                self.is_over = self.num_read == len(self.hashes)

    def take(self, most_bytes: int) -> list[Blocks]:
        """Take the next contents, at least one if there is any."""
        with self._lock:
            taken: list[Blocks] = []
            num_bytes = 0
            while self._ready and (not taken or num_bytes + self._ready[0].nbytes <= most_bytes):
                taken.append(self._ready.popleft())
                num_bytes += taken[-1].nbytes
            self.num_taken += len(taken)
            return taken

    def cancel(self) -> None:
        """Stop the load and drop its contents."""
        with self._lock:
            self.is_over = True
            self._ready.clear()
