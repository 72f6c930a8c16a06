"""The hub is the one on 127.0.0.1, the cache is the test's own, and no other host can be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.hub.stand_in import NOWHERE, StandIn


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    from huggingface_hub import close_session, constants

    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    resolve = socket.getaddrinfo

    def only_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test would have asked the network for {host}"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    monkeypatch.setattr("lockstep.artifacts.hub.download.RETRY_WAIT_S", 0.01)
    with StandIn() as stand_in:
        monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
        template = stand_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        close_session()  # the next one reads the environment again
        yield stand_in
        close_session()
