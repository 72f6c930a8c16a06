"""`lockstep run` with an embedding model or a reranker: vectors of texts with their cosines, or scores of documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.cli.conversation import prompt_of, whole_text
from lockstep.errors import UsageError
from lockstep.shown import aligned, printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lockstep.engine.llm import LLM

MAX_TABLE = 20
"""Maximum number of texts for which the cosines of all pairs are printed."""
_SHOWN_NUMBERS = 4
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class VectorFlags:
    """Flags for embedding models and rerankers."""

    prompt_name: str | None = None
    """Name of the embedding model's prompt that is put before each text; None: the model's default."""
    dimensions: int | None = None
    """Elements to keep from the start of each vector; None: all of them."""
    instruction: str | None = None
    """What relevance means, for a reranker that reads an instruction; None: its default."""
    truncate_prompt_tokens: int | None = None
    """Tokens to keep of a longer text, or of a query with its document; -1: as many as the model takes; None: refuse
    what is too long."""

    def check(self, task: str) -> None:
        """UsageError for a flag that a model with this task does not have."""
        fits = {
            "prompt_name": ("embed",),
            "dimensions": ("embed",),
            "instruction": ("rerank",),
            "truncate_prompt_tokens": ("embed", "rerank"),
        }
        for name, needed in fits.items():
            if getattr(self, name) is not None and task not in needed:
                flag, tasks = f"--{name.replace('_', '-')}", " or ".join(map(repr, needed))
                raise UsageError(f"{flag} is for models with the task {tasks}; this model's task is {task!r}")


def print_vectors(llm: LLM, texts: Sequence[str], given: VectorFlags, as_json: bool) -> None:
    """Print the vector of each text: whole as JSON, else its first numbers, and the cosines of the texts.

    Raises:
        UsageError: there is no text.
    """
    texts = [prompt_of(text) for text in texts] or _lines("text")
    vectors = llm.embed(
        texts,
        dimensions=given.dimensions,
        prompt_name=given.prompt_name,
        truncate_prompt_tokens=given.truncate_prompt_tokens,
    )
    if as_json:
        data = [{"text": text, "vector": vector.tolist()} for text, vector in zip(texts, vectors, strict=True)]
        _print_json(llm, {"data": data})
    else:
        print(_vectors_text(texts, vectors))


def print_scores(llm: LLM, texts: Sequence[str], given: VectorFlags, as_json: bool) -> None:
    """Print the score of each document for a query: as JSON in their order, else by falling score.

    Args:
        texts: the query and its documents; without documents, each line of standard input is one.

    Raises:
        UsageError: there is no query, or no document.
    """
    if not texts:
        raise UsageError('this model scores documents: lockstep run MODEL "query" "document" "another document"')
    query, *documents = map(prompt_of, texts)
    documents = documents or _lines("document")
    scores = llm.score(
        query, documents, instruction=given.instruction, truncate_prompt_tokens=given.truncate_prompt_tokens
    )
    if as_json:
        data = [
            {"index": index, "document": document, "score": score}
            for index, (document, score) in enumerate(zip(documents, scores, strict=True))
        ]
        _print_json(llm, {"query": query, "data": data})
        return
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    print(aligned((f"{scores[index]:.4f}", printable(documents[index])) for index in order))


def texts_of(arguments: Sequence[str] | None, prompt: str | None) -> list[str]:
    """Texts of the arguments, or of ``-p``; ``-`` stands for standard input. UsageError if both are given."""
    if arguments and prompt is not None:
        raise UsageError("a TEXT and --prompt are both given; give one of them")
    return list(arguments or ()) if prompt is None else [prompt]


def _lines(what: str) -> list[str]:
    """Lines of standard input that are not empty; UsageError if there are none, or if it is a terminal."""
    lines = [] if sys.stdin.isatty() else [line.strip() for line in whole_text(sys.stdin.read(), what).splitlines()]
    if not any(lines):
        raise UsageError(f"no {what} is given; add it to the command, or send one per line to standard input")
    return [line for line in lines if line]


def _print_json(llm: LLM, facts: dict[str, Any]) -> None:
    model = llm.model
    found = {"model": model.name, "task": model.task, **facts, "artifact": model.fingerprint}
    print(json.dumps(found, ensure_ascii=False))


def _vectors_text(texts: Sequence[str], vectors: npt.NDArray[np.float32]) -> str:
    """A line for each vector, and a table of the cosines of several texts."""
    import numpy as np

    from lockstep.engine.scoring import cosine

    rows = []
    for number, (text, vector) in enumerate(zip(texts, vectors, strict=True), 1):
        first = " ".join(f"{value: .4f}" for value in vector[:_SHOWN_NUMBERS])
        more = " ..." if len(vector) > _SHOWN_NUMBERS else ""
        norm = f"norm {float(np.linalg.norm(vector)):.4f}"
        rows.append((f"{number}", _short(text), f"{len(vector)} numbers", f"{first}{more}", norm))
    lines = [aligned(rows)]
    if 1 < len(texts) <= MAX_TABLE:
        head = ("", *(f"{number: 7}" for number in range(1, len(texts) + 1)))
        table = [
            (f"{number}", *(f"{cosine(one, other): .4f}" for other in vectors)) for number, one in enumerate(vectors, 1)
        ]
        lines += ["", "cosines", aligned([head, *table])]
    elif len(texts) > MAX_TABLE:
        lines += ["", f"cosines are printed for at most {MAX_TABLE} texts; --json prints whole vectors"]
    return "\n".join(lines)


def _short(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."
