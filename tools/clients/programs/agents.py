"""Common parts of coding agents: a server with scripted answers, and a working folder.

A model with random weights calls no tools, so the stub answers: first with a call of the agent's file-reading tool,
then, when the file's content is in the prompt, with that content.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.clients.programs.scenarios import check
from tools.clients.server import serving

NAME = "agent"
FILE, CONTENT = "note.txt", "the-line-of-the-note"
ASK = f"Which line does {FILE} have?"
CONTEXT_TOKENS = 100_000
"""Context size in tokens. A token of the stub is a byte, so an agent's prompt fits, but its maximum output does not fit
as well."""
AGENT_S = 120
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR")
"""Environment variables that an agent inherits."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """A folder with a file, a separate home for the agent, and the server."""

    url: str
    """Base URL without ``/v1``."""
    folder: Path
    home: Path

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> list[dict[str, Any]]:
        """Events of an agent that writes JSON lines; AssertionError with its output if it fails."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"HOME": str(self.home), **variables}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=AGENT_S,
            check=False,
        )
        check(done.returncode == 0, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextlib.contextmanager
def workplace(tool: str, arguments: Mapping[str, Any]) -> Iterator[Workplace]:
    """A workplace whose model calls a tool once; ``{folder}`` in the arguments is the folder."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name).resolve()
        folder, home, answers = base / "work", base / "home", base / "answers.jsonl"
        folder.mkdir()
        home.mkdir()
        (folder / FILE).write_text(CONTENT + "\n")
        call = json.dumps({"name": tool, "arguments": arguments}).replace("{folder}", str(folder))
        lines = [
            {"when": [ASK, CONTENT], "answer": f"It has {CONTENT}."},
            {"when": ASK, "answer": f"I read it.\n<tool_call>\n{call}\n</tool_call>"},
        ]
        answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = f"stub://{NAME}?max_model_len={CONTEXT_TOKENS}&answers={answers}"
        with serving(source, NAME) as url:
            yield Workplace(url, folder, home)


def version_of(program: str) -> str:
    """Version that a program prints."""
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=AGENT_S).stdout
    found = re.search(r"\d+\.\d+\.\d+\S*", printed)
    return printed.strip() if found is None else found[0]
