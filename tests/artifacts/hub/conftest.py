"""The hub is the one on 127.0.0.1, the cache is the test's own, and no other host can be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.hub.stand_in import StandIn, hub_environment


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    from huggingface_hub import close_session

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    resolve = socket.getaddrinfo

    def only_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test would have asked the network for {host}"
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    with StandIn() as stand_in, hub_environment(**stand_in.environment(tmp_path / "home")):
        close_session()  # the next one reads the environment again
        yield stand_in
        close_session()
