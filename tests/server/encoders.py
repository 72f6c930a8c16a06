"""A server process of a random embedder, a random reranker, and pocket as a model for text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.server.process import IN_THREAD, ServerProcess, serve
from tools.random_vector_models import write_manifest


@contextlib.contextmanager
def serving_encoders(folder: Path) -> Iterator[ServerProcess]:
    with serve("--manifest", str(write_manifest(folder)), *IN_THREAD) as running:
        yield running
