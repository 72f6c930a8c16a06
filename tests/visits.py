"""Visits to pages in a real browser: requests and complaints, what is painted, how legible colours are.

Packages that visit pages import the fixtures `browser` and `visit` into their conftest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request

from tests.browser import chromium

PAINTED = """canvas => {
  const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(data).size;
}"""
"""Colours of a canvas; an empty one has one."""


class Visit:
    """One page, and whatever it asked for or complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._asked)
        page.on("console", self._said)
        page.on("pageerror", self._failed)

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        self.complaints.append(message.text)

    def _failed(self, error: Error) -> None:
        self.complaints.append(str(error))

    def open(self, path: Path) -> Page:
        self.page.goto(path.as_uri())
        return self.page


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


def contrasts(browser: Browser, path: Path, scheme: str, names: list[str]) -> list[float]:
    """Of colours to the ground that they stand on, by WCAG 2.1's formula."""
    page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
    page.goto(path.as_uri())
    colors = page.evaluate(
        "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())",
        [*names, "surface"],
    )
    page.close()
    *inks, ground = map(_luminance, colors)
    return [(max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) for ink in inks]


def _luminance(color: str) -> float:
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
