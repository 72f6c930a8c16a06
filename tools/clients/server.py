"""Server of this checkout, for tests with real clients."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "pocket"
STOP_S = 30
_READY = re.compile(r"ready on (http://\S+),")


@contextlib.contextmanager
def serving(source: str = "pocket://", name: str = MODEL) -> Iterator[str]:
    """Run a server of one model on a free port during the block; yields its base URL."""
    command = [sys.executable, "-m", "lockstep", "serve", source, "--served-model-name", name, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None, "the process has a pipe"
        try:
            ready = next((match for line in process.stdout if (match := _READY.search(line))), None)
            if ready is None:
                raise SystemExit(f"the server did not start; `lockstep serve {source}` shows the reason")
            yield ready[1]
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
