"""The manifest's file, brought in again when it is asked for or, watched, when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from lockstep.cluster.base import Cluster
from lockstep.errors import LockstepError, ManifestError, UnavailableError

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""A file that is watched is looked at so often."""


class ManifestReload:
    """Used from one event loop.

    Args:
        path: the file.
        environment: what it may refer to.
        watches: whether it is brought in whenever its content changes.
    """

    def __init__(self, cluster: Cluster, path: Path, environment: Mapping[str, str], *, watches: bool = False) -> None:
        self._cluster = cluster
        self._path = path
        self._environment = environment
        self._watches = watches
        self._asked = asyncio.Event()
        self._stamp: tuple[int, int, int] | None = None

    def ask(self) -> None:
        """Bring it in, changed or not. Asking again before that has begun is asking once."""
        self._asked.set()

    async def run(self) -> None:
        """Until it is cancelled. What is wrong with the file is logged, and what is served goes on."""
        self._stamp = self._look()
        while True:
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S if self._watches else None):
                    await self._asked.wait()
            except TimeoutError:
                stamp = self._look()
                if stamp is None or stamp == self._stamp:
                    continue
            self._asked.clear()
            self._stamp = self._look()
            await self._bring_in()

    async def _bring_in(self) -> None:
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
            replaced = await self._cluster.replace(text, self._environment)
        except UnavailableError as error:
            log.warning("%s waits: %s", self._path, error)
            await asyncio.sleep(error.retry_after_s)
            self.ask()
        except ManifestError as error:
            for problem in error.problems:
                log.error("%s is not brought in: %s", self._path, problem)
        except (LockstepError, OSError, UnicodeDecodeError) as error:
            log.error("%s is not brought in: %s", self._path, error)
        else:
            log.info(
                "%s is brought in: %d models are new, %d changed, %d gone, %d as they were, in %.0f ms",
                self._path,
                len(replaced.added),
                len(replaced.changed),
                len(replaced.removed),
                len(replaced.unchanged),
                replaced.duration_ms,
            )

    def _look(self) -> tuple[int, int, int] | None:
        """What changes with the file's content; None: it is not there, as while an editor replaces it."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
