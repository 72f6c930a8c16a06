"""What one processor computed another one computes again: recordings, kept KV and digests.

Processors are stood in for by instruction sets, threads and NumPy's code for this processor, each of which is withheld.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.executors.model_digest import model_digest
from lockstep.executors.options import ExecutorOptions
from tests.executors.native.loading import EACH_ISA, USABLE
from tests.executors.native.test_same_results_everywhere import optional_features
from tests.server.process import IN_THREAD, ServerProcess
from tests.waiting import until
from tools.golden.native_digests import DIGESTS

TEXT = "I was charged twice for my subscription last week, and nobody answers my letters. " * 4
WITHHELD = {"NPY_DISABLE_CPU_FEATURES": " ".join(optional_features())}


@contextmanager
def served(*flags: str) -> Iterator[ServerProcess]:
    with ServerProcess("pocket://", *IN_THREAD, *flags) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def ask(server: ServerProcess, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "pocket", "messages": [{"role": "user", "content": text}], "max_tokens": 24, **more}
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def command(*arguments: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of each way of sampling, with log-probabilities, on two threads with the best instruction set."""
    folder = tmp_path_factory.mktemp("recording") / "trace"
    with served("--isa", USABLE[0], "--threads", "2", "--trace", str(folder), "--trace-content") as server:
        ways: list[dict[str, Any]] = [
            {"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.8, "top_k": 30},
            {"temperature": 1.2, "min_p": 0.05}, {"temperature": 1.0}, {"temperature": 0.7, "prompt_logprobs": 3},
        ]  # fmt: skip
        for seed, way in enumerate(ways):
            ask(server, f"My order {seed} did not arrive.", seed=seed, logprobs=True, top_logprobs=3, **way)
    return folder


@pytest.mark.parametrize(
    ("isa", "threads", "environ"),
    [("avx2", "1", {}), ("portable", "2", {}), ("portable", "1", WITHHELD), (USABLE[0], "3", WITHHELD)],
    ids=["avx2, one thread", "portable", "portable, without NumPy's features", "three threads, without them"],
)
def test_a_recording_executes_on_another_processor(
    recording: Path, isa: str, threads: str, environ: dict[str, str]
) -> None:
    if isa not in USABLE:
        pytest.skip(f"no {isa} here")
    flags = ("--model", "pocket://", "--isa", isa, "--threads", threads)
    out = command("replay", "--execute", str(recording), *flags, environ=environ)
    assert "every token equal" in out


def test_kept_keys_and_values_are_restored_on_another_processor(tmp_path: Path) -> None:
    folder = ("--kv-dir", str(tmp_path / "kv"), "--kv-dir-mb", "64")
    asked = {"temperature": 0, "logprobs": True, "top_logprobs": 3}
    with served("--isa", USABLE[0], "--threads", "2", *folder) as server:
        first = ask(server, TEXT, session_id="s", **asked)
        until(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) >= first["usage"]["prompt_tokens"] // 32)
    with served("--isa", "portable", "--threads", "1", *folder) as server:
        again = ask(server, TEXT, session_id="s", **asked)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize("isa", EACH_ISA)
def test_pocket_has_the_digest_in_the_repository(isa: str) -> None:
    options = LoadOptions(EngineOptions(num_blocks=64), ExecutorOptions(isa=isa))
    model, config = load_model("pocket://", options)
    digest = model_digest(model.executor, config.num_blocks)
    model.close()
    assert digest == json.loads(DIGESTS.read_text())["pocket://"]


def test_verify_prints_the_digest() -> None:
    printed = json.loads(command("models", "verify", "pocket://", "--json", environ=WITHHELD))
    assert printed["digest"] == json.loads(DIGESTS.read_text())["pocket://"]
    assert printed["deterministic"] is True
