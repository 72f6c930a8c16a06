"""The load generator and the chat against a real `lockstep serve` process: both sides must count the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.cli.main import invoke
from tests.processes import Piped, run
from tests.server.process import ServerProcess, serve
from tests.waiting import until

KEY = "let-me-in"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("stub://alpha?step_ms=1", "--served-model-name", "alpha", "--api-key", KEY) as running:
        yield running


def counted(server: ServerProcess) -> dict[str, float]:
    """Samples of the server's page by name, over all labels; buckets are left out."""
    with server.client() as client:
        page = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith("lockstep:") and "le" not in sample.labels:
            name = sample.name.removeprefix("lockstep:")
            totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def bench(server: ServerProcess, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    command = ["bench", "serve", "--base-url", server.base_url, "--api-key", KEY, "--json", *arguments]
    assert invoke(command) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(("backend", "template_tokens"), [("openai", 0), ("openai-chat", 3)])
def test_both_sides_count_the_same_tokens(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], backend: str, template_tokens: int
) -> None:
    """Exact prompt lengths, every token of every answer, and R * (T - 1) latencies between them."""
    load = ("--random-input-len", "40", "--random-output-len", "6", "--num-prompts", "20", "--ignore-eos")
    before = counted(server)
    result = bench(server, capsys, "--backend", backend, *load, "--max-concurrency", "8")
    after = counted(server)
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_input_tokens"] == 20 * (40 + template_tokens)
    assert result["total_output_tokens"] == 20 * 6
    calibration = 1 if backend == "openai" else 0
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 20 * 6 + calibration
    latencies = "inter_token_latency_seconds_count"
    assert after[latencies] - before[latencies] == 20 * 5


def test_equal_hashes_of_a_trace_hit_the_prefix_cache(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The second and third request begin with the block of the first; the fourth shares nothing."""
    rows = [(0, [71, 72]), (300, [71, 73]), (600, [71, 74]), (900, [75, 76])]
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 600, "output_length": 2, "hash_ids": ids}) + "\n"
            for at, ids in rows
        )
    )
    before = counted(server)
    result = bench(server, capsys, "--dataset", f"trace:{trace}", "--backend", "openai", "--ignore-eos")
    after = counted(server)
    assert result["total_input_tokens"] == 4 * 600
    hits = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    assert 2 * 496 <= hits <= 2 * 528


def test_ctrl_c_ends_the_generations_too(server: ServerProcess) -> None:
    load = ("--random-input-len", "5", "--random-output-len", "4000", "--num-prompts", "4", "--ignore-eos")
    connection = ("--base-url", server.base_url, "--api-key", KEY)
    with Piped("bench", "serve", *connection, *load, "--json") as process:
        until(lambda: counted(server)["num_requests_running"] == 4)
        process.program.send_signal(signal.SIGINT)
        code, out, _ = process.communicate()
    assert (code, json.loads(out)["interrupted"]) == (130, 4)
    until(lambda: counted(server)["num_requests_running"] == 0)


def test_a_chat_is_answered_and_remembered(server: ServerProcess) -> None:
    connection = ("--base-url", f"{server.base_url}/v1", "--api-key", KEY)
    result = run("chat", *connection, "--max-tokens", "50", stdin="hello\nhello\n/clear\nhello\n")
    assert (result.returncode, result.stderr) == (0, "")
    first, second, third = result.stdout.splitlines()
    assert first == third == "[stub:alpha] ok len=5 max=50"
    assert second == f"[stub:alpha] ok len={10 + len(first)} max=50"


def test_raw_prompts_reach_the_model_as_they_are(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--base-url", server.base_url, "--api-key", KEY, "--raw", "-p", "abc", "--max-tokens", "50"]
    assert invoke(["chat", *arguments]) == 0
    assert capsys.readouterr().out == "[stub:alpha] ok len=3 max=50\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api-key", "wrong"), "answered 401"),
        (("--api-key", KEY, "--model", "beta"), "answered 404: The model `beta` does not exist; this server has"),
        (("--api-key", KEY, "--temperature", "-1"), "temperature is -1.0"),
        (("--api-key", KEY, "--max-tokens", "100000"), "answered 400: "),
        (("--api-key", KEY, "--extra-body", '{"no_such": 1}'), "no_such"),
    ],
)
def test_a_refusal_is_one_line(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert invoke(["chat", "--base-url", server.base_url, "-p", "x", *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
