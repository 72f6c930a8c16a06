"""A real browser for the pages of these tests, closed after each module because other modules run event loops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser import chromium
from tests.visits import visit

__all__ = ["browser", "visit"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched
