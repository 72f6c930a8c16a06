"""A real browser for the pages of reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser import chromium
from tests.replay.render.visits import Visit


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A page that has nothing to complain about when the test is over."""
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    visit = Visit(page)
    yield visit
    page.close()
    assert visit.complaints == []
