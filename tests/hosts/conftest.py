"""Nodes of Ray that the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.two_nodes import WHY_NOT, Nodes, started


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with started() as running:
        yield running
