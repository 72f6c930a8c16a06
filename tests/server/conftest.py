"""Servers for the whole session: in this process on pocket and on the stub, and pocket in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.living import Living, living
from tests.server.process import ServerProcess, serve


@pytest.fixture(scope="session")
def pocket() -> Iterator[Living]:
    with living("pocket://", name="pocket") as server:
        yield server


@pytest.fixture(scope="session")
def stub() -> Iterator[Living]:
    with living("stub://alpha", name="alpha") as server:
        yield server


@pytest.fixture(scope="session")
def served() -> Iterator[ServerProcess]:
    """Pocket, as a user serves it."""
    with serve("pocket://", "--served-model-name", "pocket") as running:
        yield running


@pytest.fixture(scope="session")
def client(served: ServerProcess) -> Iterator[openai.OpenAI]:
    """The official client of `served`."""
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made
