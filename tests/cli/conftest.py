"""A server whose behaviour a test decides, for the verbs that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.standin import Behaviour, serving


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(behaviour: Behaviour) -> Iterator[str]:
    with serving(behaviour) as base_url:
        yield base_url
