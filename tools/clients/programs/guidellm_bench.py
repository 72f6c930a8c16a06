"""GuideLLM, which requests usage in every chunk: chat, text and responses, streamed."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.clients.programs.benches import NUM_REQUESTS, command, write_prompts, write_tokenizer
from tools.clients.programs.scenarios import check, run


def _asking(path: str) -> Callable[[str, str], None]:
    def scenario(base_url: str, model: str) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command(
                folder,
                "guidellm",
                "run",
                "--disable-console-interactive",
                "--backend",
                f"kind=openai_http,target={base_url.removesuffix('/v1')},model={model},request_format={path}",
                "--profile",
                "kind=concurrent,streams=2",
                "--constraint",
                f"kind=max_requests,count={NUM_REQUESTS}",
                "--tokenizer",
                f"kind=huggingface_auto,model={write_tokenizer(folder)}",
                "--data",
                f"kind=json_file,path={write_prompts(folder, 'prompt')}",
                "--output",
                f"kind=json,path={folder / 'report.json'}",
            )
            [benchmark] = json.loads((folder / "report.json").read_text())["benchmarks"]
            totals = benchmark["metrics"]["request_totals"]
            check(totals["successful"] == NUM_REQUESTS, f"not all were answered: {totals}")

    return scenario


if __name__ == "__main__":
    PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    sys.exit(run("guidellm", {f"benchmark of {path}": _asking(path) for path in PATHS}))
