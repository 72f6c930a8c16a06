"""What programs of embedders and rerankers have in common: texts, and what holds for every client."""

from __future__ import annotations

from collections.abc import Sequence

from tools.clients.programs.scenarios import check

QUERY = "I want my money back"
DOCUMENTS = ("my login page shows an error", "I was charged twice for one order", "is this clause enforceable?")
SIZE = 64
"""Numbers in a vector of the embedder."""


def check_vectors(vectors: Sequence[Sequence[float]], count: int, size: int = SIZE) -> None:
    check([len(vector) for vector in vectors] == [size] * count, "another number or size of vectors")
    check(all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in vectors), "a length is not 1")


def check_ranking(ranking: Sequence[tuple[int, float]], count: int = len(DOCUMENTS)) -> None:
    """Check positions with their scores."""
    check(len(ranking) == count, f"{len(ranking)} results in place of {count}")
    check(len({index for index, _ in ranking}) == count, "a document occurs twice")
    check([score for _, score in ranking] == sorted((score for _, score in ranking), reverse=True), "not by score")
