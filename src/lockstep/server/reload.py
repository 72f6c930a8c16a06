"""Manifest reload: applies the manifest file again on request or, if the file is watched, when it has changed."""

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
"""Interval, in seconds, at which a watched file is checked."""
MAX_TRIES = 5
"""Maximum number of attempts to apply a file after temporary errors, as its models may be the cause of the error."""

Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Return a value that changes with the file's content; None if the file is missing, as while it is replaced."""
    try:
        status = path.expanduser().stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class ManifestReload:
    """Reloads the manifest file. Used from one event loop.

    Args:
        path: the manifest file.
        environment: variables that the file can refer to.
        seen: stamp of the file before the current manifest was read.
        watches: whether to apply the file whenever its content changes.
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
        """Request a reload, even if the file is unchanged. Requests before the reload starts are merged into one."""
        self._requested.set()

    async def run(self) -> None:
        """Reload until cancelled. Problems of the file are logged, and the current manifest stays in use."""
        while True:
            if not self._has_changed():
                try:
                    async with asyncio.timeout(WATCH_INTERVAL_S if self._watches else None):
                        await self._requested.wait()
                except TimeoutError:
                    continue
            self._requested.clear()
            self._seen = stamp_of(self._path)
            await self._apply_with_retries()

    def _has_changed(self) -> bool:
        """True if a watched file differs from the last one that was applied."""
        stamp = stamp_of(self._path) if self._watches else None
        return stamp is not None and stamp != self._seen

    async def _apply_with_retries(self) -> None:
        for num_left in reversed(range(MAX_TRIES)):
            while self._cluster.snapshot().is_replacing:
                await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await self._apply()
            except UnavailableError as error:
                if num_left:
                    log.warning("%s: retrying: %s", self._path, error)
                    await asyncio.sleep(error.retry_after_s)
                else:
                    log.error("%s is not applied: %s", self._path, error)
            else:
                return

    async def _apply(self) -> None:
        """Apply the file once. Raises UnavailableError if a later attempt may succeed."""
        try:
            text = await asyncio.to_thread(read_text, self._path, "the manifest")
            replaced = await self._cluster.replace(text, self._environment)
        except UnavailableError:
            raise
        except ManifestError as error:
            for problem in error.problems:
                log.error("%s is not applied: %s", self._path, problem)
        except LockstepError as error:
            log.error("%s is not applied: %s", self._path, error)
        else:
            log.info(
                "%s is applied: %d models added, %d changed, %d removed, %d unchanged, in %.0f ms",
                self._path,
                len(replaced.added),
                len(replaced.changed),
                len(replaced.removed),
                len(replaced.unchanged),
                replaced.duration_ms,
            )
