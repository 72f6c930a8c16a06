"""AIPerf: chat, text and embeddings."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.clients.programs.benches import NUM_REQUESTS, command, write_prompts, write_tokenizer
from tools.clients.programs.scenarios import check, run

SOME_TEXT = ("--extra-inputs", "min_tokens:4")
"""Option for answers with text: AIPerf treats an empty answer as an error, and a model may end at once."""


def _asking(kind: str, *more: str) -> Callable[[str, str], None]:
    def scenario(base_url: str, model: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command(
                folder,
                "aiperf",
                "profile",
                "--model",
                model,
                "--url",
                base_url.removesuffix("/v1"),
                "--endpoint-type",
                kind,
                "--tokenizer",
                str(write_tokenizer(folder)),
                "--input-file",
                str(write_prompts(folder, "text")),
                "--custom-dataset-type",
                "single_turn",
                "--request-count",
                str(NUM_REQUESTS),
                "--concurrency",
                "2",
                "--artifact-dir",
                str(folder / "report"),
                "--ui",
                "none",
                *more,
            )
            [report] = (folder / "report").rglob("profile_export_aiperf.json")
            told = json.loads(report.read_text())
            check(told["request_count"]["avg"] == NUM_REQUESTS, "not all were answered")
            check(not told.get("error_summary"), f"errors: {told.get('error_summary')}")

    return scenario


if __name__ == "__main__":
    sys.exit(
        run(
            "aiperf",
            {
                "profile of chat, streamed": _asking("chat", "--streaming"),
                "profile of chat": _asking("chat"),
                "profile of completions, streamed": _asking("completions", "--streaming", *SOME_TEXT),
                "profile of responses, streamed": _asking("responses", "--streaming"),
                "profile of embeddings": _asking("embeddings"),
            },
        )
    )
