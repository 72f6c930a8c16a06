"""The manifest's file, brought in again: what is not the file's fault is tried again, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from lockstep.cluster.manifest_permissions import NONE, Permissions
from lockstep.cluster.snapshot import Replaced
from lockstep.errors import UnavailableError
from lockstep.server.reload import MAX_TRIES, ManifestReload, stamp_of
from tests.server.managing import MANIFEST, Managed
from tests.waiting import eventually


class Unlucky(Managed):
    """Cannot bring anything in, so often."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.num_tries = 0

    async def replace(
        self, text: str, environment: Mapping[str, str] | None = None, permissions: Permissions = NONE
    ) -> Replaced:
        self.num_tries += 1
        if self.num_tries <= self.num_failures:
            raise UnavailableError("the device worker ended", retry_after_s=0.001)
        return await super().replace(text, environment, permissions)


@contextlib.asynccontextmanager
async def reloading(cluster: Managed, path: Path) -> AsyncIterator[ManifestReload]:
    reload = ManifestReload(cluster, path, {}, stamp_of(path))
    running = asyncio.create_task(reload.run())
    try:
        yield reload
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    await eventually(lambda: words in caplog.text)


async def test_temporary_errors_are_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path, cluster = tmp_path / "cluster.yaml", Unlucky(MAX_TRIES - 1)
    path.write_text("cluster: other")
    async with reloading(cluster, path) as reload:
        reload.request()
        await until_logged(caplog, "is applied: 1 models added")
    assert cluster.text == "cluster: other"


async def test_retries_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, cluster = tmp_path / "cluster.yaml", Unlucky(1000)
    path.write_text("cluster: other")
    async with reloading(cluster, path) as reload:
        reload.request()
        await until_logged(caplog, "is not applied: the device worker ended")
        assert cluster.num_tries == MAX_TRIES
        cluster.num_failures = 0
        reload.request()
        await eventually(lambda: cluster.text != MANIFEST)


async def test_an_unreadable_file_is_logged_on_reload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, cluster = tmp_path / "cluster.yaml", Managed()
    path.write_bytes(b"cluster: \xff")
    async with reloading(cluster, path) as reload:
        reload.request()
        await until_logged(caplog, "cannot be read ('utf-8' codec can't decode byte 0xff")
    assert cluster.text == MANIFEST


def test_a_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cluster.yaml").write_text(MANIFEST)
    assert stamp_of(Path("~/cluster.yaml")) == stamp_of(tmp_path / "cluster.yaml") is not None
