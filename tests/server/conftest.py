"""One server on pocket and one on the stub for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.living import Living, living


@pytest.fixture(scope="session")
def pocket() -> Iterator[Living]:
    with living("pocket://", name="pocket") as server:
        yield server


@pytest.fixture(scope="session")
def stub() -> Iterator[Living]:
    with living("stub://alpha", name="alpha") as server:
        yield server


@pytest.fixture(scope="session")
def client(pocket: Living) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pocket.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made
