"""Server of this checkout, for tests with real clients."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pocket"
EMBEDDER, RERANKER = "embedder", "reranker"
"""Models of `serving_vectors`."""
STOP_S = 30
_READY = re.compile(r"ready on (http://\S+),")


@contextlib.contextmanager
def serving(source: str = "pocket://", name: str = MODEL) -> Iterator[str]:
    """Run a server of one model on a free port during the block; yields its base URL."""
    with _serving(source, "--served-model-name", name) as url:
        yield url


@contextlib.contextmanager
def serving_vectors() -> Iterator[str]:
    """The same with a random embedder and a random reranker."""
    from tools.random_vector_models import write_manifest

    with tempfile.TemporaryDirectory() as folder, _serving("--manifest", str(write_manifest(Path(folder)))) as url:
        yield url


@contextlib.contextmanager
def _serving(*arguments: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lockstep", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "the process has a pipe"
        try:
            ready = next((match for line in process.stdout if (match := _READY.search(line))), None)
            if ready is None:
                raise SystemExit(f"the server did not start; `lockstep serve {' '.join(arguments)}` shows the reason")
            yield ready[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
