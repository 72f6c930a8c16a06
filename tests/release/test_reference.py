"""Documentation of the gate matches the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.release.outputs import fingerprints_of
from tools.gate_reference import PAGES, TABLES, with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_tables_match_the_code(page: Path) -> None:
    """`python -m tools.gate_reference` updates them."""
    text = page.read_text()
    assert with_tables(text) == text


def test_every_table_is_in_one_of_the_pages() -> None:
    told = "".join(page.read_text() for page in PAGES)
    assert [name for name in TABLES if told.count(f"<!-- {name} -->") != 1] == []


def test_the_documented_fingerprint_is_correct() -> None:
    told = "".join(page.read_text() for page in PAGES)
    assert f"The tokens 1, 2, 3 have `{fingerprints_of([([1, 2, 3], None)])[0]}`" in told
