"""Rows of docs/coming-from.md, and which of their sentences a test has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.documents.pages import Block, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PATH = "docs/coming-from.md"
PAGE = (ROOT / PATH).read_text(encoding="utf-8")
ORIGINS = ("runtime-lab", "NRT", "ruvllm", "oxillama")
Test = Callable[..., Any]


class Row(NamedTuple):
    """One row of a table below a heading."""

    origin: str
    """The section's system."""
    kind: str
    """The heading of the table."""
    cells: tuple[str, ...]

    @property
    def claims(self) -> tuple[str, ...]:
        """Texts in code in its second cell."""
        return code_of(self.cells[1])

    @property
    def sentence(self) -> str:
        """The third cell as it is written; empty where there is none."""
        return self.cells[2] if len(self.cells) > 2 else ""


def code_of(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def rows_of(page: str) -> Iterator[Row]:
    """Rows of all tables below a ``###`` heading, without their heads."""
    origin = kind = ""
    is_below_head = False
    for line in page.splitlines():
        if line.startswith("## "):
            origin, kind = line.removeprefix("## ").removeprefix("From "), ""
        elif line.startswith("### "):
            kind = line.removeprefix("### ")
        if line.startswith("| ") and is_below_head and kind:
            yield Row(origin, kind, tuple(cell.strip() for cell in line.strip().strip("|").split("|")))
        is_below_head = line.startswith("|---") or (is_below_head and line.startswith("|"))


ROWS = tuple(rows_of(PAGE))
BLOCKS: tuple[Block, ...] = tuple(blocks_of(PATH, PAGE))
KINDS_OF_VALUES = ("Sizes", "The published figures", "Figures beside NRT's")
"""Tables whose third cells are values: of the first two `test_names` computes them, the last was measured."""
SENTENCES = frozenset(row.sentence for row in ROWS if row.sentence and row.kind not in KINDS_OF_VALUES)
CHECKED: set[str] = set()
"""Kinds of tables whose second cells a test looks at."""
RUN: set[str] = set()
"""Sentences of third cells that a test runs."""


def of_kind(kind: str, origin: str = "") -> tuple[Row, ...]:
    return tuple(row for row in ROWS if row.kind == kind and origin in ("", row.origin))


def claims_of(kind: str) -> pytest.MarkDecorator:
    """A test for each text in code in the second cells of these tables."""
    CHECKED.add(kind)
    claims = [claim for row in of_kind(kind) for claim in row.claims]
    return pytest.mark.parametrize("claim", list(dict.fromkeys(claims)))


def states(*sentences: str) -> Callable[[Test], Test]:
    """A test that runs sentences of third cells, which must be on the page word by word."""
    for sentence in sentences:
        assert sentence in SENTENCES, f"{PATH} has no row that states {sentence!r}"
    RUN.update(sentences)
    return lambda test: test
