"""Reload of the manifest's file, when it is requested or, where it is watched, when it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from lockstep.cluster.cluster import Cluster
from lockstep.errors import LockstepError, ManifestError, UnavailableError
from lockstep.yaml_reading import read_text

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
"""A file that is watched is looked at so often."""
MAX_TRIES = 5
"""Of bringing a file in that may be free of blame; one whose models take the device down must not do so for ever."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """A value that changes with a file's content; None: it is not there, as while an editor replaces it."""
    try:
        status = path.expanduser().stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class ManifestReload:
    """Used from one event loop.

    Args:
        path: the file.
        environment: what it may refer to.
        seen: the stamp of the file before the manifest was read that is served at first.
        watches: whether it is brought in whenever its content changes.
    """

    def __init__(
        self,
        cluster: Cluster,
        path: Path,
        environment: Mapping[str, str],
        seen: Stamp | None,
        *,
        watches: bool = False,
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._environment = environment
        self._watches = watches
        self._requested = asyncio.Event()
        self._seen = seen

    def request(self) -> None:
        """Bring it in, changed or not. Asking again before that has begun is asking once."""
        self._requested.set()

    async def run(self) -> None:
        """Until it is cancelled. What is wrong with the file is logged, and what is served goes on."""
        while True:
            if not self._has_changed():
                try:
                    async with asyncio.timeout(WATCH_INTERVAL_S if self._watches else None):
                        await self._requested.wait()
                except TimeoutError:
                    continue
            self._requested.clear()
            self._seen = stamp_of(self._path)
            await self._bring_in()

    def _has_changed(self) -> bool:
        """True if a file that is watched is another one than the one that was seen."""
        stamp = stamp_of(self._path) if self._watches else None
        return stamp is not None and stamp != self._seen

    async def _bring_in(self) -> None:
        for num_left in reversed(range(MAX_TRIES)):
            while self._cluster.snapshot().is_replacing:
                await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await self._try()
            except UnavailableError as error:
                if num_left:
                    log.warning("%s waits: %s", self._path, error)
                    await asyncio.sleep(error.retry_after_s)
                else:
                    log.error("%s is not brought in: %s", self._path, error)
            else:
                return

    async def _try(self) -> None:
        """UnavailableError: it may come yet."""
        try:
            text = await asyncio.to_thread(read_text, self._path, "the manifest")
            replaced = await self._cluster.replace(text, self._environment)
        except UnavailableError:
            raise
        except ManifestError as error:
            for problem in error.problems:
                log.error("%s is not brought in: %s", self._path, problem)
        except LockstepError as error:
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
