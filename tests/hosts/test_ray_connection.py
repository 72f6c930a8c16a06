"""Which cluster of Ray is joined, and by which token; all that can be known without Ray."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import PlacingError
from lockstep.hosts.ray_connection import AUTH_VARIABLES, Calls, Connection, choose_address, prepare_environment


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of a user who has never heard of Ray."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    yield
    os.environ.clear()
    os.environ.update(before)


async def test_cluster_address_is_named_joined_or_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await choose_address("auto") is None
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await choose_address(address) == address
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert await choose_address("auto") == address
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        assert await choose_address(address) == address
        with pytest.raises(PlacingError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 \(from RAY_ADDRESS\)"):
            await choose_address("auto")
        monkeypatch.delenv("RAY_ADDRESS")
    assert await choose_address("auto") is None, "what the note says has ended"
    with pytest.raises(PlacingError, match=rf"no Ray cluster answers at {address} \(from `hosts.ray`\)"):
        await choose_address(address)
    for wrong in ("here", "here:", ":1", "here:port", "ray://127.0.0.1:1"):
        with pytest.raises(PlacingError, match="HOST:PORT"):
            await choose_address(wrong)


def test_ray_runs_without_usage_statistics_and_with_token_authentication(tmp_path: Path) -> None:
    prepare_environment("10.0.0.1:6379")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ
    token = tmp_path / ".config" / "lockstep" / "ray_token"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    text = token.read_text()
    assert len(text) == 64
    del os.environ["RAY_AUTH_TOKEN_PATH"]
    del os.environ["RAY_AUTH_MODE"]
    prepare_environment(None)
    assert token.read_text() == text, "there is one already"
    assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_existing_settings_of_ray_are_kept(tmp_path: Path) -> None:
    rays = tmp_path / ".ray" / "auth_token"
    rays.parent.mkdir()
    rays.write_text("a token of Ray's")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "1"
    prepare_environment("127.0.0.1:6379")
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(rays)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"
    for name in AUTH_VARIABLES:
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    prepare_environment("127.0.0.1:6379")
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert not (tmp_path / ".config").exists()


async def test_hanging_calls_to_ray_time_out_and_are_limited_in_number() -> None:
    calls, end, num_begun = Calls(max_calls=2), threading.Event(), 0

    def hang() -> None:
        nonlocal num_begun
        num_begun += 1
        end.wait()

    async def ask() -> str:
        with pytest.raises(PlacingError) as caught:
            await calls.do("it is asked", hang, 0.05)
        return str(caught.value)

    said = await asyncio.gather(*(ask() for _ in range(5)))
    assert set(said) == {"it is asked: Ray has not answered within 0.05 s"}
    assert num_begun == 2
    end.set()
    assert await calls.do("it answers", lambda: "yes") == "yes"
    with pytest.raises(PlacingError, match=r"it fails: invalid literal .*'no'$"):
        await calls.do("it fails", lambda: int("no"))


async def test_a_missing_ray_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlacingError, match=r"pip install 'lockstep-llm\[ray\]'"):
        await Connection("127.0.0.1:1").open()
