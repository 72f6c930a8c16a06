"""A real browser for the pages of these tests."""

from tests.visits import browser, visit

__all__ = ["browser", "visit"]
